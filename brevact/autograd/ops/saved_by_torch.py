"""Functions without a counterpart: hooks may pack their saved tensors. The rest of the table of ``Saves``.

Recurrent layers stay unpacked if their weights are indistinguishable from activations: on a GPU cuDNN copies weights
that are not in one storage into a flat tensor, and autocast copies them all.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from brevact.autograd.call_arguments import tensors_of_call
from brevact.autograd.deriving.derived import Kind
from brevact.autograd.ops.op import EXACT, MASKS, NOTHING, Op, Saves, Stored, everywhere, places_in_first
from brevact.autograd.region.running import before_first_region
from brevact.autograd.saving.saved import Region
from brevact.autograd.saving.storages import end_known_values, storage_address
from brevact.autograd.saving.weights import is_parameter
from brevact.private_names.of_torch import is_any_autocast_enabled, watch_collectives


def _copies_weights(region: Region, args: tuple) -> bool:
    weights = [x for x in tensors_of_call(args, {}) if is_parameter(x) and x.is_cuda]
    if not weights:
        return False
    return is_any_autocast_enabled() or len({storage_address(weight) for weight in weights}) > 1


_SIZES = (
    *("dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "ndimension"),
    *("nelement", "numel", "size", "storage_offset", "stride"),
)
#: For an integer (a norm's count of batches) nothing is saved, and nothing computed from it trains.
_COUNTING: frozenset[Callable[..., Any]] = frozenset(
    (Tensor.add_, Tensor.__iadd__, Tensor.sub_, Tensor.__isub__, Tensor.fill_, Tensor.zero_)
)
#: Addresses: kernels launched without gradients, as in a Function's forward, write there at once.
_ADDRESSES = (Tensor.data_ptr, Tensor.untyped_storage)
#: Tensors and arrays in the same memory, with no version counter or another one.
_ALIASES: tuple[Callable[..., Any], ...] = (
    *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.__cuda_array_interface__.__get__),
    *(Tensor.storage, Tensor.data.__get__, Tensor.data.__set__),  # type: ignore[attr-defined]
)
_GETITEM = Tensor.__getitem__
OPS = (
    Op(
        everywhere("lstm", "gru", "rnn_tanh"),
        stored=Stored(
            "LSTM, GRU, RNN",
            "input, states and gates, packed; weights unpacked. An LSTM on a CPU: its input and output, packed; "
            "oneDNN's workspace, bytes of no known meaning, unpacked. An RNN with ReLU: as in PyTorch, since its "
            "gradient asks for the sign",
            "noise, biased where steps multiply it",
        ),
        must_not_round=_copies_weights,
    ),
    Op(everywhere("rnn_tanh_cell", "lstm_cell", "gru_cell"), saves=Saves.BOUNDED),
    Op(
        everywhere(
            "cat concat concatenate stack hstack vstack dstack clone contiguous reshape flatten repeat tile flip roll "
            "rot90 repeat_interleave pixel_shuffle pixel_unshuffle channel_shuffle"
        ),
        stored=Stored("cat, stack, pixel shuffle", NOTHING, EXACT),
        saves=Saves.PLACES,
        kind=Kind.MOVE,
    ),
    Op(everywhere("where"), stored=Stored("where", MASKS, EXACT), saves=Saves.PLACES),
    Op(
        everywhere("sort", "msort", "topk", "kthvalue", "mode", "cummax", "cummin"),
        saves=Saves.PLACES,
        places=places_in_first,
    ),
    Op(
        tuple(getattr(home, name) for home in (torch, Tensor) for name in ("max", "min", "median", "nanmedian")),
        must_not_round=lambda region, args: int not in map(type, args[1:]),  # along a dimension, it saves only places
        places=places_in_first,
    ),
    Op((torch.autograd.grad, torch.autograd.backward, Tensor.backward), is_backward=True),
    Op(
        everywhere("add sub subtract rsub neg negative positive to type type_as float double half bfloat16"),
        kind=Kind.SUM,
    ),
    Op(everywhere("mul", "multiply", "div", "divide", "true_divide", "truediv"), kind=Kind.BILINEAR),
    Op(everywhere("mean"), kind=Kind.AVERAGE),
    Op(
        everywhere(
            "add sub subtract rsub neg negative mul multiply div divide true_divide truediv pow square sqrt rsqrt "
            "reciprocal exp log clamp clamp_min clone contiguous to type type_as float double half bfloat16 where "
            "masked_fill"
        ),
        is_pointwise=True,
    ),
    Op(
        everywhere(
            "add sub subtract rsub neg negative positive sum mean cumsum trace diff sum_to_size deg2rad rad2deg floor "
            "ceil round trunc fix frac sign heaviside detach copy to type type_as float double half bfloat16 cpu cuda "
            "xpu view view_as reshape_as unflatten ravel squeeze unsqueeze expand expand_as broadcast_to "
            "broadcast_tensors permute transpose swapaxes swapdims movedim moveaxis t adjoint as_strided unfold fold "
            "narrow narrow_copy select split split_with_sizes unsafe_split unsafe_split_with_sizes chunk unsafe_chunk "
            "tensor_split hsplit vsplit dsplit unbind diagonal diag diag_embed diagflat tril triu row_stack "
            "column_stack block_diag atleast_1d atleast_2d atleast_3d meshgrid cartesian_prod combinations fliplr "
            "flipud select_scatter slice_scatter diagonal_scatter as_strided_scatter native_channel_shuffle fill zero "
            "fft ifft fft2 ifft2 fftn ifftn rfft irfft rfft2 irfft2 rfftn irfftn hfft ihfft hfft2 ihfft2 hfftn ihfftn "
            "fftshift ifftshift view_as_real view_as_complex complex real imag resolve_conj resolve_neg bernoulli "
            "uniform normal exponential empty_like zeros_like ones_like full_like rand_like randn_like eq ne lt le gt "
            "ge isnan isinf isfinite any all argmax argmin argsort fake_quantize_per_tensor_affine "
            "fake_quantize_per_channel_affine"
        ),
        stored=Stored("add, views, fold", NOTHING, EXACT),
        saves=Saves.PLACES,
    ),
    Op(
        everywhere("exp exp2 var trapezoid trapz cumulative_trapezoid affine_grid affine_grid_generator stft"),
        stored=Stored(
            "exp, var, lerp, addcmul and other ops of a closed table",
            "activations packed, masks 1 bit, weights and indices unpacked",
            "unbiased where linear in what is stored",
        ),
        saves=Saves.FACTORS,
    ),
    Op(tuple(getattr(Tensor, name) for name in _SIZES), is_metadata=True),
    Op(tuple(_COUNTING), is_metadata=True),
    Op((*_ADDRESSES, *_ALIASES), is_metadata=True, is_unversioned=True),
    Op((_GETITEM,), is_metadata=True),
    Op((torch.tensor,), is_metadata=True),
)

_INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
_VIEWING = frozenset((int, slice, type(None), type(Ellipsis)))


def stores_nothing(func: Callable, args: tuple) -> bool:
    if func is _GETITEM:  # views have a graph node that records their relation to the tensor
        index = args[1]
        return type(index) in _VIEWING or (type(index) is tuple and _VIEWING.issuperset(map(type, index)))
    return func not in _COUNTING or (type(args[0]) is Tensor and args[0].dtype in _INTEGERS)


def hand_out_memory(func: Callable, args: tuple, caller: FrameType) -> None:
    """Forget values in memory that a function exposes, except to torch and this package, which count versions."""
    is_address = func in _ADDRESSES
    if is_address and caller.f_globals.get("__name__", "").partition(".")[0] in ("torch", "brevact"):
        return
    for x in args:
        if isinstance(x, Tensor):
            end_known_values(x, for_good=not is_address or torch.is_grad_enabled())


before_first_region(lambda: watch_collectives(end_known_values))  # an in-place all-reduce bumps no version
