"""The closed table of what the fallback may pack: torch functions whose gradient is known to bear it.

Where a torch function has no counterpart for its arguments, saved-tensor hooks could pack what it saves. They do so for
the functions of this table alone, and for code that is not torch's: other people's ``autograd.Function``s, scripted
code, operators of other libraries. A torch function that is not listed stores its tensors as they are, a new one of a
later torch too, since nobody has looked at its gradient. It may be

- *singular or exponential* in what it saves (1/x of a logarithm, 1/y of a root, exp(y) of a log-sum-exp, the inverse of
  a matrix), so that a rounding error of a fraction of the range is a different gradient and no noise on it;
- a *choice* by what it saves (which element is the largest, between which elements a grid lies);
- a *loss* or another reduction that is one torch function: what it composes inside, nobody sees;
- *attention or a norm* whose counterpart does not know the arguments: a saved log-sum of scores does not belong to
  packed queries and keys, saved statistics not to a packed input.

``tests/autograd/test_op_database.py`` runs each op of torch's own database inside a region, so that a wrong line here
fails there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

_HOMES = (torch, Tensor, F, torch.special, torch.linalg, torch.fft)


def everywhere(*names: str) -> tuple[Callable, ...]:
    """Return the functions, methods and operators of these names, in place ones too, wherever torch has them."""
    found = [getattr(home, name + suffix, None) for name in names for suffix in ("", "_") for home in _HOMES]
    found += [getattr(Tensor, f"__{prefix}{name}__", None) for name in names for prefix in ("", "i", "r")]
    return tuple(function for function in found if callable(function))


#: They store sizes, indices and masks, or nothing: their gradient is the same whatever the elements are.
OF_PLACES = everywhere(
    *("add", "sub", "subtract", "rsub", "neg", "negative", "positive", "sum", "mean", "cumsum", "trace", "diff"),
    *("sum_to_size", "deg2rad", "rad2deg", "floor", "ceil", "round", "trunc", "fix", "frac", "sign", "heaviside"),
    *("clone", "contiguous", "detach", "copy", "to", "type", "type_as", "float", "double", "half", "bfloat16"),
    *("cpu", "cuda", "xpu", "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "squeeze"),
    *("unsqueeze", "expand", "expand_as", "broadcast_to", "broadcast_tensors", "permute", "transpose", "swapaxes"),
    *("swapdims", "movedim", "moveaxis", "t", "adjoint", "as_strided", "unfold", "fold", "narrow", "narrow_copy"),
    *("select", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk", "unsafe_chunk"),
    *("tensor_split", "hsplit", "vsplit", "dsplit", "unbind", "diagonal", "diag", "diag_embed", "diagflat", "tril"),
    *("triu", "cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "row_stack", "column_stack"),
    *("block_diag", "atleast_1d", "atleast_2d", "atleast_3d", "meshgrid", "cartesian_prod", "combinations", "flip"),
    *("fliplr", "flipud", "roll", "rot90", "repeat", "repeat_interleave", "tile", "select_scatter", "slice_scatter"),
    *("diagonal_scatter", "as_strided_scatter", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle"),
    *("native_channel_shuffle", "pad", "constant_pad_nd", "interpolate", "upsample", "avg_pool1d", "avg_pool2d"),
    *("avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "max_pool1d", "max_pool2d"),
    *("max_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "fractional_max_pool2d"),
    *("fractional_max_pool3d", "max_unpool1d", "max_unpool2d", "max_unpool3d", "gather", "take", "take_along_dim"),
    *("index_select", "index_add", "index_copy", "index_fill", "index_put", "put", "scatter", "scatter_add"),
    *("masked_fill", "masked_scatter", "masked_select", "where", "getitem", "setitem", "embedding", "sort", "msort"),
    *("topk", "kthvalue", "mode", "cummax", "cummin", "fill", "zero", "fft", "ifft", "fft2", "ifft2", "fftn", "ifftn"),
    *("rfft", "irfft", "rfft2", "irfft2", "rfftn", "irfftn", "hfft", "ihfft", "hfft2", "ihfft2", "hfftn", "ihfftn"),
    *("fftshift", "ifftshift", "view_as_real", "view_as_complex", "complex", "real", "imag", "resolve_conj"),
    *("resolve_neg", "bernoulli", "uniform", "normal", "exponential", "empty_like", "zeros_like", "ones_like"),
    *("full_like", "rand_like", "randn_like", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "any"),
    *("all", "argmax", "argmin", "argsort", "fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine"),
)
#: Their gradient is linear in each tensor that they save: a factor, an operand, the exponential that they return.
_LINEAR = everywhere(
    *("mul", "multiply", "addcmul", "lerp", "square", "ldexp", "exp", "exp2", "expm1", "var", "var_mean"),
    *("matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "outer", "ger", "addr", "addmm", "addbmm", "baddbmm"),
    *("addmv", "kron", "cross", "vecdot", "tensordot", "chain_matmul", "multi_dot", "einsum", "bilinear", "linear"),
    *("conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("convolution", "trapezoid", "trapz", "cumulative_trapezoid", "affine_grid", "affine_grid_generator"),
    *("embedding_bag", "stft", "dropout", "native_dropout"),
)
#: Quadratic in results between 0 and 1, or -1 and 1, that they save: a bias of the order of one copy's variance.
_BOUNDED = everywhere(
    *("softmax", "softmin", "gumbel_softmax", "sigmoid", "expit", "tanh", "rnn_tanh_cell", "lstm_cell", "gru_cell"),
)

HARMLESS: frozenset[Callable] = frozenset((*OF_PLACES, *_LINEAR, *_BOUNDED))
