"""Raw memory for Numba: typed pointers from addresses, and scratch on the stack.

Array indexing in Numba handles negative indices, and arrays may overlap; both stop the vectoriser. A typed pointer has
no negative indices, and stack scratch overlaps nothing. A loop of look-ups in a table becomes gathers, which take
several times as long as x86's permutations of a register.
"""

from __future__ import annotations

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

F32, F64 = types.CPointer(types.float32), types.CPointer(types.float64)
I32, U32, I64 = types.CPointer(types.int32), types.CPointer(types.uint32), types.CPointer(types.int64)
U8, U16 = types.CPointer(types.uint8), types.CPointer(types.uint16)


def _pointer_from_address(pointer_type: types.CPointer):
    @intrinsic
    def from_address(typing_context, address):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(pointer_type))

        return pointer_type(types.intp), codegen

    return from_address


def _pointer_cast(pointer_type: types.CPointer):
    @intrinsic
    def cast(typing_context, pointer):
        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], context.get_value_type(pointer_type))

        return pointer_type(pointer), codegen

    return cast


def _bits_as(source, target, llvm_type: ir.Type):
    @intrinsic
    def bits_as(typing_context, value):
        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], llvm_type)

        return target(source), codegen

    return bits_as


def _scratch(pointer_type: types.CPointer):
    """An intrinsic for uninitialised stack memory, freed on return: not in loops; OpenMP's stacks may be small."""

    @intrinsic
    def scratch(typing_context, length):
        def codegen(context, builder, signature, args):
            slot = builder.alloca(context.get_value_type(pointer_type.dtype), size=args[0])
            slot.align = 64
            return slot

        return pointer_type(types.intp), codegen

    return scratch


f32_at, i32_at = _pointer_from_address(F32), _pointer_from_address(I32)
u8_at, u16_at, u32_at = _pointer_from_address(U8), _pointer_from_address(U16), _pointer_from_address(U32)
i64_at = _pointer_from_address(I64)
as_i32 = _pointer_cast(I32)
f32_scratch, f64_scratch = _scratch(F32), _scratch(F64)
u32_scratch, u8_scratch = _scratch(U32), _scratch(U8)
float_of = _bits_as(types.int32, types.float32, ir.FloatType())
bits_of = _bits_as(types.float32, types.int32, ir.IntType(32))
float64_of = _bits_as(types.int64, types.float64, ir.DoubleType())


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
def rint(typing_context, value):
    def codegen(context, builder, signature, args):
        function = declared(builder.module, "llvm.rint.f32", ir.FunctionType(ir.FloatType(), [ir.FloatType()]))
        return builder.call(function, args)

    return types.float32(types.float32), codegen


@intrinsic
def fma(typing_context, a, b, c):
    def codegen(context, builder, signature, args):
        float_type = ir.FloatType()
        function_type = ir.FunctionType(float_type, [float_type] * 3)
        return builder.call(declared(builder.module, "llvm.fma.f32", function_type), args)

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


NONE = 1 << 62
"""Lanes of processors without such permutations: more than any row of codes has."""

_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()


def _lanes_of(context) -> int:
    features = context.codegen().magic_tuple()[2].split(",")
    return 16 if "+avx512f" in features else 8 if "+avx2" in features else NONE


@intrinsic
def lanes(typing_context):
    """Codes that `look_up_lanes` looks up."""

    def codegen(context, builder, signature, args):
        return ir.Constant(ir.IntType(64), _lanes_of(context))

    return types.int64(), codegen


@intrinsic
def look_up_lanes(typing_context, low, high, shift, mask, row, out):
    """out[j] = row[(low[j] | high[j] << 8) >> shift & mask] for the first `lanes()` numbers j, none without lanes.

    Low and high are bytes, shift and mask uint32, the mask at most 15; the row has 16 float32 values.
    """

    def codegen(context, builder, signature, args):
        low, high, shift, mask, row, out = args
        count = _lanes_of(context)
        if count == NONE:
            return context.get_dummy_value()
        words, floats = ir.VectorType(_I32, count), ir.VectorType(_F32, count)
        permutation = ir.FunctionType(floats, [floats, words])

        def splat(value):
            first = builder.insert_element(ir.Constant(words, ir.Undefined), value, _I32(0))
            return builder.shuffle_vector(first, ir.Constant(words, ir.Undefined), ir.Constant(words, [0] * count))

        def entries(start):
            pointer = builder.bitcast(builder.gep(row, [_I32(start)]), floats.as_pointer())
            return builder.load(pointer, align=4)

        high = builder.shl(_wide(builder, high, words), ir.Constant(words, [8] * count))
        word = builder.or_(_wide(builder, low, words), high)
        code = builder.and_(builder.lshr(word, splat(shift)), splat(mask))
        if count == 16:
            permute = declared(builder.module, "llvm.x86.avx512.permvar.sf.512", permutation)
            values = builder.call(permute, [entries(0), code])
        else:  # permutations of 8 entries look at 3 bits
            permute = declared(builder.module, "llvm.x86.avx2.permps", permutation)
            upper = builder.icmp_unsigned(">", code, ir.Constant(words, [7] * count))
            values = builder.select(
                upper, builder.call(permute, [entries(8), code]), builder.call(permute, [entries(0), code])
            )
        builder.store(values, builder.bitcast(out, floats.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(low, high, types.uint32, types.uint32, row, out), codegen


def _wide(builder, pointer, wanted):
    pointer = builder.bitcast(pointer, ir.VectorType(_I8, wanted.count).as_pointer())
    return builder.zext(builder.load(pointer, align=1), wanted)


def declared(module: ir.Module, name: str, function_type: ir.FunctionType) -> ir.Function:
    return module.globals.get(name) or ir.Function(module, function_type, name)


def inlined(function):
    """Compile for use inside kernels, always inlined."""
    return numba.njit(function, nogil=True, error_model="numpy", forceinline=True)


kernel = inlined  # in the loop that `compiler` compiles around it
