"""Seeds for the stochastic quantizers: derived from torch's generator, without changing the program's random numbers.

A root region's seeds follow from the state of torch's default generator and the number of root regions that have drawn
noise since ``torch.manual_seed``. So ``torch.manual_seed`` fixes every code, and no two root regions share noise unless
it is called between them, even if nothing is drawn between them or the program restores the generator's state
(``fork_rng``, ``set_rng_state``). Regions are counted per seed: a validation that sets its own seed and then restores
the training's state does not change the training's noise. A resumed run sets the count (``noise_count``) beside the
state.

The processes of a distributed run, each with its part of the batch, draw different noise, even if all were seeded
alike: the default process group's rank is mixed into each seed (rank 0 draws the seeds of a single process).
Gradients of a parameter that several ranks hold are equal once reduced, as by DDP and FSDP.

During CUDA graph capture, seeds come from the device's default generator, which the graph advances in each replay:
each replay draws new noise, in one launch for 256 tensors of a region.

Root regions inside a non-reentrant checkpoint (layers with a quantizer of their own) draw the same seeds when they are
recomputed, so they save and round the same values as in the forward pass. Those in a reentrant one, and regions that
are roots only in the recomputation, count on.

``seeded`` measures the effect of quantization alone: regions then draw in turn from a given seed.

Other dispatch modes of torch do not see how seeds are drawn: a selective checkpoint, which counts a function's ops, may
recompute it where a region is a root that was inside another one in the forward pass.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed

from brevact.private_names.of_torch import (
    DisableTorchFunction,
    active_fake_mode,
    checkpoint_of,
    no_dispatch_modes,
    watch_manual_seed,
)
from brevact.quantizers import draw_seed
from brevact.quantizers.checks import check_int

_BLOCK = 256  # seeds per draw on a device
_HOST = torch.device("cpu")
_LOW, _HIGH = -(2**63), 2**63 - 1
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, odd: SplitMix64's increment
_MOST_SEEDS = 1 << 16


_numbers = itertools.count(1)
_lock = threading.Lock()
#: Root regions that have drawn noise since the generator was seeded, by seed, the last used seed last.
_counts: dict[int, int] = {}
_first = 0  # the count for other seeds
_given: Iterator[int] | None = None  # successive seeds of regions, in all threads


def noise_count(count: int | None = None) -> int:
    """Return, and optionally set, the number of regions that have drawn noise since ``torch.manual_seed``.

    The next region's noise follows from it and the state of torch's generator: a training loop that saves and restores
    that state must save this number, too. :class:`brevact.trainers.TrainingPolicy` and the callbacks do.

    >>> import torch, brevact
    >>> state = torch.get_rng_state(), brevact.noise_count()
    >>> torch.set_rng_state(state[0])  # in the process that resumes
    >>> brevact.noise_count(state[1]) == state[1]
    True

    Args:
        count: the number that was returned when the generator's state was saved; None to change nothing.

    Returns:
        The number.

    Raises:
        TypeError: ``count`` is not an int.
        ValueError: ``count`` is negative.
    """
    global _first
    if count is None:
        with _lock:
            return _counts.get(torch.default_generator.initial_seed(), _first)
    check_int("count", count, 0)
    with _lock:  # for every seed: the generator's state may be restored later, with another seed
        _counts.clear()
        _first = count
    return count


def _set_count(seed: int, count: int) -> None:
    _counts.pop(seed, None)
    _counts[seed] = count
    if len(_counts) > _MOST_SEEDS:
        del _counts[next(iter(_counts))]


@watch_manual_seed
def _restart() -> None:
    with _lock:
        _set_count(torch.default_generator.initial_seed(), 0)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore torch's generators, and the counts of regions that have drawn noise, after a block."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with _lock:
        before = dict(_counts)
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            with _lock:
                _counts.clear()
                _counts.update(before)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw the noise of a block's regions from ``seed``, without counting these regions.

    Two runs that differ only in the seed differ only in stochastic rounding; dropout is the same. The seed holds for
    all threads, since a backward pass recomputes in threads of its own.

    Args:
        seed: any integer; ranks of a distributed run draw different noise from the same seed.
    """
    global _given
    outer, _given = _given, (_split_mix(seed + count * _GOLDEN) ^ rank_seed() for count in itertools.count(1))
    try:
        yield
    finally:
        _given = outer


#: Base seeds of the root regions inside a checkpoint, by their places in its function, which a recomputation repeats.
_Bases = dict[int, int]
_bases: WeakKeyDictionary[object, _Bases] = WeakKeyDictionary()
#: Base seeds of one pass through such a function, and its next place, by the hook around it.
_passes: WeakKeyDictionary[Callable, tuple[_Bases, Iterator[int]]] = WeakKeyDictionary()


