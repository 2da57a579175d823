"""How the results of ATen ops depend on their arguments: the table by which saved tensors may be rounded.

A graph's gradients are linear in a saved tensor if each op on the way is; then unbiased rounding of it keeps their
mean. *Smooth* functions of it bias them by the order of the variance. *Exact* arguments are compared, divided by, or go
into functions that are steep somewhere. Ops outside the table are exact in all arguments. It has the ops that
Inductor's decompositions leave.
"""

from __future__ import annotations

import enum
import math
from typing import Any

import torch
from torch import fx

from brevact.compiler.nodes import behind, call_of, closure, packet_of, shape_of, value_of
from brevact.private_names.of_compiler import low_memory_max_pool, to_copy

aten, prims = torch.ops.aten, torch.ops.prims


class Use(enum.IntEnum):
    """Use of an argument; the larger of two is the stricter."""

    LINEAR = 1
    AVERAGED = 2  # quadratic by a sum over many elements, as a norm's gradient in its input
    SMOOTH = 3
    SCORES = 4  # query and key, which are exponentiated
    EXACT = 5


def _packets(namespace: Any, names: str) -> frozenset[Any]:
    return frozenset(getattr(namespace, name) for name in names.split() if hasattr(namespace, name))


#: Views, and copies in another memory order.
MOVES = _packets(
    aten,
    "view _unsafe_view permute transpose t squeeze unsqueeze alias detach clone slice select split "
    "split_with_sizes unbind",
)
ALIASES = _packets(aten, "alias detach")
#: The same values again.
SAME = ALIASES | {aten.clone}
CASTS = frozenset((to_copy, prims.convert_element_type, aten.clone))
#: Sums, moves and casts: linear in all arguments together.
ADDITIVE = (
    MOVES
    | CASTS
    | _packets(
        aten,
        "expand cat stack copy flip roll repeat diagonal diag_embed unfold block_diag fill "
        "view_as_real view_as_complex _conj _conj_physical _neg_view complex "
        "neg add sub rsub sum mean cumsum tril triu _fft_r2c _fft_c2r _fft_c2c "
        "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad2d replication_pad3d "
        "avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d "
        "upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
        "index gather index_select embedding _unsafe_index _unsafe_masked_index where masked_fill masked_scatter "
        "slice_scatter select_scatter diagonal_scatter scatter scatter_add index_add index_put _unsafe_index_put "
        "_unsafe_masked_index_put_accumulate",
    )
    | _packets(
        prims,
        "broadcast_in_dim view_of split_dim collapse_view rev device_put inductor_force_stride_order "
        "_low_memory_max_pool_offsets_to_indices",
    )
)
#: Products of matrices: a function of them is one of many rounded values.
MATRIX_PRODUCTS = _packets(aten, "mm bmm addmm baddbmm addbmm mv addmv convolution _grouped_mm")
#: Products: linear in each argument, quadratic in a tensor that several arguments depend on.
PRODUCTS = (
    MATRIX_PRODUCTS
    | _packets(aten, "mul addcmul dot vdot addr linalg_cross _trilinear convolution_backward lerp")
    | _packets(prims, "fma")
)
#: Sums over elements.
SUMS = _packets(aten, "sum mean")
#: Smooth functions of all arguments, without a steep place.
SMOOTH = _packets(aten, "sigmoid tanh erf erfc atan asinh var var_mean")
#: Smooth functions whose slopes follow from their results, which have a bound.
SATURATING = frozenset((aten.tanh, aten.sigmoid))
#: Ops between a layer's output and functions of it.
AFFINE = MOVES | CASTS | frozenset((aten.add, aten.sub, aten.mul, aten.div, aten.neg))
#: Ops whose results have the values of no argument.
SIZES = _packets(
    aten,
    "full_like zeros_like ones_like empty_like new_zeros new_ones new_full new_empty new_empty_strided rand_like "
    "randn_like sym_size sym_stride sym_numel sym_storage_offset",
)
#: Ops that read the sizes of their second argument.
OF_SIZES = _packets(
    aten,
    "avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward "
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward adaptive_max_pool2d_backward "
    "adaptive_max_pool3d_backward fractional_max_pool2d_backward fractional_max_pool3d_backward "
    "replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward reflection_pad1d_backward "
    "reflection_pad2d_backward reflection_pad3d_backward",
)
L, S, Q, E = Use.LINEAR, Use.SMOOTH, Use.SCORES, Use.EXACT
#: Uses by place, of ops whose arguments differ; others are exact.
BY_PLACE: dict[Any, dict[int, Use]] = {
    packet: uses
    for names, uses in {
        "div": {0: L},
        "grid_sampler_2d grid_sampler_3d": {0: L},
        "grid_sampler_2d_backward grid_sampler_3d_backward": {0: L, 1: L},
        "_fused_rms_norm_backward": {0: L, 1: S, 4: L},
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention": {0: Q, 1: Q, 2: L},
        "_scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward "
        "_scaled_dot_product_cudnn_attention_backward": {0: L, 1: Q, 2: Q, 3: L, 4: L, 5: Q},
        "_scaled_dot_product_efficient_attention_backward": {0: L, 1: Q, 2: Q, 3: L, 5: L, 6: Q},
    }.items()
    for packet in _packets(aten, names)
}
#: Fused attention: the place of the probability of dropout, and that of the output in the backward pass.
_ATTENTION = {
    **{"flash_attention": (3, 4), "flash_attention_for_cpu": (3, 4)},
    **{"efficient_attention": (5, 5), "cudnn_attention": (5, 4)},
}
_DROPOUT = {
    packet: dropout
    for name, (dropout, _) in _ATTENTION.items()
    for packet in _packets(aten, f"_scaled_dot_product_{name}")
}
#: By backward pass, which has it beside query, key and value.
OUTPUT = {
    packet: output
    for name, (_, output) in _ATTENTION.items()
    for packet in _packets(aten, f"_scaled_dot_product_{name}_backward")
}
#: Places of query and key in calls of attention and of its backward pass.
KEYS = {**dict.fromkeys(_DROPOUT, (0, 1)), **dict.fromkeys(OUTPUT, (1, 2))}
#: Functions of 1 + exp(x) that are smooth in x.
OF_ONE_PLUS_EXP = _packets(aten, "log reciprocal rsqrt div")


