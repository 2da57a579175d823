"""Byte messages of packed gradients, which processes exchange.

A message is a mark of 16 bytes, then the buffers of packed tensors, each at a multiple of 16 bytes. The mark is a
digest of the format: processes with different marks would decode other values than were sent. Since backends crash or
hang if messages differ in length, processes compare marks of their settings before the first message.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from brevact.private_names.of_torch import all_gather_single
from brevact.quantizers import PackedActivation, PackedSpec
from brevact.quantizers.brief import brief

_ALIGNMENT = 16


def message_of(packs: Sequence[PackedActivation], step: int) -> Tensor:
    """Join packed tensors on one device into one message, (nbytes,) uint8; its mark depends on the step."""
    specs = [pack.spec for pack in packs]
    message = packs[0].buffer.new_zeros(_starts(specs)[-1])
    message[:_ALIGNMENT] = _digest(f"{step} " + " ".join(map(_text, specs))).to(message.device)
    for pack, start in zip(packs, _starts(specs), strict=False):
        message[start : start + pack.spec.nbytes] = pack.buffer
    return message


def packs_of(message: Tensor, specs: Sequence[PackedSpec[Any]]) -> list[PackedActivation]:
    """Split any process's message into packed tensors of these specs, which share its memory."""
    starts = _starts(specs)
    return [
        PackedActivation(spec, message[start : start + spec.nbytes]) for spec, start in zip(specs, starts, strict=False)
    ]


def marks_of(messages: Tensor) -> Tensor:
    """Return the marks of (processes, nbytes) uint8 messages: a (processes, 16) view."""
    return messages[:, :_ALIGNMENT]


def check_marks(marks: Tensor) -> None:
    """Raise a ValueError if the marks of processes differ; synchronizes with the marks' device."""
    different = (marks != marks[0]).any(1).cpu().nonzero().view(-1).tolist()
    if different:
        raise ValueError(
            f"gradients of rank 0 and of ranks {different} are packed in different ways, or for different steps; "
            "accepted are hooks with the same quantizer and settings on all ranks, from checkpoints of the same step"
        )


def keep_for_this_stream(*tensors: Tensor) -> None:
    """Keep the memory of another stream's tensors until this stream's work is done."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class Agreement:
    """Compares settings once per group, before its processes exchange messages whose length depends on them."""

    def __init__(self) -> None:
        self._groups: set[str] = set()

    def reach(self, group: Any, device: torch.device, *settings: object) -> None:
        """Compare settings between the group's processes, which all call this, unless already done."""
        if not isinstance(group, distributed.ProcessGroup):
            raise TypeError(
                f"process group: got {brief(group)}; accepted is a ProcessGroup of torch.distributed; "
                "register_comm_hook(None, hook) takes the default one"
            )
        if group.group_name in self._groups:
            return
        mark = _digest(" ".join(map(_name, settings))).to(device)
        marks = mark.new_empty(group.size(), _ALIGNMENT)
        all_gather_single(marks.view(-1), mark, group=group)
        check_marks(marks)
        self._groups.add(group.group_name)


def _starts(specs: Sequence[PackedSpec[Any]]) -> list[int]:
    """Return the start of each buffer, and the end of the message."""
    starts = [_ALIGNMENT]
    for spec in specs:
        starts.append(starts[-1] + -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return starts


def _digest(text: str) -> Tensor:
    digest = hashlib.blake2b(text.encode(), digest_size=_ALIGNMENT).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


@functools.lru_cache(maxsize=4096)
def _text(spec: PackedSpec[Any]) -> str:
    return f"{_name(spec.quantizer)} {spec.layout.shape} {spec.layout.stride} {spec.layout.dtype} {spec.nbytes}"


def _name(setting: object) -> str:
    """Return a setting's text without addresses: users' quantizers may lack a ``__repr__``."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(setting))


def after(work: Any, finish: Callable[[], Tensor], is_cpu: bool) -> torch.futures.Future[Tensor]:
    """Run `finish`, without gradients, once a collective is done, and return the future of its result.

    On a device, it runs on the stream that waits for the collective. On the CPU, a separate thread waits and runs it:
    a callback on a thread of the process group (Gloo) could deadlock, since this thread needs the GIL to release the
    Python object, while a thread that destroys the group holds the GIL and waits for the group's threads.

    If the collective or the function raises, the future's `wait` raises a RuntimeError with the cause.
    """

    def finished(done: torch.futures.Future[Any]) -> Tensor:
        found = done.value()  # on a device, raises the collective's error; on the CPU, an error or None
        if isinstance(found, Exception):
            raise found
        with torch.no_grad():
            return finish()

    if not is_cpu:
        return work.get_future().then(finished)
    done: torch.futures.Future[Any] = torch.futures.Future()
    result = done.then(finished)

    def wait() -> None:
        error = None
        try:
            work.wait()
        except Exception as raised:
            error = raised
        done.set_result(error)

    thread = threading.Thread(target=wait, name="brevact collective", daemon=True)
    thread.start()
    _waiting.add(thread)
    return result


#: Seconds that a process waits at exit for collectives with a pending function.
PATIENCE = 1.0
_waiting: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """Wait for running functions: a thread that returns to a finalized interpreter aborts the process."""
    deadline = time.monotonic() + PATIENCE
    for thread in list(_waiting):
        thread.join(max(0.0, deadline - time.monotonic()))
