"""Training steps of two models in several variants, a row each."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

import brevact
from benchmarks.gpu.processes import Row
from benchmarks.gpu.timing import limit_threads
from benchmarks.gpu.training import WARM_UP, Training, Variant, Workload, compiler
from recipes.models import FloatLayers, ResNet, Stage, efficientnetv2, resnet50
from recipes.models.efficientnetv2 import EfficientNetV2, Size

COLUMNS = (
    *("model", "batch_size", "image_size", "memory_format", "dtype", "variant", "activations_mib", "peak_mib"),
    *("reserved_mib", "images_s", "images_s_min", "images_s_max", "steps", "backend", "tf32", "threads", "error"),
)
_MIB = 2**20
_TINY = Size((Stage("fused", 4, 2, 8, 1), Stage("mbconv", 4, 2, 16, 1)), head=32)
WORKLOADS = {
    "efficientnetv2-s": Workload(
        lambda: efficientnetv2("s", image_size=32, classes=10, layers=FloatLayers()), 128, 32, 10
    ),
    "resnet50": Workload(lambda: resnet50(classes=1000), 64, 224, 1000),
}
SMOKE_WORKLOADS = {
    "efficientnetv2-s": Workload(lambda: EfficientNetV2(_TINY, classes=10, layers=FloatLayers()), 4, 32, 10),
    "resnet50": Workload(lambda: ResNet((1, 1), classes=10, width=8), 4, 64, 10),
}


VARIANTS = {
    "plain": Variant(),
    "plain-compiled": Variant(compiled=True),
    "checkpoint": Variant(checkpointed=True),
    "2bit": Variant(quantizer=brevact.StochBackward2bit),
    "4bit": Variant(quantizer=brevact.StochBackward4bit),
    "2bit-compiled": Variant(quantizer=brevact.StochBackward2bit, compiled=True),
}


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """One variant of a model, trained in one dtype.

    Args:
        model: key of `WORKLOADS`.
        dtype: "float32", or "bfloat16" for autocast.
        variant: key of `VARIANTS`.
        device: "cuda" or "cpu".
        channels_last: memory format of model and images.
        seconds: of each timed run.
        smoke: a tiny model and batch of the same kind.
    """

    model: str
    dtype: str
    variant: str
    device: str
    channels_last: bool
    seconds: float
    smoke: bool

    def __str__(self) -> str:
        return f"{self.model}, {self.dtype}, {self.variant}"

    @property
    def is_compiled(self) -> bool:
        """Whether it takes long to get ready."""
        return VARIANTS[self.variant].compiled

    @property
    def workload(self) -> Workload:
        """Model and batch."""
        return (SMOKE_WORKLOADS if self.smoke else WORKLOADS)[self.model]

    def failed(self, error: str) -> list[Row]:
        """The row of a case that could not be measured."""
        return [self._row(error=error)]

    def prepare(self) -> Callable[[], list[Row]]:
        """Build the model, run the first steps, and return what measures."""
        dtype, device = getattr(torch, self.dtype), torch.device(self.device)
        limit_threads(device)
        training = Training(self.workload, VARIANTS[self.variant], dtype, device, self.channels_last)
        for _ in range(WARM_UP):
            training.step()
        training.release()
        return lambda: self._measure(training)

    def _measure(self, training: Training) -> list[Row]:
        memory = training.memory() if self.device == "cuda" else {}
        steps, rates = training.images_a_second(self.seconds)
        return [
            self._row(
                **{f"{name}_mib": f"{count / _MIB:.1f}" for name, count in memory.items()},
                images_s=f"{statistics.median(rates):.1f}",
                images_s_min=f"{min(rates):.1f}",
                images_s_max=f"{max(rates):.1f}",
                steps=steps,
                threads=torch.get_num_threads(),
                tf32=_tf32() if self.device == "cuda" else "",
            )
        ]

    def _row(self, **values: object) -> Row:
        known = {
            "model": f"{self.model} (tiny)" if self.smoke else self.model,
            "batch_size": self.workload.batch_size,
            "image_size": self.workload.image_size,
            "memory_format": "channels_last" if self.channels_last else "contiguous",
            "dtype": self.dtype,
            "variant": self.variant,
            "backend": compiler(torch.device(self.device)) if self.is_compiled else "eager",
        }
        return {**dict.fromkeys(COLUMNS, ""), **known, **values}


def _tf32() -> str:
    """Which float32 operations round their inputs to TF32: PyTorch's settings, left as they are."""
    matmul, convolution = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    return f"matmul {'on' if matmul else 'off'}, convolution {'on' if convolution else 'off'}"
