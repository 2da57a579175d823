"""Seeds for the stochastic quantizers: they follow from torch's generator, and change no other random number.

Within a root region seeds follow from the state of torch's default generator, as ``torch.manual_seed`` sets it. When
the region ends, bits of that state count on of which no random number is made (``generator_state``). So
``torch.manual_seed`` fixes every code, no two tensors and no two steps share noise, also where nothing else is drawn
between them, and all random numbers of the model and of the loop around it (dropout masks, the order of a data set)
are those without backward quantization. Code that restores the generator's state (``fork_rng``, checkpoints, a run that
resumes) restores these bits. Without such bits, and where regions of several threads overlap, which might draw while
the state is written, the generator passes one draw instead.

The processes of a distributed run, of which each has its part of the batch, draw different noise, also where all were
seeded alike: the rank in the default process group is mixed into each seed (rank 0 draws those of a single process).
Gradients of a parameter that several ranks hold are equal on them once they are reduced, as by DDP and FSDP.

While a CUDA graph is captured, seeds come from the device's default generator, which the graph advances in each replay:
each replay draws new noise.

While a backward pass runs, a region belongs to a recomputation (checkpoint), which restores the generator by itself. If
it was a root region in the forward pass, too (a layer with a quantizer of its own in a non-reentrant checkpoint), it
repeats the seeds and the count of that pass. Otherwise (a reentrant checkpoint, a region around the
checkpoint that is gone) nothing counts on, and the regions of one backward pass are told apart, and from those of the
forward pass, by counting them.

``seeded`` measures the effect of quantization alone: regions then draw from a seed that is given, in turn, and the
generator does not change at all, in a forward pass or in a recomputation.

Torch's modes of others do not see how seeds are drawn: a selective checkpoint, which counts the ops of a function, may
recompute it where a region is a root that was inside another one in the forward pass.
"""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor, distributed

from brevact.private_names.generator_state import count_on, fingerprint
from brevact.private_names.of_torch import DisableTorchFunction, active_fake_mode, current_graph_task, no_dispatch_modes
from brevact.quantizers import draw_seed

_BLOCK = 256  # seeds that are drawn at once on a device
_AT_ONCE = 64  # seeds that are made at once on the CPU
_HOST = torch.device("cpu")
_LOW, _HIGH = -(2**63), 2**63 - 1
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, odd: SplitMix64's increment


_numbers = itertools.count(1)
_lock = threading.Lock()
_in_use: collections.Counter[int] = collections.Counter()  # bases of the regions that are active, in all threads
_recomputed: tuple[int, int] = (-1, 0)  # the backward pass that runs, and how many regions it has entered
_MOST_ROOTS = 1 << 16
#: Ids of the owners of root regions of forwards, by base.
_threads: collections.Counter[int] = collections.Counter()  # that have regions with seeds, and how many
_roots: collections.OrderedDict[int, int] = collections.OrderedDict()
_given: Iterator[int] | None = None  # seeds of regions, one after the other, in all threads


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let the regions of a block draw from a seed of its own; torch's generator then draws as if there were none.

    Two runs that differ in the seed alone differ in stochastic rounding alone, dropout being the same. It holds for all
    threads, since a backward pass recomputes in threads of its own.

    Args:
        seed: any integer; the ranks of a distributed run draw different noise from the same one.
    """
    global _given
    outer, _given = _given, (_split_mix(seed + count * _GOLDEN) ^ rank_seed() for count in itertools.count(1))
    try:
        yield
    finally:
        _given = outer


class SeedStream:
    """Seeds of one root region, for the forward of a module, its owner, or for a ``with`` block.

    CPU seeds are Python integers; on other devices they are 0-d int64 tensors on the device, drawn there, so that no
    draw synchronizes. A stream replays where the region belongs to the recomputation of a non-reentrant checkpoint.

    Attributes:
        number: tells the root regions of this process apart, from 1 on.
    """

    def __init__(self, owner: object = None, *, replays: bool = False) -> None:
        self.number = next(_numbers)
        self._owner = id(owner) if replays or current_graph_task() == -1 else None
        self._moves = True
        self._base: int | None = None
        self._thread = threading.get_ident()
        self._streams: dict[torch.device, Iterator[int | Tensor]] = {}

    def next(self, device: torch.device) -> int | Tensor:
        """Return the next seed for a tensor on ``device``."""
        stream = self._streams.get(device)
        if stream is not None and device == _HOST:
            return next(stream)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return draw_anew(device)
        if device.type == "meta":  # no values, and no generator: codes have sizes alone
            device = _HOST
            stream = self._streams.get(device)
        if stream is None:
            if self._base is None:
                self._base, self._moves = _claim_base(self._owner)
                with _lock:
                    _threads[self._thread] += 1
            place = 0 if device.index is None else device.index + 1
            stream = self._streams[device] = _seeds(device, _mix(self._base, place))
        return next(stream)

    def next_on_host(self) -> int:
        """Return the next seed for a draw on the host, for a tensor on whatever device."""
        return int(self.next(_HOST))

    def close(self) -> None:
        """Tell the seeds of the next region from these: torch's default generator counts on."""
        if self._base is None:
            return
        with _lock:
            _in_use[self._base] -= 1
            if not _in_use[self._base]:
                del _in_use[self._base]
            _threads[self._thread] -= 1
            # Not those of regions that an interrupt abandoned: of this thread, or of one that has ended.
            others = {thread for thread, count in _threads.items() if count > 0 and thread != self._thread}
            is_alone = not others or others.isdisjoint(each.ident for each in threading.enumerate())
        if self._moves:
            with DisableTorchFunction(), no_dispatch_modes():
                if not (is_alone and count_on(torch.default_generator)):
                    torch.randint(_LOW, _HIGH, (), device="cpu", generator=torch.default_generator)


