"""Rules that many models share: functions of a module's name and the module.

They decide by the torch functions that a module's code calls (:mod:`brevact.policy.called_functions`), whether the
module is torch's, another library's or the user's, and not by class names or parameter values.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from brevact.injectors.proxies import is_quant_proxy
from brevact.policy.called_functions import called_by, called_in

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

#: Maximum multiplications per output element of recomputed layers, if only the cheapest are recomputed.
FEW = 128
#: Maximum multiplications per output element of a comparatively cheap layer.
MORE = 256
#: Maximum multiplications per output element of recomputed layers, if memory has priority.
MANY = 1024

#: Activation functions that are piecewise linear.
_RECTIFIERS = frozenset(
    "hardshrink hardsigmoid hardtanh leaky_relu prelu relu relu6 rrelu softshrink threshold".split()
)
#: Other elementwise activation functions.
_SMOOTH = frozenset(
    "celu elu erf gelu glu hardswish logsigmoid mish selu sigmoid silu softplus softsign tanh tanhshrink".split()
)
_SOFTMAXES = frozenset("gumbel_softmax softmax softmin".split())
_ATTENTIONS = frozenset("multi_head_attention_forward scaled_dot_product_attention".split())
_RECURRENT = frozenset("gru gru_cell lstm lstm_cell rnn_tanh rnn_tanh_cell".split())
#: Norms, and the divisors in libraries' own norms.
_NORMS = frozenset(
    "batch_norm group_norm instance_norm layer_norm local_response_norm native_layer_norm rms_norm rsqrt std std_mean "
    "var var_mean".split()
)
_PRODUCTS = frozenset(
    "addmm baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution einsum "
    "linear matmul _conv_forward".split()
)


def is_norm(name: str, module: nn.Module) -> bool:
    """Rule: batch, layer, group, instance and RMS norm, including other libraries', by the functions that they call.

    A norm multiplies no matrices, and contains no module with parameters.
    """
    called = called_by(module)
    if called & _PRODUCTS or not called & _NORMS:
        return False
    return not any(True for child in module.children() for _ in child.parameters())


def is_activation_function(name: str, module: nn.Module) -> bool:
    """Rule: ReLU, GELU, SiLU, softmax and the like, including other libraries', by the functions that they call.

    It has no parameters but its quantizer's, no modules inside, and multiplies no matrices.
    """
    if any(True for _ in module.parameters(recurse=False)) or not all(map(is_quant_proxy, module.children())):
        return False
    called = called_in(module)
    return bool(called & (_RECTIFIERS | _SMOOTH | _SOFTMAXES | {"log_softmax"})) and not called & (_PRODUCTS | _NORMS)


def computes_attention(name: str, module: nn.Module) -> bool:
    """Rule for modules whose own forward computes attention: torch's, or a softmax and a product of matrices."""
    called = called_by(module)
    return bool(called & _ATTENTIONS) or bool(called & _SOFTMAXES and called & _PRODUCTS)


def is_rectified(name: str, module: nn.Module) -> bool:
    """Rule: modules with activation functions, all of them piecewise linear.

    They may be modules (``nn.ReLU``) or calls (``F.relu`` in a forward). Attention and recurrent layers, which compute
    a softmax, a sigmoid or a tanh, are not piecewise linear.
    """
    called = called_in(module)
    return bool(called & _RECTIFIERS) and not called & (_SMOOTH | _SOFTMAXES | _ATTENTIONS | _RECURRENT)


def is_separable(name: str, module: nn.Module) -> bool:
    """Rule for a model as a whole: a batch-normalized network of depthwise convolutions (MobileNets, EfficientNets).

    At least a quarter of its layers cost at most 128 multiplications per element, and some are depthwise.
    """
    layers = _layers(module)
    is_depthwise = any(isinstance(each, CONVOLUTIONS) and 1 < each.groups == each.in_channels for each in layers)
    return is_depthwise and 4 * _cheap(layers, FEW) >= len(layers) and "batch_norm" in called_in(module)


def is_rectified_and_costly(name: str, module: nn.Module) -> bool:
    """Rule for a model as a whole: rectified (:func:`is_rectified`), with layers that are costly to recompute.

    Fewer than a third of its layers cost at most 256 multiplications per element: VGG, ResNet-18 and 34, DenseNets,
    U-Nets. Lazy layers count as costly, and a model without layers that could be recomputed matches, too.
    """
    layers = _layers(module)
    return 3 * _cheap(layers, MORE) < max(1, len(layers)) and is_rectified(name, module)


#: Rules for a model as a whole: only the model is tested, and if one matches, no later rule counts.
OF_MODELS = (is_separable, is_rectified_and_costly)


def _layers(module: nn.Module) -> list[Any]:
    return [each for each in module.modules() if isinstance(each, (*CONVOLUTIONS, nn.Linear))]


def _cheap(layers: list[Any], most: int) -> int:
    return sum(_cost(each) <= most for each in layers)


def _cost(layer: Any) -> float:
    """Return a layer's multiplications per output element, by its sizes: its weight may be lazy.

    Lazy layers do not know their inputs yet, and count as costly.
    """
    if isinstance(layer, nn.Linear):
        return layer.in_features or math.inf
    return layer.in_channels // layer.groups * math.prod(layer.kernel_size) or math.inf
