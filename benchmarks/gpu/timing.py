"""Times of calls that take turns, on the device's own clock where it is a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

_AHEAD = 2_000_000  # clock cycles, about a millisecond: more than Python needs to start the calls of a round
_LEAST_FLUSH = 256 * 2**20  # bytes, as `triton.testing.do_bench` writes


def alternating_times(
    calls: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Times of calls that take turns, so that all of them see the same machine.

    On a GPU the times are those between CUDA events; the cache is overwritten before each call, and the device is kept
    busy at the start of a round, so that it never waits for Python. A tenth of the rounds more warm up.

    Args:
        calls: what to time, by name.
        rounds: calls of each.
        device: where they run.

    Returns:
        Milliseconds of each call, by name.
    """
    all_rounds = rounds + rounds // 10 + 1
    times = _by_events(calls, all_rounds, device) if device.type == "cuda" else _by_wall_clock(calls, all_rounds)
    return {name: values[-rounds:] for name, values in times.items()}


def limit_threads(device: torch.device) -> None:
    """Use one thread for a smoke run on the CPU: its tensors gain nothing from more, and barriers take long.

    Args:
        device: where the case runs.
    """
    if device.type == "cpu":
        torch.set_num_threads(1)


def l2_bytes(device: torch.device) -> int:
    """Size of the last cache before the memory of a GPU.

    Args:
        device: a CUDA or ROCm device.

    Returns:
        Bytes.
    """
    return torch.cuda.get_device_properties(device).L2_cache_size


def _by_events(calls: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    flush = torch.empty(max(2 * l2_bytes(device), _LEAST_FLUSH), dtype=torch.uint8, device=device)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for index in range(rounds):
        torch.cuda._sleep(_AHEAD)
        for name in _order(calls, index):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            calls[name]()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize(device)
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def _by_wall_clock(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds):
        for name in _order(calls, index):
            start = time.perf_counter()
            calls[name]()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def _order(calls: Mapping[str, Callable[[], object]], index: int) -> list[str]:
    """The names, each round another one first."""
    names = list(calls)
    first = index % len(names)
    return names[first:] + names[:first]
