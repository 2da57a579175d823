"""Compile kernels to object files, in the process that :mod:`kernels` starts."""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
import sys

import numba
from llvmlite import binding
from numba import types

from brevact.cpu_kernels.intrinsics import DISPATCHERS, advance, i64_at, load, take, words
from brevact.cpu_kernels.kernels import package_of

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


def main(root: str, workers: int) -> None:
    """Write the object files of the kernels of a module's package, pickled, to the standard output."""
    out, sys.stdout = sys.stdout, sys.stderr
    importlib.import_module(root)
    names = [name for name, kernel in DISPATCHERS.items() if package_of(kernel.__module__) == package_of(root)]
    if "fork" in multiprocessing.get_all_start_methods() and min(len(names), workers) > 1:
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            objects = pool.map(_object_of, names, chunksize=1)
    else:
        objects = list(map(_object_of, names))
    out.buffer.write(pickle.dumps(objects))
    out.flush()


def _object_of(name: str) -> bytes:
    """An object file with the C function that :class:`kernels.Kernel` describes."""
    kernel = DISPATCHERS[name]
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
    module.link_in(binding.parse_assembly(_C_FUNCTION.format(own=own, entry=name)))
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != name:
            value.linkage = "internal"
    module.get_function(own).add_function_attribute("alwaysinline")
    # LLVM ends the process on loading code of its small model whose sections lie more than 2 GiB apart.
    triple, processor, features = kernel.targetctx.codegen().magic_tuple()
    if "+avx512vbmi2" in features:  # LLVM keeps to 256 bits for the sake of older processors, which slow down for 512
        features += ",-prefer-256-bit"
    reloc, model = ("static", "large") if triple.startswith("x86_64") else ("pic", "default")
    machine = binding.Target.from_triple(triple).create_target_machine(
        cpu=processor, features=features, opt=3, reloc=reloc, codemodel=model
    )
    tuning = binding.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization = tuning.slp_vectorization = tuning.loop_unrolling = True
    passes = binding.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    if any(function.name == "raised" for function in module.functions):
        raise TypeError(f"{name}: kernels raise nothing, and this one may")
    return machine.emit_object(module)
