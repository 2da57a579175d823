"""Torch functions that the fallback must not treat alike, where they have no counterpart for their arguments.

*Exact*: their gradients are singular or exponential in what they save (1/x for a logarithm, exp(y) for a log-softmax,
1/norm), or choose by it (which element is the largest, which ones lie within bounds): a rounding error of a fraction of
the range would not be noise on the gradient but a different gradient. Many are losses and reductions at the end of a
model, where little is stored. Log-softmax, cross-entropy, maxima and norms have counterparts, which store something
else that is harmless; what those do not take (targets that train, small tensors) is exact. So are attention and norms
whose counterparts do not know the arguments: the saved log-sum of scores no longer belongs to packed queries and keys,
saved statistics no longer to a packed input. And so are recurrent layers on a GPU whose weights cuDNN copies into one
flat tensor, which nobody could tell from an activation.

*Layers*: what they return is an activation, even if only a weight went in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.functions.base import is_activation
from brevact.autograd.provenance import is_parameter, tensors_in
from brevact.autograd.storages import storage_address
from brevact.private_names.of_torch import is_any_autocast_enabled

if TYPE_CHECKING:
    from brevact.autograd.regions import Region


def _everywhere(*names: str) -> tuple[Callable, ...]:
    """The functions and methods of these names, in place ones too, wherever torch has them."""
    homes = (torch, Tensor, F, torch.special, torch.linalg)
    found = (getattr(home, name + suffix, None) for name in names for suffix in ("", "_") for home in homes)
    return tuple(function for function in found if callable(function))


_LOSSES = (
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.cosine_embedding_loss,
    F.cross_entropy,
    F.ctc_loss,
    F.gaussian_nll_loss,
    F.hinge_embedding_loss,
    F.huber_loss,
    F.kl_div,
    F.l1_loss,
    F.margin_ranking_loss,
    F.mse_loss,
    F.multi_margin_loss,
    F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss,
    F.nll_loss,
    F.poisson_nll_loss,
    F.smooth_l1_loss,
    F.soft_margin_loss,
    F.triplet_margin_loss,
    F.triplet_margin_with_distance_loss,
    *_everywhere("linear_cross_entropy"),
)
_SINGULAR = _everywhere(
    *(
        "log_softmax",
        "logsumexp",
        "logcumsumexp",
        "logaddexp",
        "logaddexp2",
        "log",
        "log2",
        "log10",
        "log1p",
        "logit",
        "xlogy",
        "xlog1py",
    ),
    *("sqrt", "rsqrt", "reciprocal", "prod", "cumprod", "float_power", "std", "std_mean", "norm", "vector_norm"),
    *("matrix_norm", "renorm", "normalize", "cosine_similarity", "pairwise_distance", "cdist", "pdist", "digamma"),
    *("lgamma", "erfinv", "acos", "asin", "atan2", "acosh", "atanh", "tan", "inv", "inverse", "solve", "lstsq", "pinv"),
    *("det", "slogdet", "logdet", "cholesky", "cholesky_solve", "qr", "svd", "eigh", "eig", "solve_triangular"),
    *("eigvals", "eigvalsh", "svdvals", "inv_ex", "cholesky_ex", "cholesky_inverse", "solve_ex", "lu", "lu_solve"),
    *("entr", "erfcx", "i1", "i1e", "log_ndtr", "multigammaln", "mvlgamma", "ndtri", "polygamma"),
    *("triangular_solve", "lu_factor", "matrix_exp", "hypot", "dist", "addcdiv", "lp_pool1d", "lp_pool2d", "lp_pool3d"),
)
_CHOICES = _everywhere(
    *("max", "min", "amax", "amin", "aminmax", "median", "nanmedian", "maximum", "minimum", "fmax", "fmin"),
    *("clamp", "clip", "clamp_min", "clamp_max", "scatter_reduce", "index_reduce", "grid_sample", "grid_sampler"),
    *("nan_to_num", "rrelu", "rnn_relu", "rnn_relu_cell"),
)
_ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
_NORMS = _everywhere(
    *("layer_norm", "group_norm", "instance_norm", "rms_norm", "batch_norm", "native_layer_norm"),
    "local_response_norm",
)
_EXACT = frozenset((*_LOSSES, *_SINGULAR, *_CHOICES, *_ATTENTION, *_NORMS))

_RECURRENT = frozenset(_everywhere("lstm", "gru", "rnn_tanh"))
_DIVISIONS = frozenset((*_everywhere("div", "divide", "true_divide"), Tensor.__truediv__, Tensor.__itruediv__))
_RECIPROCALS = frozenset((Tensor.__rtruediv__, Tensor.__rdiv__))
_POWERS = frozenset((*_everywhere("pow"), Tensor.__pow__, Tensor.__ipow__, Tensor.__rpow__))

#: Ask for what a tensor is, not for its values.
_UNSEEN = frozenset(
    getattr(Tensor, name)
    for name in (
        *("data_ptr", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "ndimension"),
        *("nelement", "numel", "size", "storage_offset", "stride", "untyped_storage"),
    )
)
#: Count in place: of an integer (the batches that a norm has seen) nothing is stored, and nothing made of it trains.
_COUNTING = frozenset((Tensor.add_, Tensor.__iadd__, Tensor.sub_, Tensor.__isub__, Tensor.fill_, Tensor.zero_))
_INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
#: Let their caller change values without the version counter seeing it.
UNCOUNTED = frozenset((Tensor.data.__get__, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__))  # type: ignore[attr-defined]
#: Functions of which :func:`stores_nothing` knows something.
ASIDE = frozenset((*_UNSEEN, *UNCOUNTED, *_COUNTING, Tensor.__getitem__))
#: Matrix products, whose factors may be weights or activations.
PRODUCTS = frozenset(
    (
        *_everywhere("matmul", "mm", "bmm", "mv", "dot", "addmm", "addbmm", "baddbmm", "addmv"),
        *(torch.einsum, Tensor.__matmul__, Tensor.__rmatmul__),
    )
)
_GETITEM = Tensor.__getitem__
_VIEWING = frozenset((int, slice, type(None), type(Ellipsis)))
LAYERS = frozenset(
    (
        *_everywhere("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *_everywhere("linear", "bilinear", "embedding", "embedding_bag"),
        *_NORMS,
        *_ATTENTION,
    )
)


def stores_nothing(func: Callable, args: tuple) -> bool:
    """Return whether a region need not look at a call of an attribute (``x.shape``) or of a function :data:`ASIDE`."""
    if func is _GETITEM:
        return _makes_view(args[1])
    return func not in _COUNTING or (type(args[0]) is Tensor and args[0].dtype in _INTEGERS)


def _makes_view(index: Any) -> bool:
    """Whether an index makes a view, which is to its tensor what its graph node says."""
    return type(index) in _VIEWING or (type(index) is tuple and all(type(part) in _VIEWING for part in index))


def is_exact(region: Region, func: Callable, args: tuple) -> bool:
    """Return whether what ``func`` saves must stay as it is."""
    if func in _EXACT:
        return True
    if func in _RECURRENT:
        return _copies_weights(args)
    if func in _DIVISIONS or func in _RECIPROCALS:
        denominator = args[0] if func in _RECIPROCALS else args[1] if len(args) > 1 else None
        return _is_large_activation(region, denominator)
    # x^2 saves a factor of its gradient, 2x; every other power is singular or steeper in what it saves.
    return func in _POWERS and not (len(args) > 1 and isinstance(args[1], int | float) and args[1] in (0, 1, 2))


def _copies_weights(args: tuple) -> bool:
    """Whether a recurrent layer has its weights copied: by autocast, or because they are not in one storage."""
    weights = [x for x in tensors_in(args) if is_parameter(x) and x.is_cuda]
    if not weights:
        return False
    return is_any_autocast_enabled() or len({storage_address(weight) for weight in weights}) > 1


def _is_large_activation(region: Region, x: Any) -> bool:
    return is_activation(x) and x.numel() >= region.settings.min_numel and not region.is_weight(x)
