"""Packed gradients as one run of bytes, the way one process sends them to the others.

A message is a mark of 16 bytes, then the buffers of packed tensors, each from a multiple of 16 bytes on. The mark is a
digest of what the bytes mean: processes whose marks differ would decode something else than was sent.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from brevact.quantizers import PackedActivation, PackedSpec

_ALIGNMENT = 16


def message_of(packs: Sequence[PackedActivation], step: int) -> Tensor:
    """Join packed tensors to one message.

    Args:
        packs: Tensors on one device.
        step: Number of the step, which is part of the mark.

    Returns:
        (nbytes,) uint8 tensor, on their device.
    """
    specs = [pack.spec for pack in packs]
    message = packs[0].buffer.new_zeros(_starts(specs)[-1])
    message[:_ALIGNMENT] = _mark(specs, step).to(message.device)
    for pack, start in zip(packs, _starts(specs), strict=False):
        message[start : start + pack.spec.nbytes] = pack.buffer
    return message


def packs_of(message: Tensor, specs: Sequence[PackedSpec[Any]]) -> list[PackedActivation]:
    """Take a message apart.

    Args:
        message: What :func:`message_of` returned, on whatever process.
        specs: Those of its packed tensors.

    Returns:
        The packed tensors, which share the message's memory.
    """
    starts = _starts(specs)
    return [
        PackedActivation(spec, message[start : start + spec.nbytes]) for spec, start in zip(specs, starts, strict=False)
    ]


def marks_of(messages: Tensor) -> Tensor:
    """Return the marks of messages.

    Args:
        messages: (processes, nbytes) uint8 tensor.

    Returns:
        (processes, 16) view.
    """
    return messages[:, :_ALIGNMENT]


def check_marks(marks: Tensor) -> None:
    """Check that processes mean the same by their messages; waits for the device of the marks.

    Args:
        marks: What :func:`marks_of` returned.

    Raises:
        ValueError: If two marks differ.
    """
    different = (marks != marks[0]).any(1).cpu().nonzero().view(-1).tolist()
    if different:
        raise ValueError(
            f"gradients of rank 0 and of ranks {different} are packed in different ways, or for different steps; "
            "accepted are hooks with the same quantizer and settings on all ranks, from checkpoints of the same step"
        )


def _starts(specs: Sequence[PackedSpec[Any]]) -> list[int]:
    """Where each buffer starts, and at last where the message ends."""
    starts = [_ALIGNMENT]
    for spec in specs:
        starts.append(starts[-1] + -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return starts


def _mark(specs: Sequence[PackedSpec[Any]], step: int) -> Tensor:
    text = f"{step} " + " ".join(map(_text, specs))
    return torch.frombuffer(
        bytearray(hashlib.blake2b(text.encode(), digest_size=_ALIGNMENT).digest()), dtype=torch.uint8
    )


@functools.lru_cache(maxsize=4096)
def _text(spec: PackedSpec[Any]) -> str:
    return f"{spec.quantizer} {spec.layout.shape} {spec.layout.stride} {spec.layout.dtype} {spec.nbytes}"