def powers_are_smooth(exponent: Any) -> bool:
    return isinstance(exponent, int | float) and 1 <= exponent <= 4 and float(exponent).is_integer()


#: Functions with a kink, as (comparison, constant): where the comparison holds, the constant; elsewhere the argument.
KINKS = {
    aten.relu: lambda args: (aten.le, args[0], 0),
    aten.clamp_min: lambda args: (aten.le, args[0], args[1]),
    aten.clamp_max: lambda args: (aten.ge, args[0], args[1]),
}
#: Number of different values in the integers that an op returns.
PLACES = {
    aten.max_pool2d_with_indices: lambda args: math.prod(args[0].meta["val"].shape[-2:]),
    aten.max_pool3d_with_indices: lambda args: math.prod(args[0].meta["val"].shape[-3:]),
    low_memory_max_pool: lambda args: math.prod(args[1]),
    **dict.fromkeys(
        _packets(aten, "adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d"),
        lambda args: math.prod(args[0].meta["val"].shape[1:]),
    ),
    **dict.fromkeys(
        _packets(aten, "max min sort topk kthvalue mode median nanmedian cummax cummin"),
        lambda args: max(1, *args[0].meta["val"].shape),
    ),
}


def independent_of(node: Any, result: Any) -> tuple[int, ...]:
    """Places of arguments on which a result of several does not depend."""
    if packet_of(node) in _DROPOUT:  # sums of exponentials of scores
        return (2,) if result else ()
    return ((1,), (2,), (1, 2))[result] if packet_of(node) is aten.convolution_backward else ()


def cost_of(node: Any) -> int:
    """Multiplications per element of a layer's output; 0 for other ops, and for symbolic sizes."""
    packet = packet_of(node)
    if packet is aten.convolution and not node.args[6]:
        weight = node.args[1].meta["val"]
        cost = weight.numel() // weight.shape[0]
    elif packet in (aten.mm, aten.addmm):
        cost = node.args[-1].meta["val"].shape[0]
    else:
        return 0
    return cost if isinstance(cost, int) else 0


_CHEAP = _packets(
    aten,
    "neg add sub rsub mul sigmoid tanh erf where masked_fill relu clamp_min clamp_max silu gelu addcmul bitwise_or "
    "bitwise_and logical_or logical_and logical_not clone view _unsafe_view permute expand squeeze unsqueeze "
    "alias slice cat embedding index index_select gather exp log1p",
) | _packets(prims, "convert_element_type")


def scaled(node: Any) -> tuple[Any, float]:
    """A tensor, without casts and powers of 1, and the factor by which a node multiplies it."""
    factor = 1.0
    while True:
        packet = packet_of(node)
        if packet in (aten.mul, aten.div) and isinstance(node.args[1], int | float) and node.args[1]:
            factor *= node.args[1] if packet is aten.mul else 1 / node.args[1]
        elif packet not in CASTS and not (packet is aten.pow and node.args[1] == 1):
            return node, factor
        node = node.args[0]


def is_softmax(node: Any) -> bool:
    """Whether a node is a softmax over classes; attention's have more than 32 keys in the last of some dimensions.

    So are its probabilities without those above 1/2.
    """
    dim = dim_of_softmax(node.args[1] if packet_of(node) is aten.where else node)
    shape = node.meta["val"].shape
    return dim is not None and (len(shape) < 3 or dim < len(shape) - 1 or shape[dim] <= 32)


def dim_of_softmax(node: Any) -> int | None:
    if packet_of(node) in CASTS:
        node = node.args[0]
    above, below = (*getattr(node, "args", ()), None, None)[:2]
    names = [packet_of(each) for each in (node, above, below)]
    if names != [aten.div, aten.exp, aten.sum] or below.args[0] is not above:
        return None
    return int(below.args[1][0] % node.meta["val"].dim())


