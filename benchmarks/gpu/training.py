"""A training step to be measured: activations before backward, peak memory and images a second."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import brevact

WARM_UP = 3
"""Steps before anything is measured."""
_RUNS = 5


@dataclass(frozen=True)
class Workload:
    """A model and its batch.

    Args:
        build: makes the model; its submodule `blocks` holds the blocks to checkpoint.
        batch_size: images.
        image_size: height and width.
        classes: outputs.
    """

    build: Callable[[], nn.Module]
    batch_size: int
    image_size: int
    classes: int


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What a step stores for backward, and who runs it.

    Args:
        quantizer: backward quantizer of the whole model.
        compiled: by `torch.compile`, as one graph if there is a quantizer.
        checkpointed: each block keeps its input alone.
    """

    quantizer: type | None = None
    compiled: bool = False
    checkpointed: bool = False


class Training:
    """A model in training on one batch.

    Args:
        workload: model and batch.
        variant: how it is trained.
        dtype: float32, or another one for autocast.
        device: where.
        channels_last: memory format of model and images.
    """

    def __init__(
        self, workload: Workload, variant: Variant, dtype: torch.dtype, device: torch.device, channels_last: bool
    ) -> None:
        torch.manual_seed(0)
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        shape = (workload.batch_size, 3, workload.image_size, workload.image_size)
        self._device, self._dtype = device, dtype
        self._images = torch.randn(shape, device=device).contiguous(memory_format=memory_format)
        self._labels = torch.randint(0, workload.classes, (workload.batch_size,), device=device)
        model = workload.build().to(device, memory_format=memory_format)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if variant.checkpointed:
            _checkpoint_blocks(model)
        if variant.quantizer is not None:
            brevact.quantize_backward(model, variant.quantizer)
        self.model = model
        if variant.compiled:
            fullgraph = variant.quantizer is not None
            self.model = torch.compile(model, backend=compiler(device), fullgraph=fullgraph)

    def step(self) -> None:
        """One step of the optimizer."""
        self._optimizer.zero_grad(set_to_none=True)
        _, loss = self._forward()
        loss.backward()
        self._optimizer.step()

    def release(self) -> None:
        """Give up gradients and cached memory."""
        self._optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.synchronize(self._device)

    def memory(self) -> dict[str, int]:
        """Bytes, measured on a CUDA device.

        Returns:
            `activations`: allocated before backward, less what was at the start of the step, the output and the loss;
            `peak`: the most that a whole step allocates, parameters, gradients and optimizer included; `reserved`: what
            the allocator takes from the device for that.
        """
        self.release()
        start = torch.cuda.memory_allocated(self._device)
        output, loss = self._forward()
        activations = torch.cuda.memory_allocated(self._device) - start
        activations -= sum(x.untyped_storage().nbytes() for x in (output, loss))
        del output, loss
        self.release()
        torch.cuda.reset_peak_memory_stats(self._device)
        self.step()
        torch.cuda.synchronize(self._device)
        return {
            "activations": activations,
            "peak": torch.cuda.max_memory_allocated(self._device),
            "reserved": torch.cuda.max_memory_reserved(self._device),
        }

    def images_a_second(self, seconds: float) -> tuple[int, list[float]]:
        """Time runs of several steps; the device is synchronized before and after each run.

        Args:
            seconds: of a run, about.

        Returns:
            Steps a run, and the images a second of each run.
        """
        self._time(WARM_UP)
        steps = max(1, round(seconds / (self._time(WARM_UP) / WARM_UP)))
        return steps, [steps * len(self._images) / self._time(steps) for _ in range(_RUNS)]

    def _forward(self) -> tuple[Tensor, Tensor]:
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            output = self.model(self._images)
            return output, nn.functional.cross_entropy(output, self._labels)

    def _time(self, steps: int) -> float:
        self._synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def compiler(device: torch.device) -> str:
    """Backend of `torch.compile`: on the CPU one that stops at the graphs, as C++ would take minutes.

    Args:
        device: where the model runs.

    Returns:
        Its name.
    """
    return "inductor" if device.type == "cuda" else "aot_eager"


def _checkpoint_blocks(model: nn.Module) -> None:
    """Let each block keep its input alone and compute the rest again."""
    for block in model.get_submodule("blocks").children():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
