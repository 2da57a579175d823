"""A training step to be measured: activations before backward, peak memory and samples a second."""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import brevact
from benchmarks.gpu.workloads import Workload
from benchmarks.recompute import with_checkpoints

WARM_UP = 3
"""Steps before anything is measured."""
_RUNS = 5


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What a step stores for backward, and who runs it.

    Args:
        policy: of the whole model, in words that `brevact.parse_policy` reads.
        compiled: by `torch.compile`, as one graph if there is a policy.
        captured: the whole step as a CUDA graph, which is replayed: nothing waits for Python.
        checkpointed: each block keeps its input alone.
    """

    policy: str | None = None
    compiled: bool = False
    captured: bool = False
    checkpointed: bool = False


class Training:
    """A model in training on one batch.

    Args:
        workload: model and batch.
        variant: how it is trained.
        dtype: float32, or another one for autocast.
        device: where.
        channels_last: memory format of models and batches of images and volumes.
        samples: of a batch; None for the workload's.
    """

    def __init__(
        self,
        workload: Workload,
        variant: Variant,
        dtype: torch.dtype,
        device: torch.device,
        channels_last: bool,
        samples: int | None = None,
    ) -> None:
        torch.manual_seed(0)
        self._device, self._dtype, self._workload = device, dtype, workload
        self._channels_last = channels_last
        self._captures = variant.captured and device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self.load(samples or workload.samples)
        model = workload.build().to(device)
        if channels_last:
            model = model.to(memory_format=_channels_last(self._inputs))
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=self._captures)
        if variant.checkpointed:
            with_checkpoints(model)
        self._packed = None
        if variant.policy is not None:
            self._packed = brevact.quantize_backward(model, variant.policy)
        self.model: nn.Module = model
        if variant.compiled:
            self.model = torch.compile(model, backend=compiler(device), fullgraph=variant.policy is not None)

    def load(self, samples: int) -> None:
        """Take another batch.

        Args:
            samples: of the batch.
        """
        self._inputs, self._targets = self._workload.batch(samples, self._device)
        if self._channels_last and self._inputs.dim() > 3:
            self._inputs = self._inputs.contiguous(memory_format=_channels_last(self._inputs))

    def step(self) -> None:
        """One step of the optimizer."""
        if self._captures:
            if self._graph is None:
                self._graph = self._capture()
            self._graph.replay()
            return
        self._step()

    def _step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        _, loss = self._forward()
        loss.backward()
        self._optimizer.step()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """The whole step as a graph, after steps on a side stream, as PyTorch asks."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            self._step()
        return graph

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
            the allocator takes from the device for that. Of a captured step reserved memory alone is known.
        """
        if self._captures:
            return {"reserved": torch.cuda.max_memory_reserved(self._device)}
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

    def samples_a_second(self, seconds: float) -> tuple[int, list[float]]:
        """Time runs of several steps; the device is synchronized before and after each run.

        Args:
            seconds: of a run, about.

        Returns:
            Steps a run, and the samples a second of each run.
        """
        self._time(WARM_UP)
        steps = max(1, round(seconds / (self._time(WARM_UP) / WARM_UP)))
        return steps, [steps * len(self._inputs) / self._time(steps) for _ in range(_RUNS)]

    def _forward(self) -> tuple[Tensor, Tensor]:
        region = nullcontext() if self._packed is None else brevact.backward_quant(self._packed)
        with region, torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            output = self.model(self._inputs)
            return output, nn.functional.cross_entropy(output.flatten(0, -2), self._targets.flatten())

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


def _channels_last(x: Tensor) -> torch.memory_format:
    return torch.channels_last_3d if x.dim() == 5 else torch.channels_last
