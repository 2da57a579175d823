"""Training steps of some models in several variants, a row each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu.processes import Row
from benchmarks.gpu.timing import limit_threads
from benchmarks.gpu.training import WARM_UP, Training, Variant, compiler
from benchmarks.gpu.workloads import SMOKE_WORKLOADS, WORKLOADS, Workload

COLUMNS = (
    *("model", "batch_size", "size", "memory_format", "dtype", "variant", "activations_mib", "peak_mib"),
    *("reserved_mib", "samples_s", "samples_s_min", "samples_s_max", "steps", "first_step_s", "backend", "tf32"),
    *("threads", "error"),
)
_MIB = 2**20
VARIANTS = {
    "plain": Variant(),
    "plain-compiled": Variant(compiled=True),
    "plain-graph": Variant(captured=True),
    "checkpoint": Variant(checkpointed=True),
    "DEFAULT": Variant(policy="DEFAULT"),
    "DEFAULT-compiled": Variant(policy="DEFAULT", compiled=True),
    "DEFAULT-graph": Variant(policy="DEFAULT", captured=True),
    "RECOMPUTE": Variant(policy="RECOMPUTE"),
    "RECOMPUTE-graph": Variant(policy="RECOMPUTE", captured=True),
    "lossless": Variant(policy="LosslessBackward"),
    "2bit": Variant(policy="StochBackward2bit"),
    "4bit": Variant(policy="StochBackward4bit"),
    "2bit-compiled": Variant(policy="StochBackward2bit", compiled=True),
}
_COMPILES_FROM = (2, 13)  # torch, below which a region packs nothing inside of a compiled graph


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """One variant of a model, trained in one dtype.

    Args:
        model: key of `WORKLOADS`.
        dtype: "float32", or "bfloat16" for autocast.
        variant: key of `VARIANTS`.
        device: "cuda" or "cpu".
        channels_last: memory format of models and batches of images and volumes.
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
        variant = VARIANTS[self.variant]
        if variant.compiled and variant.policy and _version(torch.__version__) < _COMPILES_FROM:
            raise RuntimeError(f"packing inside of compiled graphs needs torch 2.13; this is {torch.__version__}")
        limit_threads(device)
        training = Training(self.workload, variant, dtype, device, self.channels_last)
        start = time.perf_counter()
        training.step()
        first = time.perf_counter() - start
        for _ in range(WARM_UP - 1):
            training.step()
        training.release()
        return lambda: self._measure(training, first)

    def _measure(self, training: Training, first: float) -> list[Row]:
        memory = training.memory() if self.device == "cuda" else {}
        steps, rates = training.samples_a_second(self.seconds)
        return [
            self._row(
                **{f"{name}_mib": f"{count / _MIB:.1f}" for name, count in memory.items()},
                samples_s=f"{statistics.median(rates):.1f}",
                samples_s_min=f"{min(rates):.1f}",
                samples_s_max=f"{max(rates):.1f}",
                steps=steps,
                first_step_s=f"{first:.1f}",
                threads=torch.get_num_threads(),
                tf32=_tf32() if self.device == "cuda" else "",
            )
        ]

    def _row(self, **values: object) -> Row:
        known = {
            "model": f"{self.model} (tiny)" if self.smoke else self.model,
            "batch_size": self.workload.samples,
            "size": self.workload.size,
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


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)
