"""Pack gradients for other processes, in a size and format that all processes know.

A message has the buffers of packed tensors, each at a multiple of 16 bytes. Since backends crash or hang if messages
differ in length, processes compare digests of their settings and steps before the first one.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
from brevact.quantizers.formats.sign_magnitude import SignMagnitudeLevels

ALIGNMENT = 16


def message_of(packs: Sequence[PackedActivation]) -> Tensor:
    """Join packed tensors on one device into one message, (nbytes,) uint8."""
    return torch.cat([nn.functional.pad(packed.buffer, (0, -packed.spec.nbytes % ALIGNMENT)) for packed in packs])


def packs_of(message: Tensor, specs: Sequence[PackedSpec[Any]]) -> list[PackedActivation]:
    """Split any process's message into packed tensors of these specs, which share its memory."""
    parts = message.split([-(-spec.nbytes // ALIGNMENT) * ALIGNMENT for spec in specs])
    return [PackedActivation(spec, part[: spec.nbytes]) for spec, part in zip(specs, parts, strict=True)]


def digest_of(settings: Sequence[object]) -> Tensor:
    """Return (16,) uint8 of the settings' texts without addresses: users' quantizers may lack a ``__repr__``."""
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", " ".join(map(str, settings)))
    digest = hashlib.blake2b(text.encode(), digest_size=ALIGNMENT).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


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
AS_IT_IS = UniformQuantizer(bit_width=32)

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
    if any(getattr(quantizer, name, False) for name in ("is_exact", "is_lossless", "keeps_elements")):
        return True
    return isinstance(quantizer, _UNBIASED) and quantizer.is_stochastic


def _seed(*parts: int) -> int:
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
