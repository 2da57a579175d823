"""Measures of a training step under a policy: bytes, peak, time and noise."""

from __future__ import annotations

import copy
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import brevact
from benchmarks.models import MODELS
from benchmarks.step import Step
from brevact.policy.text import budget_of
from brevact.quantizers.checks import check_int
from brevact.reports.gradient_noise import ExactGradients, exact_gradients, in_units, noise_of_batches, squared_norm
from brevact.reports.step import StepLoss, device_of, peak_of

#: Ways to train that are not policies of brevact.
PLAIN, CHECKPOINT, COMPILED, FIT = "plain", "checkpoint", "compile", "fit:"
#: Of the bytes that the compiler would keep for backward: the part that `compile` lets it keep.
MEMORY_BUDGET = 0.2
MIB = 2**20
#: Names of modules whose children are a model's blocks.
_LISTS = re.compile(r"blocks|features|layer\d")
#: Batches whose gradients differ by the unit of noise.
BATCHES = 4
#: After which no further pair of steps is timed.
MOST_SECONDS = 20
#: Longer steps run once where the growth of a process is measured.
MOST_SECONDS_OF_A_STEP = 60
Row = dict[str, Any]


def with_policy(step: Step, policy: str) -> Step:
    """Return the step with its model changed in place.

    Args:
        step: that no policy has changed.
        policy: "plain"; "checkpoint", of each block, or "checkpoint:N", of each N-th one; "compile" or "compile:PART",
            by `torch.compile` within a part of the memory; either with "+POLICY" at the end by a policy, too;
            "fit:BUDGET", by `brevact.fit`; or a policy in words of `brevact.parse_policy`.

    Raises:
        ValueError: the model has no blocks to checkpoint, or there is no such policy or budget.
    """
    way, _, words = policy.partition("+")
    if way.partition(":")[0] == CHECKPOINT:
        _checkpoint_blocks(step.model, int(way.partition(":")[2] or 1))
        if words:
            brevact.quantize_backward(step.model, words)
    elif _is_compiled(policy):
        model = _Whole(step)
        if words:
            brevact.quantize_backward(model, words)
        part = float(way.partition(":")[2] or (1.0 if words else MEMORY_BUDGET))
        return step._replace(model=torch.compile(model), loss=_within(part))
    elif policy.startswith(FIT):
        budget = budget_of(policy.removeprefix(FIT))
        if budget is None:
            raise ValueError(f"policy {policy!r}: fit: takes a budget such as 30x, 512MiB or noise=0.05")
        found = brevact.fit(step.model, step.batches(2), step.loss, **budget, quick=True, progress=False)
        brevact.quantize_backward(step.model, found)
    elif policy != PLAIN:
        brevact.quantize_backward(step.model, policy)
    return step._replace(loss=StepLoss(step.loss))


def _is_compiled(policy: str) -> bool:
    return policy.partition("+")[0].partition(":")[0] == COMPILED


def _checkpoint_blocks(model: nn.Module, every: int) -> None:
    check_int("policy 'checkpoint:N': N", every, 1)
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        blocks = [each for each in model.modules() if type(each).__mro__[1].__name__ == "GradientCheckpointingLayer"]
        for number, block in enumerate(blocks):
            block.gradient_checkpointing = number % every == 0
        return
    lists: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if _LISTS.fullmatch(name.rpartition(".")[2]) and not any(name.startswith(f"{other}.") for other in lists):
            lists[name] = module
    blocks = [block for each in lists.values() for block in each.children()]
    blocks = blocks or [each for each in model.modules() if type(each).__name__ == "ResidualUnit"]  # MONAI's
    if not blocks:
        raise ValueError(f"policy 'checkpoint': {type(model).__name__} has no modules named blocks; leave it out")
    for block in blocks[::every]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


class _Whole(nn.Module):
    """A model and its loss, to be compiled together."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.model, self.loss = step.model, step.loss

    def forward(self, batch: Any) -> Tensor:
        return self.loss(self.model, batch)


def _within(budget: float) -> Callable[[nn.Module, Any], Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with functorch_config.patch(activation_memory_budget=budget):
            value: Tensor = model(batch)
        return value

    return loss


def run(step: Step) -> None:
    step.loss(step.model, step.batch).backward()
    step.model.zero_grad(set_to_none=True)


def kept_bytes(step: Step, policy: str) -> int:
    """Bytes of the distinct storages that autograd keeps for backward, without weights; the hooks omit the batch."""
    if policy != CHECKPOINT and not _is_compiled(policy):
        report = brevact.memory_report(step.model, step.batch, getattr(step.loss, "loss", step.loss))
        return report.plain_bytes if policy == PLAIN else report.saved_bytes
    kept: dict[int, UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        value = step.loss(step.model, step.batch)
    held = (*step.model.parameters(), *step.model.buffers(), *tree_leaves(step.batch))
    own = {x.untyped_storage().data_ptr() for x in held if isinstance(x, Tensor)}
    found = sum(storage.nbytes() for place, storage in kept.items() if place not in own)
    del value
    return found


def peak(step: Step, steps: int = 4) -> Row:
    """The most bytes that PyTorch allocates in a step, and the growth of this process, which is to be a fresh one.

    Growth is the largest resident memory of some steps whose gradients accumulate, less that before the first one, with
    compiled kernels loaded; empty where the system does not say. A step of minutes runs once, for growth alone.
    """
    brevact.quantizer(brevact.StochBackward4bit).quantize(torch.zeros(4096)).dequantize()
    growth = ""
    with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # the peak begins at the present memory
    with suppress(OSError):
        before = _status_mib("VmRSS")
        start = time.monotonic()
        for _ in range(steps):
            step.loss(step.model, step.batch).backward()
            if time.monotonic() - start > MOST_SECONDS_OF_A_STEP:
                return {"growth_mib": f"{_status_mib('VmHWM') - before:.0f}"}
            start = time.monotonic()
        growth = f"{_status_mib('VmHWM') - before:.0f}"
    step.model.zero_grad(set_to_none=True)
    allocated = peak_of(lambda: run(step), device_of(step.model, step.batch))
    return {"peak_mib": f"{allocated / MIB:.1f}", "growth_mib": growth}


def _status_mib(name: str) -> float:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(f"{name}:"))


def time_ratios(plain: Step, step: Step, rounds: int, replay: Callable[[], None] | None = None) -> Row:
    """Median and quartiles of the ratios of pairs of steps, which take turns; processor time on a CPU.

    `replay` takes the place of the second step, if it is captured. Long steps are timed in three pairs at least.
    """
    end = time.monotonic() + MOST_SECONDS
    on_gpu = device_of(plain.model, plain.batch).type == "cuda"
    ratios, found = [], []
    for number in range(-2, rounds):  # two pairs warm up
        steps = (lambda: run(plain)), replay or (lambda: run(step))
        order = (0, 1) if number % 2 else (1, 0)
        seconds = {index: _seconds(steps[index], on_gpu) for index in order}
        if number >= 0:
            ratios.append(seconds[1] / seconds[0])
            found.append(seconds[1])
        if len(ratios) >= 3 and time.monotonic() > end:
            break
    low, middle, high = (f"{x:.3f}" for x in statistics.quantiles(ratios, n=4, method="inclusive"))
    return {"step_ms": f"{1e3 * statistics.median(found):.1f}", "step": middle, "step_low": low, "step_high": high}


def compile_seconds(step: Step) -> float:
    """Processor time of this process and of the C++ compiler's: the first run less the second, without caches."""
    torch.compiler.reset()
    with fresh_cache(), inductor_config.patch(compile_threads=1):
        first, second = _all_processor_seconds(step), _all_processor_seconds(step)
    return first - second


