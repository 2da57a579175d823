"""Table look-ups of many codes at once, by permutations of registers, which x86 has.

LLVM turns a loop of look-ups into gathers, which take several times as long as a permutation of a register.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

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
    """The function of this name, which a module declares once."""
    return module.globals.get(name) or ir.Function(module, function_type, name)
