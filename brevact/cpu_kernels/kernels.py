"""Kernels: functions that Numba compiles in other processes, run here from the libraries that come of that."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from brevact.cpu_kernels.libraries import find, load, stem_of
from brevact.cpu_kernels.processes import Task, compilers


class Kernel:
    """A function that works on a run of blocks, `function(*arguments, start, stop)`, all integers.

    Its C function takes the address of int64 words: the arguments, the number of blocks, the blocks of a piece, and the
    first block that nobody has taken. It takes pieces until none is left, so that any number of threads may call it.

    The function is one of a module, with its source in the names of :mod:`memory`.
    """

    address: int
    """Address of the C function, compiled when it is first asked for."""

    function: Callable[[ctypes.Array], None]
    """The C function, which takes :meth:`words`, and runs without the GIL."""

    def __init__(self, function: Callable[..., None]) -> None:
        functools.update_wrapper(self, function)
        self._task: Task | None = None
        self._count = function.__code__.co_argcount + 1
        self._array = ctypes.c_int64 * self._count
        _kernels.append(self)

    def __getattr__(self, name: str) -> Any:
        """Find `address` or `function` when it is first asked for; a RuntimeError says that it cannot be compiled.

        Not by `functools.cached_property`: that of Python 3.11 holds a lock, which a fork would copy.
        """
        if name == "address":
            address = None
            while address is None:
                path = find(self.task.stem) or compilers().wait_for(self.task, _usual())
                address = load(path)
            self.address = address
            return address
        if name == "function":
            self.function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)
            return self.function
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def task(self) -> Task:
        """What is to be compiled."""
        if self._task is None:
            self._task = Task(self.__module__, self.__name__, stem_of(self.__wrapped__))
        return self._task

    def words(self, *values: int) -> ctypes.Array:
        """Words of the C function, of which ctypes would leave out some without a word.

        Raises:
            TypeError: There are more or fewer.
        """
        if len(values) != self._count:
            raise TypeError(f"{self.__name__} takes {self._count - 1} arguments, and got {len(values) - 1}")
        return self._array(*values)

    def __call__(self, *arguments: int) -> None:
        """Run the blocks from the last but one argument to the last one, in this thread, without the GIL."""
        *others, start, stop = arguments
        self.function(self.words(*others, stop, stop - start, start))


_kernels: list[Kernel] = []


def _usual() -> list[Task]:
    """What a training step needs: it is compiled with the first kernel that is, side by side."""
    tasks = [kernel.task for kernel in _kernels if kernel.task.is_usual()]
    return [task for task in tasks if find(task.stem) is None]


def prepare() -> None:
    """Find out whether kernels can be compiled, if none is there yet: returns when the first one is.

    An ImportError says that they cannot.
    """
    if not any(find(kernel.task.stem) for kernel in _kernels):
        try:
            compilers().wait_for(min((kernel.task for kernel in _kernels), key=Task.rank), _usual())
        except RuntimeError as error:
            raise ImportError(str(error)) from error
