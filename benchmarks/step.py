"""A training step that benchmarks and tests run: a model, a batch and the loss of its library."""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import brevact
from brevact.policy.attach import region_of_step
from recipes.torchvision_ops import declare_missing_ops

declare_missing_ops()  # transformers, timm and ultralytics import torchvision if it is installed

#: The loss of a model on a batch; it need not call the model's own ``forward``.
Loss = Callable[[nn.Module, Any], Tensor]


class Step(NamedTuple):
    """A model in training mode, a batch, the loss, and further batches by number (None: permutations of the batch)."""

    model: nn.Module
    batch: Any
    loss: Loss
    draw: Callable[[int], Any] | None = None

    def batches(self, count: int) -> list[Any]:
        """Return the batch and others like it."""
        return [self.batch, *((self.draw or self._permuted)(number) for number in range(1, count))]

    def _permuted(self, number: int) -> Any:
        """The batch with the elements of each tensor in another order, so that their ranges stay."""
        generator = torch.Generator().manual_seed(number)
        return tree_map_only(
            Tensor,
            lambda x: x.flatten()[torch.randperm(x.numel(), generator=generator).to(x.device)].view(x.shape),
            self.batch,
        )


class Model(NamedTuple):
    """A builder of a step, and the libraries that it imports."""

    libraries: tuple[str, ...]
    make: Callable[[], Step]

    def missing(self) -> list[str]:
        return [name for name in self.libraries if importlib.util.find_spec(name) is None]

    def build(self, seed: int = 0) -> Step:
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            step = self.make()
        step.model.train()
        return step


def supervised(criterion: Callable[[Any, Tensor], Tensor]) -> Loss:
    """Return the loss of a model's output for x on a batch (x, y)."""
    return lambda model, batch: criterion(model(batch[0]), batch[1])


#: Cross-entropy over the last dimension of the logits.
classified = supervised(lambda logits, y: nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten()))


def own_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Loss that a model of transformers computes itself."""
    loss: Tensor = model(**batch).loss
    return loss


def loss_of(step: Step, seed: int | None = None) -> Tensor:
    """Loss in the region of a model with a policy; the seed fixes dropout and the noise of quantizers."""
    if seed is not None:
        torch.manual_seed(seed)
    with region_of_step(step.model):
        return step.loss(step.model, step.batch)


def quantized(step: Step, policy: Any) -> Step:
    """The step with a copy of the model that has a policy."""
    return step._replace(model=brevact.quantize_backward(copy.deepcopy(step.model), policy))


def gradient(step: Step, seed: int) -> Tensor:
    """All weight gradients in one vector, at a seed."""
    step.model.zero_grad()
    loss_of(step, seed).backward()
    return torch.cat([p.grad.flatten() for p in step.model.parameters() if p.grad is not None])


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def mean_projection(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Mean of <h, g> / <g, g> over pairs (h, g), and its standard error."""
    values = torch.tensor([float(h @ g / (g @ g)) for h, g in pairs])
    return float(values.mean()), float(values.std() / math.sqrt(len(pairs)))
