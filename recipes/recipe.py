"""The parts in which recipes differ, for command line, runs and comparisons."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recipes.metrics import Metric
from recipes.models import Layers
from recipes.settings import Settings


class BatchSource(Protocol):
    """Batches of a split."""

    def __len__(self) -> int:
        """The number of batches of an epoch."""

    def epoch(self, number: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields inputs of the model and targets, for one pass over the split."""


@dataclass(frozen=True)
class Recipe:
    """A kind of training run.

    Attributes:
        module: of the package `recipes`, for the help text.
        description: of the help text.
        settings: class of the settings.
        metric: compares runs.
        folder: start of the name of a run's folder, for its settings.
        title: above pictures, for the settings of a run.
        load_data: the data that the settings name.
        make_batches: of these data, for training and for testing.
        build_model: for these data, at full precision for backward.
        layers: of a model without forward quantizers.
        prepare: called with a new model, the settings and its training batches, before anything is measured; None for
            nothing.
        quantize_loss: whether a backward quantizer also packs the loss's saved tensors.
        finish: called with a trained model, the settings, the data and the folder of the run; None for nothing more.
    """

    module: str
    description: str
    settings: type[Settings]
    metric: Metric
    folder: Callable[[Any], str]
    title: Callable[[Any], str]
    load_data: Callable[[Any], Any]
    make_batches: Callable[[Any, Any, torch.device], tuple[BatchSource, BatchSource]]
    build_model: Callable[[Any, Any, Layers], nn.Module]
    layers: Layers
    prepare: Callable[[nn.Module, Any, BatchSource], None] | None = None
    quantize_loss: bool = False
    finish: Callable[[nn.Module, Any, Any, Path], None] | None = None
