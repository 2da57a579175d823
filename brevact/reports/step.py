"""Measure time and peak memory of a training step: `step_report`."""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from brevact.arguments import check_model
from brevact.autograd import current_region, region, regions_disabled
from brevact.autograd.region.module_hooks import regions_of
from brevact.autograd.saving.storage_report import recording
from brevact.policy.attach import attach_policy, region_of_step
from brevact.private_names.of_torch import allocations, quietly
from brevact.quantizers.checks import check_int
from brevact.reports.batches import tensors_of, without_surroundings
from brevact.reports.gradient_noise import Loss, check_loss, checked_value
from brevact.reports.in_place import in_place
from brevact.tables import size_text, text_table, write_csv

__all__ = ["StepReport", "step_report"]


@dataclass(frozen=True)
class StepReport:
    """Time and peak memory of a training step, without backward quantization and with it.

    >>> StepReport((0.2, 0.2), (0.3, 0.2), plain_peak=1024, packed_peak=256).time_ratio
    1.25

    Args:
        plain_seconds: seconds of each measured step without backward quantization.
        packed_seconds: seconds of the steps with it, which alternate with these.
        plain_peak: most bytes that PyTorch allocated in a step without it, above those at its start.
        packed_peak: the same with it.
        note: that the model has no policy, and which one was measured; "" otherwise.
    """

    plain_seconds: tuple[float, ...]
    packed_seconds: tuple[float, ...]
    plain_peak: int
    packed_peak: int
    note: str = ""

    @property
    def ratios(self) -> tuple[float, ...]:
        """Seconds with backward quantization over seconds without, per pair of steps."""
        return tuple(b / a for a, b in zip(self.plain_seconds, self.packed_seconds, strict=True))

    @property
    def time_ratio(self) -> float:
        """Median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """First and third quartile of the ratios."""
        first, _, third = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return first, third

    @property
    def peak_ratio(self) -> float:
        """Peak without backward quantization over the peak with it."""
        return self.plain_peak / max(self.packed_peak, 1)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one row per measured pair of steps."""
        pairs = zip(self.plain_seconds, self.packed_seconds, strict=True)
        header = ("plain_seconds", "packed_seconds", "plain_peak", "packed_peak")
        write_csv(path, [header, *((*pair, self.plain_peak, self.packed_peak) for pair in pairs)])

    def __str__(self) -> str:
        rows = []
        peaks = self.plain_peak, self.packed_peak
        for name, seconds, peak in zip(
            ("plain", "packed"), (self.plain_seconds, self.packed_seconds), peaks, strict=True
        ):
            quartiles = statistics.quantiles(seconds, n=4, method="inclusive")
            rows.append((name, *(f"{1e3 * value:.1f} ms" for value in quartiles), size_text(peak)))
        low, high = self.spread
        lines = [
            text_table(("step", "25 %", "median", "75 %", "peak"), rows),
            f"{self.time_ratio:.2f} times the time of plain ({low:.2f} to {high:.2f}, {len(self.ratios)} pairs), "
            f"{self.peak_ratio:.1f} times less at the peak",
        ]
        return "\n".join([*lines, self.note] if self.note else lines)


def step_report(
    model: nn.Module, batch: Tensor | Sequence[Any] | Mapping[str, Any], loss: Loss, *, rounds: int = 9
) -> StepReport:
    """Measure time and peak memory of a training step: forward pass, loss and backward pass, no optimizer.

    After warm-up steps of each kind, steps with and without the model's backward quantizers alternate; each kind is
    first in every other pair. The peak is the most bytes that PyTorch allocates above the start of a step, on the
    device of the batch, in a step that is not timed. A model without a policy is
    measured as if after ``quantize_backward(model)``. The model, its gradients and random generators are restored bit
    for bit.

    >>> import torch, brevact
    >>> layers = [layer for _ in range(3) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    >>> model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 10))
    >>> loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    >>> batch = torch.randn(1024, 64), torch.randint(10, (1024,))
    >>> report = brevact.step_report(brevact.quantize_backward(model), batch, loss, rounds=3)
    >>> len(report.plain_seconds), report.plain_peak > report.packed_peak
    (3, True)

    Args:
        model: module, with or without a policy; measured in training mode, compiled parts stay compiled.
        batch: passed to ``loss``.
        loss: takes the model and the batch, and returns the tensor to differentiate; called in the region of a model
            with a policy.
        rounds: number of timed pairs of steps, at least 2.

    Returns:
        The report: seconds of each step, and both peaks.

    Raises:
        TypeError: ``model`` is not a module, ``loss`` not a function of two arguments that returns a tensor, or
            ``rounds`` not an int.
        ValueError: ``rounds`` is less than 2; the loss is no scalar, or requires no gradient; or ``model`` is on the
            meta device, has lazy parameters, or wraps several devices.
    """
    check_model(model, "step_report(model, batch, loss)", batch)
    check_loss(loss)
    check_int("rounds", rounds, 2)  # for a spread
    if device_of(model, batch).type == "meta":
        raise ValueError("model: on the meta device no step runs; memory_report(model, batch, loss) counts its bytes")
    batch, note = without_surroundings(batch), ""
    with in_place(model):
        if not any(regions_of(module) for module in model.modules()):
            attach_policy(model)
            note = "The model has no backward quantizer: brevact.quantize_backward(model) would let it train so."
        if not model.training:
            model.train()
        packed = step_of(model, batch, loss, packs=True)
        with recording() as recorder:
            packed()
        steps = {False: step_of(model, batch, loss, packs=False, is_compiled=recorder.has_graphs), True: packed}
        peaks = {packs: peak_of(step, device_of(model, batch)) for packs, step in steps.items()}  # warms up, too
        seconds = _seconds_of(steps, device_of(model, batch), rounds)
    return StepReport(tuple(seconds[False]), tuple(seconds[True]), peaks[False], peaks[True], note)


@dataclass(frozen=True)
class StepLoss:
    """A loss that runs in the region of a model with a policy, as in a training step."""

    loss: Loss

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        with region_of_step(model):
            return self.loss(model, batch)


def step_of(model: nn.Module, batch: Any, loss: Loss, *, packs: bool, is_compiled: bool = False) -> Callable[[], None]:
    def run() -> None:
        outside = nullcontext() if current_region() is None else region(None)
        regions = nullcontext() if packs else regions_disabled(is_compiled)
        with outside, regions:  # also in backward, where checkpoints recompute
            checked_value(StepLoss(loss)(model, batch)).backward()
        model.zero_grad(set_to_none=True)

    return run


def peak_of(step: Callable[[], object], device: torch.device) -> int:
    step()  # warm up compiled kernels and cached constants
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with quietly(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    return max(itertools.accumulate(allocations(profile)), default=0)


def device_of(model: nn.Module, batch: Any) -> torch.device:
    tensors = (*tensors_of(batch), *model.parameters())
    return next((x.device for x in tensors if not x.is_cpu), torch.device("cpu"))


def _seconds_of(
    steps: Mapping[bool, Callable[[], object]], device: torch.device, rounds: int
) -> dict[bool, list[float]]:
    """Time pairs of steps; each kind is first in every other pair."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for packs in (False, True) if number % 2 else (True, False):
            _wait_for(device)
            start = time.perf_counter()
            steps[packs]()
            _wait_for(device)
            seconds[packs].append(time.perf_counter() - start)
    return seconds


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
