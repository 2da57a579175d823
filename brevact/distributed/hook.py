"""A DistributedDataParallel communication hook that packs gradients with any unbiased quantizer.

A message has the buffers of packed tensors, each at a multiple of 16 bytes. Since backends crash or hang if messages
differ in length, processes compare digests of their settings and steps before the first one.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from brevact.injectors import backward_settings_from
from brevact.injectors.resolve import BackwardQuantizer
from brevact.private_names.of_torch import all_gather_single
from brevact.quantizers import (
    ActivationQuantizer,
    DualPrecisionQuantizer,
    MixingQuantizer,
    PackedActivation,
    PackedSpec,
    SampleQuantizer,
    UniformQuantizer,
    WeibullQuantizer,
)
from brevact.quantizers.brief import brief
from brevact.quantizers.checks import DTYPES, check_int
from brevact.quantizers.formats.sign_magnitude import SignMagnitudeLevels
from brevact.quantizers.traits import is_quantizer, traits_of

_ALIGNMENT = 16


def message_of(packs: Sequence[PackedActivation]) -> Tensor:
    """Join packed tensors on one device into one message, (nbytes,) uint8."""
    return torch.cat([nn.functional.pad(packed.buffer, (0, -packed.spec.nbytes % _ALIGNMENT)) for packed in packs])


def packs_of(message: Tensor, specs: Sequence[PackedSpec[Any]]) -> list[PackedActivation]:
    """Split any process's message into packed tensors of these specs, which share its memory."""
    parts = message.split([-(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT for spec in specs])
    return [PackedActivation(spec, part[: spec.nbytes]) for spec, part in zip(specs, parts, strict=True)]


def after(work: Any, finish: Callable[[], Tensor], is_cpu: bool) -> torch.futures.Future[Tensor]:
    """Run `finish`, without gradients, once a collective is done, and return the future of its result.

    On a device, it runs on the stream that waits for the collective. On the CPU, this thread waits: a callback on a
    thread of the process group (Gloo) could deadlock, since this thread needs the GIL to release the Python object,
    while a thread that destroys the group holds the GIL and waits for the group's threads.
    """

    def finished(done: torch.futures.Future[Any]) -> Tensor:
        done.value()  # raises the collective's error
        with torch.no_grad():
            return finish()

    if not is_cpu:
        return work.get_future().then(finished)
    work.wait()
    waited: torch.futures.Future[Any] = torch.futures.Future()
    waited.set_result(None)
    return waited.then(finished)


#: Packs a tensor losslessly into its own bytes.
_AS_IT_IS = UniformQuantizer(bit_width=32)

_ALL_RANKS = -1
_UNBIASED = (UniformQuantizer, WeibullQuantizer, DualPrecisionQuantizer, SampleQuantizer, SignMagnitudeLevels)


def pack(quantizer: ActivationQuantizer, x: Tensor, place: tuple[int, int, int], rank: int) -> PackedActivation:
    """Pack a gradient with this rank's random bits, and in the size that all ranks use."""
    if isinstance(quantizer, MixingQuantizer):
        quantizer = quantizer.with_drawn_size(x.numel(), _seed(*place, _ALL_RANKS))
    return quantizer.quantize(x, _seed(*place, rank))


def is_unbiased(quantizer: ActivationQuantizer) -> bool:
    """Return whether a quantizer is lossless or rounds at random between levels that span a bucket."""
    if isinstance(quantizer, MixingQuantizer):
        return is_unbiased(quantizer.low) and is_unbiased(quantizer.high)
    traits = traits_of(quantizer)
    if traits.is_exact or traits.is_lossless or traits.keeps_elements:
        return True
    return isinstance(quantizer, _UNBIASED) and quantizer.is_stochastic and not traits.is_stretched


def _seed(*parts: int) -> int:
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


#: The least and the largest seed.
_SEEDS = -(2**63), 2**63 - 1


def quantized_hook(
    quantizer: BackwardQuantizer, *, min_numel: int = 4096, seed: int = 0, **overrides: Any
) -> QuantizedHook:
    """Return a communication hook for ``DistributedDataParallel`` that sends gradients as packed codes.

    Each rank packs each parameter's gradient, one collective gathers a bucket's codes as bytes, and each rank decodes
    and averages them in the order of ranks: the result is the same on all ranks, bit for bit, and unbiased.

    Source: TinyScript (Fu et al., ICML 2020), section 3.3: buckets of 4096, no small tensors. Differs: any unbiased
    quantizer, no central server.

    >>> import torch, brevact
    >>> from torch import distributed, nn
    >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    >>> ddp = nn.parallel.DistributedDataParallel(nn.Linear(256, 64))
    >>> hook = brevact.distributed.quantized_hook(brevact.WeibullBackward4bit)
    >>> ddp.register_comm_hook(None, hook)
    >>> ddp(torch.randn(8, 256)).square().mean().backward()
    >>> hook.sent_bytes, hook.plain_bytes  # one message; 64 values of the bias as they are
    (8608, 65792)
    >>> distributed.destroy_process_group()

    Args:
        quantizer: backward quantizer for all gradients that rounds at random, such as ``WeibullBackward4bit``.
        min_numel: gradients with fewer elements are sent unpacked; a bucket of only such gradients is all-reduced.
        seed: of random rounding, the same on all ranks; random bits differ per rank, step and parameter.
        **overrides: settings that replace those of ``quantizer``.

    Returns:
        The hook. ``register_comm_hook(group, hook)`` takes the process group, None for the default one.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the quantizer is biased, or an argument is out of range.
    """
    packs = backward_settings_from(quantizer, "quantizer", **overrides).quantizer
    return QuantizedHook(packs, min_numel=min_numel, seed=seed)


class QuantizedHook:
    """Packs, gathers, decodes and averages gradients; made by :func:`quantized_hook`.

    A NaN or an infinity of one rank is a NaN on all ranks, and a ``GradScaler`` skips the step.
    """

    def __init__(self, quantizer: ActivationQuantizer, *, min_numel: int = 4096, seed: int = 0) -> None:
        if not is_quantizer(quantizer):
            raise TypeError(
                f"quantizer: got {brief(quantizer)}; accepted is an activation quantizer, such as what "
                "brevact.quantizer(StochBackward4bit) returns"
            )
        if not is_unbiased(quantizer):
            raise ValueError(
                f"quantizer: got {brief(quantizer)}, which is biased: its errors do not average out over steps; "
                "accepted is one that rounds at random between levels that span a bucket: StochBackward4bit"
            )
        check_int("min_numel", min_numel, 0)
        check_int("seed", seed, *_SEEDS)
        self.__name__ = self.__qualname__ = "quantized_hook"  # DistributedDataParallel logs it
        self.quantizer, self.min_numel, self.seed, self.step = quantizer, min_numel, seed, 0
        self.sent_bytes = 0  # of this rank's messages so far
        self.plain_bytes = 0  # of the same gradients unpacked
        self._numbers: dict[Tensor, int] = {}  # of parameters, in the order first seen: DDP rebuilds its buckets
        self._agreed: set[str] = set()  # names of groups, empty behind load_state_dict

    def __call__(self, state, bucket):  # DistributedDataParallel refuses annotations that are strings
        """Average a bucket's gradients over the ranks.

        Args:
            state: process group, None for the default one; the first argument of ``register_comm_hook``.
            bucket: ``torch.distributed.GradBucket``.

        Returns:
            Future of the bucket's buffer, with the averages.
        """
        if isinstance(bucket, Tensor):
            raise TypeError("bucket: got a tensor, as of FSDP; accepted is a GradBucket of DistributedDataParallel")
        group: Any = distributed.group.WORLD if state is None else state
        buffer, gradients = bucket.buffer(), bucket.gradients()
        self._agree(group, buffer.device)
        step = self.step
        self.step += bucket.is_last()
        numbers = [self._numbers.setdefault(x, len(self._numbers)) for x in bucket.parameters()]
        if buffer.dtype not in DTYPES or all(x.numel() < self.min_numel for x in gradients):
            buffer.div_(group.size())
            return after(distributed.all_reduce(buffer, group=group, async_op=True), lambda: buffer, buffer.is_cpu)
        with torch.no_grad():
            packs = []
            for x, number in zip(gradients, numbers, strict=True):
                quantizer = _AS_IT_IS if x.numel() < self.min_numel else self.quantizer
                packs.append(pack(quantizer, x, (self.seed, step, number), group.rank()))
            message = message_of(packs)
        self.sent_bytes += message.numel()
        self.plain_bytes += buffer.numel() * buffer.element_size()
        messages = message.new_empty(group.size(), message.numel())
        gathered = all_gather_single(messages.view(-1), message, group=group, async_op=True)
        specs = [pack.spec for pack in packs]

        def average() -> Tensor:
            if not buffer.is_cpu:  # memory of another stream, which this stream's work needs
                messages.record_stream(torch.cuda.current_stream(messages.device))
            for gradient, *received in zip(gradients, *(packs_of(row, specs) for row in messages), strict=True):
                total = torch.zeros_like(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
                for packed in received:
                    total += packed.dequantize()
                gradient.copy_(total.div_(len(received)))
            return buffer

        return after(gathered, average, buffer.is_cpu)

    def state_dict(self) -> dict[str, int]:
        """Return the numbers from which seeds derive, the same on all ranks."""
        return {"step": self.step, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume from :meth:`state_dict`: the same gradients give the same bits.

        Args:
            state: result of :meth:`state_dict`.

        Raises:
            ValueError: ``state`` is not such a result.
        """
        if not isinstance(state, Mapping) or set(state) != {"step", "seed"}:
            raise ValueError(f"state: got {brief(state)}; accepted is what state_dict() returned")
        check_int("state['step']", state["step"], 0)
        check_int("state['seed']", state["seed"], *_SEEDS)
        self.step, self.seed, self._agreed = state["step"], state["seed"], set()

    def __repr__(self) -> str:
        return f"quantized_hook({self.quantizer}, min_numel={self.min_numel})"

    def _agree(self, group: Any, device: torch.device) -> None:
        """Compare settings, on which the messages' length depends, between a group's processes, once."""
        if not isinstance(group, distributed.ProcessGroup):
            raise TypeError(
                f"process group: got {brief(group)}; accepted is a ProcessGroup of torch.distributed; "
                "register_comm_hook(None, hook) takes the default one"
            )
        if group.group_name in self._agreed:
            return
        text = f"{self.quantizer} {self.min_numel} {self.seed} {self.step}"
        text = re.sub(r" at 0x[0-9a-fA-F]+", "", text)  # users' quantizers may lack a `__repr__`
        digest = hashlib.blake2b(text.encode(), digest_size=_ALIGNMENT).digest()
        mark = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
        marks = mark.new_empty(group.size(), _ALIGNMENT)
        all_gather_single(marks.view(-1), mark, group=group)
        different = (marks != marks[0]).any(1).cpu().nonzero().view(-1).tolist()
        if different:
            raise ValueError(
                f"gradients of rank 0 and of ranks {different} are packed in different ways, or for different steps; "
                "accepted are hooks with the same quantizer and settings on all ranks, from checkpoints of the same "
                "step"
            )
        self._agreed.add(group.group_name)
