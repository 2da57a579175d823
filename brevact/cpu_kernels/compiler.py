"""Compile kernels to object files, in the process that :mod:`kernels` starts."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import sys
from typing import Any

import numba
from llvmlite import binding
from numba import types

from brevact.cpu_kernels import intrinsics
from brevact.cpu_kernels.intrinsics import advance, i64_at, load, take, words
from brevact.cpu_kernels.kernels import ENTRY

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
"""LLVM removes the call of `raised` from kernels that it proves not to raise."""


def main(workers: str, *tasks: str) -> None:
    """Write the object files of kernels, pickled, to the standard output; a task is `module:name`."""
    sys.modules["brevact.cpu_kernels.memory"] = intrinsics  # here, kernels are written in these names
    out, sys.stdout = sys.stdout, sys.stderr
    if hasattr(os, "nice"):
        os.nice(5)  # a training step that already runs comes first
    for task in tasks:
        importlib.import_module(task.partition(":")[0])
    if "fork" in multiprocessing.get_all_start_methods() and len(tasks) > 1:
        with multiprocessing.get_context("fork").Pool(int(workers)) as pool:
            objects = pool.map(_object_of_task, tasks, chunksize=1)
    else:
        objects = list(map(_object_of_task, tasks))
    out.buffer.write(pickle.dumps(objects))
    out.flush()


def _object_of_task(task: str) -> bytes:
    module, name = task.split(":")
    return object_of(getattr(sys.modules[module], name))


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
    """The processor that Numba compiles for; code whose sections lie anywhere in memory, each for itself.

    LLVM ends the process on loading code of its small model whose sections lie more than 2 GiB apart.
    """
    triple, processor, features = kernel.targetctx.codegen().magic_tuple()
    if "+avx512vbmi2" in features:  # LLVM keeps to 256 bits for the sake of older processors, which slow down for 512
        features += ",-prefer-256-bit"
    reloc, model = ("static", "large") if triple.startswith("x86_64") else ("pic", "default")
    return binding.Target.from_triple(triple).create_target_machine(
        cpu=processor, features=features, opt=3, reloc=reloc, codemodel=model
    )