def _place_in(hook: Callable) -> tuple[_Bases, int]:
    found = _passes.get(hook)
    if found is None:
        found = _passes[hook] = _bases.setdefault(checkpoint_of(hook), {}), itertools.count()
    return found[0], next(found[1])


class SeedStream:
    """Seeds of one root region: a module's forward, or a ``with`` block.

    CPU seeds are Python integers; on other devices they are 0-d int64 tensors, drawn on the device, so that no draw
    synchronizes. ``number`` identifies the root region in this process, from 1 on. ``checkpoints`` are the pack hooks
    of the non-reentrant checkpoints around the region, the outermost first.
    """

    def __init__(self, checkpoints: tuple[Callable, ...] = ()) -> None:
        self.number = next(_numbers)
        self._places = [*map(_place_in, checkpoints)]
        self._base: int | None = None
        self._streams: dict[torch.device, Iterator[int | Tensor]] = {}
        is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        #: Streams that the graph draws that is being captured; None outside of a capture.
        self._of_graph: dict[torch.device, Iterator[Tensor]] | None = {} if is_captured else None

    def next(self, device: torch.device) -> int | Tensor:
        stream = self._streams.get(device)
        if stream is not None and device == _HOST:
            return next(stream)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if self._of_graph is None:
                return _drawn_in_capture(device)
            return next(self._of_graph.setdefault(device, _drawn_seeds(device, None)))
        if device.type == "meta":  # no values, and no generator: codes have sizes alone
            device = _HOST
            stream = self._streams.get(device)
        if stream is None:
            if self._base is None:
                self._base = _base_at(self._places)
            place = 0 if device.index is None else device.index + 1
            base = _split_mix(self._base + place * _GOLDEN) % 2**64 if place else self._base
            is_cpu = device.type == "cpu"
            stream = map(_split_mix, itertools.count(base, _GOLDEN)) if is_cpu else _drawn_seeds(device, base)
            self._streams[device] = stream
        return next(stream)

    def next_on_host(self) -> int:
        return int(self.next(_HOST))


def _drawn_in_capture(device: torch.device) -> Tensor:
    seed, rank = draw_seed(device), rank_seed()
    return seed ^ rank if rank else seed


def seeds_of_graph(device: torch.device, count: int) -> Tensor:
    """Return the seeds of one run of a compiled graph, which counts as a root region."""
    is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    seed = _drawn_in_capture(device) if is_captured else torch.tensor(_split_mix(_next_base()), device=device)
    return seed + torch.arange(1, count + 1, device=device)


def seed_of_size() -> int:
    """Return the seed of the sizes of mixtures in a compiled graph, which all of its runs share."""
    return (torch.default_generator.initial_seed() ^ rank_seed()) % 2**62


def rank_seed() -> int:
    """Return the number that is mixed into this process's seeds: a signed 64-bit integer, 0 on rank 0."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0
    rank = distributed.get_rank()
    return _split_mix(rank * _GOLDEN) if rank else 0


def _base_at(places: list[tuple[_Bases, int]]) -> int:
    base = next((bases[place] for bases, place in places if place in bases), None)
    if base is None:
        base = _next_base()
    for bases, place in places:
        bases[place] = base
    return base


def _next_base() -> int:
    """Return a base seed that no region has had since the generator was seeded."""
    if _given is not None:
        with _lock:
            return next(_given) & _MASK
    with DisableTorchFunction(), no_dispatch_modes():
        seed = torch.default_generator.initial_seed()
        digest = hashlib.sha256(torch.default_generator.get_state().numpy().data)
    with _lock:
        count = _counts.get(seed, _first)
        _set_count(seed, count + 1)
    digest.update(count.to_bytes(16, "little"))
    return (int.from_bytes(digest.digest()[:8], "little") ^ rank_seed()) & _MASK


def _drawn_seeds(device: torch.device, base: int | None) -> Iterator[Tensor]:
    """Draw seeds from a generator of their own, or, without a base, from the default one, for this rank."""
    generator = None if base is None else torch.Generator(device).manual_seed(base)
    rank = rank_seed() if base is None else 0
    while True:
        with DisableTorchFunction(), nullcontext() if active_fake_mode() else no_dispatch_modes():
            block = torch.randint(_LOW, _HIGH, (_BLOCK,), device=device, generator=generator)
            seeds = (block ^ rank if rank else block).unbind()
        yield from seeds


def _split_mix(state: int) -> int:
    """SplitMix64's output for a state, as a signed 64-bit integer. Source: Steele, Lea and Flood, OOPSLA 2014."""
    z = state & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    z ^= z >> 31
    return z - 2**64 if z >> 63 else z