def _all_processor_seconds(step: Step) -> float:
    start = os.times()
    run(step)
    return sum(os.times()[:4]) - sum(start[:4])


def _seconds(step: Callable[[], None], on_gpu: bool) -> float:
    clock = time.perf_counter if on_gpu else time.process_time
    if on_gpu:
        torch.cuda.synchronize()
    start = clock()
    step()
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - start


def noise(step: Step, data: Sequence[Any], exact: ExactGradients, draws: int) -> Row:
    """Relative error of the gradient, and its variance and squared bias in units of the variance between batches.

    The error is the root of the mean of |h - g|^2 / |g|^2 over batches and draws.
    """
    of_batches = noise_of_batches(step.model, data, step.loss, exact, draws)
    squares = torch.tensor([squared_norm(each) for each in exact.of_batches], dtype=torch.float64)
    found, bias = (in_units(each, exact.unit) for each in of_batches)
    return {
        "error": f"{float((of_batches.sum(0) / squares).mean().clamp(min=0).sqrt()):.3g}",
        **{"noise": f"{found.value:.3g}", "noise_se": f"{found.error:.2g}"},
        **{"bias": f"{bias.value:.3g}", "bias_se": f"{bias.error:.2g}"},
    }


def measure_model(
    name: str, policies: Sequence[str], measures: Sequence[str], rounds: int, draws: int
) -> tuple[dict[str, Row], list[str]]:
    """Bytes, time and noise of a model, and lines about policies that it does not take."""
    torch.set_num_threads(1)
    origin = MODELS[name].build()
    plain = with_policy(_copy(name, origin), PLAIN)
    plain_bytes = kept_bytes(plain, PLAIN) if "bytes" in measures else 0
    data = plain.batches(BATCHES) if "noise" in measures else []
    found, errors, exact, plain_seconds = {}, [], dict[str, ExactGradients](), 0.0
    for policy in policies:
        torch.compiler.reset()
        try:
            step = with_policy(_copy(name, origin), policy)
            row = {}
            if "bytes" in measures:
                kept = kept_bytes(step, policy)
                row = {"kept_mib": f"{kept / MIB:.2f}", "kept_less": f"{plain_bytes / max(kept, 1):.2f}"}
            words = f"{COMPILED}:1" if _is_compiled(policy) else PLAIN
            way = plain if words is PLAIN else None
            if "time" in measures:
                way = way or with_policy(_copy(name, origin), words)
                row |= {"step": "1.000"} if policy == PLAIN else time_ratios(way, step, rounds)
            if "compile" in measures and _is_compiled(policy):
                for _ in range(0 if plain_seconds else 2):  # a process' first compilation imports
                    plain_seconds = compile_seconds(with_policy(_copy(name, origin), words))
                row |= {"compile": f"{compile_seconds(step) / plain_seconds:.2f}"}
            if data and policy not in (PLAIN, CHECKPOINT) and (not _is_compiled(policy) or "+" in policy):
                if words not in exact:
                    way = way or with_policy(_copy(name, origin), words)
                    exact[words] = exact_gradients(way.model, data, way.loss)
                row |= noise(step, data, exact[words], draws)
            found[policy] = row
        except Exception as error:
            errors.append(f"{name}, {policy}: {line_of(error)}")
    return found, errors


def _copy(name: str, origin: Step) -> Step:
    """The step with a copy of its model; built anew where the model refuses to be copied."""
    try:
        return origin._replace(model=copy.deepcopy(origin.model))
    except Exception:
        return MODELS[name].build()


def measure_peak(name: str, policy: str) -> tuple[Row, list[str]]:
    """Peaks of a model under a policy, in a process that has done nothing before."""
    torch.set_num_threads(1)
    return peak(with_policy(MODELS[name].build(), policy)), []


def line_of(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]
