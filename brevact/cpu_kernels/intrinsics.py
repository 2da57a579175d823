"""Raw memory for Numba: typed pointers from addresses, and scratch on the stack.

Array indexing in Numba handles negative indices, and arrays may overlap; both stop the vectoriser. A typed pointer has
no negative indices, and stack scratch overlaps nothing.

Only the process that compiles kernels imports Numba. In others these functions are names, which nothing calls.
"""

from __future__ import annotations

import sys
from typing import Any

from brevact.cpu_kernels.kernels import Kernel

if "brevact.cpu_kernels.compiler" in sys.modules:
    import numba
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    DISPATCHERS: dict[str, Any] = {}

    def inlined(function):
        """Compile for use inside kernels, always inlined."""
        return numba.njit(function, nogil=True, error_model="numpy", forceinline=True)

    def kernel(function):
        """Compile, in the loop that `compiler` compiles around it."""
        return DISPATCHERS.setdefault(function.__name__, inlined(function))

else:
    kernel = Kernel

    def intrinsic(function):  # type: ignore[no-redef]
        return function

    inlined = intrinsic


def _pointer(name: str):
    """An intrinsic that makes a pointer to a type of an address, or of a pointer to another one."""

    @intrinsic
    def pointer(typing_context, source):
        pointer_type = types.CPointer(getattr(types, name))

        def codegen(context, builder, signature, args):
            cast = builder.bitcast if isinstance(source, types.CPointer) else builder.inttoptr
            return cast(args[0], context.get_value_type(pointer_type))

        return pointer_type(source if isinstance(source, types.CPointer) else types.intp), codegen

    return pointer


def _bits_as(source: str, target: str):
    @intrinsic
    def bits_as(typing_context, value):
        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], context.get_value_type(signature.return_type))

        return getattr(types, target)(getattr(types, source)), codegen

    return bits_as


def _scratch(name: str):
    """An intrinsic for uninitialised stack memory, freed on return: not in loops; OpenMP's stacks may be small."""

    @intrinsic
    def scratch(typing_context, length):
        def codegen(context, builder, signature, args):
            slot = builder.alloca(context.get_value_type(signature.return_type.dtype), size=args[0])
            slot.align = 64
            return slot

        return types.CPointer(getattr(types, name))(types.intp), codegen

    return scratch


f32_at, i32_at, i64_at = _pointer("float32"), _pointer("int32"), _pointer("int64")
u8_at, u16_at, u32_at = _pointer("uint8"), _pointer("uint16"), _pointer("uint32")
f32_scratch, f64_scratch = _scratch("float32"), _scratch("float64")
u32_scratch, u8_scratch = _scratch("uint32"), _scratch("uint8")
float_of, bits_of = _bits_as("int32", "float32"), _bits_as("float32", "int32")
f64_of = _bits_as("int64", "float64")


@intrinsic
def load(typing_context, pointer, index):
    def codegen(context, builder, signature, args):
        return builder.load(builder.gep(args[0], [args[1]], inbounds=True))

    return pointer.dtype(pointer, types.intp), codegen


@intrinsic
def store(typing_context, pointer, index, value):
    """pointer[index] = value, converted to the pointer's type."""

    def codegen(context, builder, signature, args):
        builder.store(args[2], builder.gep(args[0], [args[1]], inbounds=True))
        return context.get_dummy_value()

    return types.void(pointer, types.intp, pointer.dtype), codegen


@intrinsic
def advance(typing_context, pointer, count):
    def codegen(context, builder, signature, args):
        return builder.gep(args[0], [args[1]], inbounds=True)

    return pointer(pointer, types.intp), codegen


@intrinsic
def fma(typing_context, a, b, c):
    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def take(typing_context, pointer, count):
    """pointer[0], to which `count` is added in one step that no other thread can part."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", args[0], args[1], "monotonic")

    return pointer.dtype(pointer, types.int64), codegen


def words(count: int):
    """An intrinsic that loads the first `count` elements behind a pointer as a tuple."""

    @intrinsic
    def load_words(typing_context, pointer):
        result = types.UniTuple(pointer.dtype, count)

        def codegen(context, builder, signature, args):
            places = (builder.gep(args[0], [ir.Constant(ir.IntType(64), index)]) for index in range(count))
            return context.make_tuple(builder, result, [builder.load(place) for place in places])

        return result(pointer), codegen

    return load_words
