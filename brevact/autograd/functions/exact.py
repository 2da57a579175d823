"""Functions whose saved tensors stay as they are.

Their gradients are singular or exponential in what they save (1/x for a logarithm, exp(y) for a log-softmax): a
rounding error of a fraction of the range would not be noise on the gradient but a different gradient. They are losses
and reductions at the end of a model, where little is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

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
)
_LOGARITHMS = (
    *(F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax),
    *(torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp, torch.logaddexp, Tensor.logaddexp),
    *(torch.log, Tensor.log, torch.log2, Tensor.log2, torch.log10, Tensor.log10, torch.log1p, Tensor.log1p),
)
_ROOTS = (torch.sqrt, Tensor.sqrt, torch.rsqrt, Tensor.rsqrt, torch.reciprocal, Tensor.reciprocal)

KEPT_EXACT = frozenset((*_LOSSES, *_LOGARITHMS, *_ROOTS))
