"""Compile kernels to files: what the processes that :mod:`processes` starts do."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numba
from llvmlite import binding
from numba import types

from brevact.cpu_kernels import intrinsics
from brevact.cpu_kernels.intrinsics import advance, i64_at, load, take, words
from brevact.cpu_kernels.libraries import ENTRY, LINKERS, hash_of

try:
    import fcntl
except ImportError:  # Windows: processes may compile the same kernel
    fcntl = None  # type: ignore[assignment]

if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise ImportError("Numba's compiler is disabled (NUMBA_DISABLE_JIT), and the kernels run compiled only")

_C_FUNCTION = """
declare i32 @{own}(ptr, ptr, i64)
declare void @raised()

define void @{entry}(i64 %words) {{
  %result = alloca ptr
  %error = alloca ptr
  %status = call i32 @{own}(ptr %result, ptr %error, i64 %words)
  %fine = icmp eq i32 %status, 0
  br i1 %fine, label %end, label %bad
bad:
  call void @raised()
  br label %end
end:
  ret void
}}
"""
"""LLVM removes the call of `raised` from a kernel of which it sees that it does not raise."""


class Names(ModuleType):
    """A module of names without meaning, in place of one that the launchers of kernels import and kernels do not use.

    Every attribute is such a module as well: `torch.int16` can be the key of a table.
    """

    def __getattr__(self, name: str) -> Names:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        found = Names(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


def main(folder: str, *tasks: str) -> None:
    """Compile kernels that are not there yet. Each is compiled by one of the processes that look at the folder.

    A task is module, name and stem of the file of a kernel, with colons between.
    """
    sys.modules["brevact.cpu_kernels.memory"] = intrinsics  # here, kernels are written in these names
    for name in ("torch", "brevact.private_names.of_torch"):  # a second each
        sys.modules[name] = Names(name)
    if hasattr(os, "nice"):
        os.nice(5)  # what already runs of a training step comes first
    left, failed = [task.split(":") for task in tasks], False
    with contextlib.ExitStack() as stack:
        lock = None
        with contextlib.suppress(OSError):  # of another user: kernels may be compiled twice
            lock = stack.enter_context(open(Path(folder, "brevact.lock"), "a"))
        for waits in (False, True):
            for task in list(left):
                module, name, stem = task
                with _held(lock, int(stem.rpartition("-")[2], 16) >> 2, waits) as held:
                    if not held:
                        continue
                    left.remove(task)
                    try:
                        if not any(Path(folder).glob(f"{stem}-*")):
                            _write(Path(folder), stem, object_of(getattr(importlib.import_module(module), name)))
                    except Exception:  # the others are compiled all the same
                        traceback.print_exc()
                        failed = True
    sys.exit(failed)


@contextlib.contextmanager
def _held(lock: IO[str] | None, place: int, waits: bool) -> Iterator[bool]:
    """Hold a byte of a file that other processes lock, too; whether it is held: always, if the process waits for it."""
    if fcntl is None or lock is None:
        yield True
        return
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB), 1, place)
    except OSError as error:  # or a file system without locks
        if isinstance(error, BlockingIOError | PermissionError) and not waits:
            yield False
            return
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):
            fcntl.lockf(lock, fcntl.LOCK_UN, 1, place)


def object_of(kernel: Any) -> bytes:
    """An object file with the C function that :class:`kernels.Kernel` describes."""
    count = kernel.py_func.__code__.co_argcount - 2
    arguments_at = words(count)

    def work(address):
        pointer = i64_at(address)
        arguments = arguments_at(pointer)
        blocks, step = load(pointer, count), load(pointer, count + 1)
        free = advance(pointer, count + 2)
        start = take(free, step)
        while start < blocks:
            kernel(*(arguments + (start, min(start + step, blocks))))  # noqa: RUF005 (all that Numba compiles)
            start = take(free, step)

    compiled = numba.cfunc(types.void(types.intp), nogil=True, error_model="numpy")(work)
    module, own = binding.parse_assembly(compiled.inspect_llvm()), compiled.native_name.removeprefix("cfunc.")
    module.link_in(binding.parse_assembly(_C_FUNCTION.format(own=own, entry=ENTRY)))
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != ENTRY:
            value.linkage = "internal"
    module.get_function(own).add_function_attribute("alwaysinline")
    machine = _target_machine(kernel)
    tuning = binding.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization = tuning.slp_vectorization = tuning.loop_unrolling = True
    passes = binding.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    if any(function.name == "raised" for function in module.functions):
        raise TypeError(f"{kernel.__name__}: kernels raise nothing, and this one may")
    return machine.emit_object(module)


def _target_machine(kernel: Any) -> binding.TargetMachine:
    """The processor that Numba compiles for; code that lies anywhere in memory, as libraries do."""
    triple, processor, features = kernel.targetctx.codegen().magic_tuple()
    if "+avx512vbmi2" in features:  # LLVM keeps to 256 bits for the sake of older processors, which slow down for 512
        features += ",-prefer-256-bit"
    return binding.Target.from_triple(triple).create_target_machine(
        cpu=processor, features=features, opt=3, reloc="pic", codemodel="default"
    )


def _write(folder: Path, stem: str, compiled: bytes) -> None:
    """Write the library of an object file into a folder, or the object file where no linker makes a library."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"{stem}.") as own:
        path, library = Path(own, "kernel.o"), Path(own, "kernel.so")
        path.write_bytes(compiled)
        linkers = filter(None, map(shutil.which, LINKERS))
        path = library if any(_link(linker, path, library) for linker in linkers) else path
        os.replace(path, folder / f"{stem}-{hash_of(path.read_bytes())}{path.suffix}")


def _link(linker: str, source: Path, target: Path) -> bool:
    """Whether this linker makes a library that loads."""
    command = [linker, "-shared", "-o", str(target), str(source)]
    if subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode:
        return False
    try:
        ctypes.CDLL(str(target))
    except OSError:  # a folder from which nothing is executed, or a function that is missing
        return False
    return True