def draw_anew(device: torch.device) -> Tensor:
    """Return a seed that is drawn on a device, by the graph that is captured or traced, in each of its runs."""
    seed, rank = draw_seed(device), rank_seed()
    return seed ^ rank if rank else seed


def rank_seed() -> int:
    """Return the number that is mixed into the seeds of this process: a signed 64-bit integer, 0 on rank 0."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0
    rank = distributed.get_rank()
    return _split_mix(rank * _GOLDEN) if rank else 0


def _claim_base(owner: int | None) -> tuple[int, bool]:
    """Return a seed for a region, and whether the generator counts on when it ends.

    The seed follows from the state of the default generator; it is changed where another region has it.
    """
    global _recomputed
    if _given is not None:
        with _lock:
            base = next(_given) % 2**64
            _in_use[base] += 1
        return base, False
    with DisableTorchFunction(), no_dispatch_modes():
        base = (fingerprint(torch.default_generator) ^ rank_seed()) % 2**64
    with _lock:
        backward = current_graph_task()
        moves = backward == -1 or (owner is not None and _roots.get(base) == owner)
        if backward == -1 and owner is not None:
            _roots[base] = owner
            if len(_roots) > _MOST_ROOTS:
                _roots.popitem(last=False)
        elif not moves:
            count = _recomputed[1] + 1 if _recomputed[0] == backward else 1
            _recomputed = (backward, count)
            base = _mix(base, count)
        while base in _in_use:  # a region of another thread that forked the same state
            base = _mix(base, 1)
        _in_use[base] += 1
    return base, moves


def _mix(base: int, count: int) -> int:
    """A 64-bit seed of its own for each count; 0 keeps the base."""
    return _split_mix(base + count * _GOLDEN) % 2**64 if count else base


def _seeds(device: torch.device, base: int) -> Iterator[int | Tensor]:
    if device.type == "cpu":
        return itertools.chain.from_iterable(map(_split_mixes, itertools.count(base, _AT_ONCE * _GOLDEN)))
    return _drawn_seeds(device, base)


def _drawn_seeds(device: torch.device, base: int) -> Iterator[Tensor]:
    generator = torch.Generator(device).manual_seed(base)
    while True:
        with DisableTorchFunction(), nullcontext() if active_fake_mode() else no_dispatch_modes():
            block = torch.randint(_LOW, _HIGH, (_BLOCK,), device=device, generator=generator).unbind()
        yield from block


def _split_mixes(state: int) -> list[int]:
    """SplitMix64's output for a state, and for those that follow: cheaper together than in the calls that need them."""
    steps = np.arange(_AT_ONCE, dtype=np.uint64) * np.uint64(_GOLDEN)
    z = np.uint64(state & _MASK) + steps  # modulo 2^64, as all that follows
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))).view(np.int64).tolist()


def _split_mix(state: int) -> int:
    """SplitMix64's output for a state, as a signed 64-bit integer. Source: Steele, Lea and Flood, OOPSLA 2014."""
    z = state & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    z ^= z >> 31
    return z - 2**64 if z >> 63 else z
