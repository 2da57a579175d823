"""What follows a collective that another thread waits for."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def after(work: Any, finish: Callable[[], Tensor], is_cpu: bool) -> torch.futures.Future[Tensor]:
    """Return the future of a function's result once a collective is done.

    On a device, the function runs on the stream that waits for the collective. On the CPU, a thread of its own waits
    and runs it. A callback on a thread of the process group (Gloo) would be a Python object that this thread lets go,
    for which it waits for the interpreter; a thread that destroys the group at that time holds the interpreter, and
    waits for the group's threads.

    >>> from torch import distributed
    >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    >>> x = torch.ones(2)
    >>> after(distributed.all_reduce(x, async_op=True), lambda: x * 2, is_cpu=True).wait()
    tensor([2., 2.])
    >>> distributed.destroy_process_group()

    Args:
        work: what a collective returned with ``async_op=True``.
        finish: runs without gradients.
        is_cpu: whether the collective is one of tensors in host memory.

    Returns:
        The future. Where the collective or the function raises, so does its `wait`: a RuntimeError that tells why.
    """

    def finished(done: torch.futures.Future[Any]) -> Tensor:
        found = done.value()  # on a device, raises what the collective raised; on the CPU, an error or None
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


#: Seconds for which a process that ends waits for collectives whose function is still to run.
PATIENCE = 1.0
_waiting: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """Let functions end that run now: a thread that comes back to an interpreter which has ended aborts the process."""
    deadline = time.monotonic() + PATIENCE
    for thread in list(_waiting):
        thread.join(max(0.0, deadline - time.monotonic()))
