"""Functions of other libraries whose gradients have been checked: their saved tensors may be packed without a rule."""

from __future__ import annotations

import enum

from brevact.autograd.settings import BackwardSettings


class Gradient(enum.Enum):
    """How the gradient of a Function depends on its saved tensors."""

    LINEAR = "linear in each tensor that is saved, or as the norm's that a region packs, with its bias of Var/N"
    BOUNDED = "quadratic in a result between 0 and 1: a bias of one copy's variance, as softmax has"
    SMOOTH = "a smooth curve of the input, which is saved: the bias Var f'' / 2 of what derives from a packed tensor"

    def may_pack(self, settings: BackwardSettings) -> bool:
        # a smooth function's input from ``derive_min_bits`` on
        return self is not Gradient.SMOOTH or settings.derives_curved or settings.is_lossless


#: By the Function's path; ``tests/autograd/test_other_code.py`` tests each one.
LIBRARY_FUNCTIONS: dict[str, Gradient] = {
    "torch.nn.modules._functions.SyncBatchNorm": Gradient.LINEAR,
    "timm.layers.activations_me.SwishAutoFn": Gradient.SMOOTH,
    "timm.layers.activations_me.MishAutoFn": Gradient.SMOOTH,
    "transformers.models.bloom.modeling_bloom.GeLUFunction": Gradient.SMOOTH,
    "transformers.models.sew_d.modeling_sew_d.XSoftmax": Gradient.BOUNDED,
}
