"""Run a function after a collective, without a callback on the process group's thread."""

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