def classes_of(node: Any) -> int | None:
    """The dimension of classes of a softmax or of exp(x - log(sum of exponentials)); None for other nodes."""
    dim = dim_of_softmax(node)
    if dim is not None:
        return dim if isinstance(node.meta["val"].shape[dim], int) else None
    node = behind(node, CASTS | SAME)
    x: Any = behind(node.args[0], CASTS | SAME) if packet_of(node) is aten.exp else None
    total = x.args[1] if packet_of(x) is aten.sub else None
    shapes = [shape_of(x), shape_of(total)]
    total = behind(total, MOVES | CASTS | {aten.add})
    found = [dim for dim, (many, one) in enumerate(zip(*shapes, strict=False)) if many != 1 and one == 1]
    is_one = packet_of(total) is aten.log and len(shapes[0]) == len(shapes[1]) and len(found) == 1
    return found[0] if is_one and isinstance(shapes[0][found[0]], int) else None


def is_of_attention(node: Any) -> bool:
    """Whether a node is of the softmax in torch's attention where that is no op of its own, as with dropout."""
    return str(node.meta.get("original_aten")) == "aten._safe_softmax.default"


def is_attention(node: Any) -> bool:
    """Whether a node is torch's fused attention, which draws no dropout, or one of its results."""
    node = call_of(node)
    place = _DROPOUT.get(packet_of(node))
    if place is None:
        return False
    return (node.args[place] if len(node.args) > place else node.kwargs.get("dropout_p", 0.0)) == 0


def is_score(node: Any) -> bool:
    """Whether a node is the products of query and key that such a softmax reads, or their maxima or its sums.

    By maxima and sums of other scores, rounded ones would exceed a probability of 1 without a bound.
    """
    if is_of_attention(node):
        return packet_of(node) in (aten.amax, aten.sum)
    products = [node] if packet_of(node) is aten.bmm else []
    found = closure(products, lambda each: (user for user in each.users if packet_of(user) in AFFINE))
    return any(packet_of(user) is aten.amax and is_of_attention(user) for each in found for user in each.users)


def is_at_least_one(node: Any) -> bool:
    """Whether a node is 1 or more, plus an exponential, a magnitude or a square."""
    if packet_of(node) is not aten.add:
        return False
    term, least = node.args[:2]
    if not isinstance(least, int | float) or least < 1:
        return False
    return is_square(term) or packet_of(term) in (aten.exp, aten.abs)


def is_square(node: Any) -> bool:
    packet = packet_of(node)
    return bool((packet is aten.pow and node.args[1] == 2) or (packet is aten.mul and node.args[0] is node.args[1]))


def _is_root_of_square(node: Any, x: Any) -> bool:
    """Whether a node is the root of the square of ``x``, or of that plus a number."""
    below: Any = node.args[0] if packet_of(node) is aten.sqrt else None
    if packet_of(below) is aten.add and isinstance(below.args[1], int | float) and below.args[1] >= 0:
        below = below.args[0]
    return is_square(below) and scaled(below.args[0])[0] is x


def is_steep(node: Any) -> bool:
    """Whether a node is an exponential or a quotient without a bound: few of its values would take all others' range.

    Quotients by numbers that broadcast, such as norms and sums of rows, have one, and by roots of their squares.
    """
    if packet_of(node) in (aten.div, aten.reciprocal):
        below = node.args[-1]
        is_same = value_of(below) is not None and shape_of(node) == shape_of(below)
        if not is_same or packet_of(below) is aten.expand or is_at_least_one(below):
            return False
        return not (packet_of(node) is aten.div and _is_root_of_square(scaled(below)[0], scaled(node.args[0])[0]))
    if packet_of(node) not in (aten.exp, aten.expm1):
        return False
    x = behind(node.args[0], MOVES | CASTS)
    packet = packet_of(x)
    is_below_maximum = packet is aten.sub and value_of(x.args[1]) is not None
    factors = x.args if packet is aten.mul else (x,)
    is_negative = any(packet_of(behind(each, MOVES | CASTS)) is aten.neg for each in factors)
    return not (is_below_maximum or is_negative or packet in (aten.clamp_max, aten.where))


def is_decomposition(node: Any) -> bool:
    """Whether a node is a factor of a matrix: solving by rounded factors is another problem."""
    return "linalg" in str(packet_of(call_of(node)))


def is_cheap(node: Any) -> bool:
    """Whether each element is computed from one element of each argument, without division."""
    packet = packet_of(node)
    if packet is aten.div:
        return isinstance(node.args[1], int | float) or is_at_least_one(node.args[1])
    return packet in _CHEAP or (packet is aten.rsqrt and is_at_least_one(node.args[0]))


def root_of(node: Any) -> fx.Node:
    """The tensor that a node is a view of, or a part, or a copy in another memory order."""
    while packet_of(call_of(node)) in MOVES:
        node = call_of(node).args[0]
    return node
