"""Functions without a counterpart: hooks may pack their saved tensors. The rest of the table of ``Saves``.

Recurrent layers stay unpacked if their weights are indistinguishable from activations: on a GPU cuDNN copies weights
that are not in one storage into a flat tensor, and autocast copies them all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from brevact.autograd.call_arguments import tensors_of_call
from brevact.autograd.derived import Kind
from brevact.autograd.keeper import Keeper
from brevact.autograd.ops.op import EXACT, NOTHING, Op, Saves, Stored, everywhere
from brevact.autograd.storages import storage_address
from brevact.autograd.weights import is_parameter
from brevact.private_names.of_torch import is_any_autocast_enabled


def _copies_weights(region: Keeper, args: tuple) -> bool:
    weights = [x for x in tensors_of_call(args, {}) if is_parameter(x) and x.is_cuda]
    if not weights:
        return False
    return is_any_autocast_enabled() or len({storage_address(weight) for weight in weights}) > 1


OPS = (
    Op(
        everywhere("lstm", "gru", "rnn_tanh"),
        stored=Stored(
            "LSTM, GRU, RNN",
            "input, states and gates, packed; weights as they are. An LSTM on a CPU: its input and output, packed; "
            "oneDNN's workspace, bytes of no known meaning, as it is. An RNN with ReLU: as in PyTorch, since its "
            "gradient asks for the sign",
            "noise, biased where steps multiply it",
        ),
        must_not_round=_copies_weights,
    ),
    Op(everywhere("rnn_tanh_cell", "lstm_cell", "gru_cell"), saves=Saves.BOUNDED),
    Op(
        everywhere(
            *("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "clone", "contiguous", "reshape"),
            *("flatten", "repeat", "tile", "flip", "roll", "rot90", "repeat_interleave", "pixel_shuffle"),
            *("pixel_unshuffle", "channel_shuffle"),
        ),
        stored=Stored("cat, stack, pixel shuffle", NOTHING, EXACT),
        saves=Saves.PLACES,
        kind=Kind.MOVE,
    ),
    Op((torch.autograd.grad, torch.autograd.backward, Tensor.backward), is_backward=True),
    Op(
        everywhere(
            *("add", "sub", "subtract", "rsub", "neg", "negative", "positive", "to", "type", "type_as", "float"),
            *("double", "half", "bfloat16"),
        ),
        kind=Kind.SUM,
    ),
    Op(everywhere("mul", "multiply", "div", "divide", "true_divide", "truediv"), kind=Kind.BILINEAR),
    Op(everywhere("mean"), kind=Kind.AVERAGE),
    Op(
        everywhere(
            *("add", "sub", "subtract", "rsub", "neg", "negative", "mul", "multiply", "div", "divide", "true_divide"),
            *("truediv", "pow", "square", "sqrt", "rsqrt", "reciprocal", "exp", "log", "clamp", "clamp_min"),
            *("clone", "contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16"),
        ),
        is_pointwise=True,
    ),
    Op(
        everywhere(
            *("add", "sub", "subtract", "rsub", "neg", "negative", "positive", "sum", "mean", "cumsum", "trace"),
            *("diff", "sum_to_size", "deg2rad", "rad2deg", "floor", "ceil", "round", "trunc", "fix", "frac", "sign"),
            *("heaviside", "detach", "copy", "to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu"),
            *("cuda", "xpu", "view", "view_as", "reshape_as", "unflatten", "ravel", "squeeze", "unsqueeze", "expand"),
            *("expand_as", "broadcast_to", "broadcast_tensors", "permute", "transpose", "swapaxes", "swapdims"),
            *("movedim", "moveaxis", "t", "adjoint", "as_strided", "unfold", "fold", "narrow", "narrow_copy"),
            *("select", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk"),
            *("unsafe_chunk", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind", "diagonal", "diag"),
            *("diag_embed", "diagflat", "tril", "triu", "row_stack", "column_stack", "block_diag", "atleast_1d"),
            *("atleast_2d", "atleast_3d", "meshgrid", "cartesian_prod", "combinations", "fliplr", "flipud"),
            *("select_scatter", "slice_scatter", "diagonal_scatter", "as_strided_scatter", "native_channel_shuffle"),
            *("fill", "zero", "fft", "ifft", "fft2", "ifft2", "fftn", "ifftn", "rfft", "irfft", "rfft2", "irfft2"),
            *("rfftn", "irfftn", "hfft", "ihfft", "hfft2", "ihfft2", "hfftn", "ihfftn", "fftshift", "ifftshift"),
            *("view_as_real", "view_as_complex", "complex", "real", "imag", "resolve_conj", "resolve_neg"),
            *("bernoulli", "uniform", "normal", "exponential", "empty_like", "zeros_like", "ones_like", "full_like"),
            *("rand_like", "randn_like", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "any"),
            *("all", "argmax", "argmin", "argsort"),
            *("fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine"),
        ),
        stored=Stored("add, views, fold", NOTHING, EXACT),
        saves=Saves.PLACES,
    ),
    Op(
        everywhere(
            *("exp", "exp2", "var", "var_mean", "trapezoid", "trapz", "cumulative_trapezoid", "affine_grid"),
            *("affine_grid_generator", "stft"),
        ),
        stored=Stored(
            "exp, var, lerp, addcmul and other ops of a closed table",
            "activations packed, masks 1 bit, weights and indices as they are",
            "unbiased where linear in what is stored",
        ),
        saves=Saves.FACTORS,
    ),
)
