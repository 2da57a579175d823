"""Rules that many models share: functions of a module's name and the module.

They decide by the torch functions that a module's code calls, not by class names or parameter values. Names come from
the code of ``forward``, of methods and functions that it calls by name, and of functions in the module's attributes,
without running it. A function that the code calls under no name, such as out of a dictionary, is not seen.
"""

from __future__ import annotations

import dis
import functools
import inspect
import math
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from brevact.autograd.region.rows import is_torch_function
from brevact.injectors.proxies import activations_of, is_quant_proxy

_of_classes: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


def called_in(module: nn.Module) -> frozenset[str]:
    """Return the names of the functions that the forwards of a module and of the modules inside call."""
    return frozenset().union(*map(called_by, _modules_of(module)))


def _modules_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those inside; of a quantizer, which also computes scales, only its activation function."""
    if not is_quant_proxy(module):
        yield module
    for child in activations_of(module) if is_quant_proxy(module) else module.children():
        yield from _modules_of(child)


def called_by(module: nn.Module) -> frozenset[str]:
    """Return the names in a module's own forward, without the ``_`` of in-place functions; ``matmul`` is ``@``, too."""
    kind: type = type(module)
    names = _of_classes.get(kind)
    if names is None:
        seen: set[Any] = set()
        _of_classes[kind] = names = frozenset(_called(_methods(kind, "forward"), kind, seen))
    held = [each for each in vars(module).values() if callable(each) and not isinstance(each, nn.Module)]
    return names | _called(held, kind, set()) if held else names


def _called(functions: Iterable[Any], owner: type, seen: set[Any]) -> set[str]:
    """Return the names of torch functions; of other functions, the names in their code and in code they call."""
    names: set[str] = set()
    for function in map(_inner, functions):
        if is_torch_function(function):
            names.add(_bare(getattr(function, "__name__", "")))
        if isinstance(function, types.FunctionType) and function not in seen:
            seen.add(function)
            own = _names_in_code(function.__code__)
            names |= {_bare(name) for name in own}
            names |= _called(_followed(function, own, owner), owner, seen)
    return names


def _followed(function: types.FunctionType, names: set[str], owner: type) -> Iterator[Any]:
    """Yield the functions that a function may call by these names: torch's public ones, and all others' functions."""
    found = [each for name in names if name in function.__globals__ for each in _functions(function.__globals__[name])]
    found += [method for name in names for method in _methods(owner, name)]
    found += [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    for each in map(_inner, found):
        is_own = str(getattr(each, "__module__", "")).partition(".")[0] != "torch"
        if is_torch_function(each) or is_own:
            yield each


def _functions(target: Any) -> list[Any]:
    if isinstance(target, type) and issubclass(target, torch.autograd.Function):
        return [inspect.getattr_static(target, "forward", None)]
    return [target]


def _methods(owner: type, name: str) -> list[Any]:
    """Return a class's method, and, as long as it names ``super``, those that it overrides."""
    found: list[Any] = []
    for kind in owner.__mro__:
        if name in vars(kind):
            found.append(_inner(vars(kind)[name]))
            if "super" not in _names_in_code(getattr(found[-1], "__code__", None)):
                break
    return found


def _inner(function: Any) -> Any:
    while True:
        if isinstance(function, staticmethod | classmethod | types.MethodType):
            function = function.__func__
        elif isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return function


def _names_in_code(code: types.CodeType | None) -> set[str]:
    if code is None:
        return set()
    names = {*code.co_names}
    if any("MATRIX_MULTIPLY" in each.opname or each.argrepr in ("@", "@=") for each in dis.get_instructions(code)):
        names.add("matmul")
    return names.union(*(_names_in_code(each) for each in code.co_consts if isinstance(each, types.CodeType)))


def _bare(name: str) -> str:
    return name.rstrip("_")


CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

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
    is_depthwise = any(isinstance(each, CONVS) and 1 < each.groups == each.in_channels for each in layers)
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
    return [each for each in module.modules() if isinstance(each, (*CONVS, nn.Linear))]


def _cheap(layers: list[Any], most: int) -> int:
    return sum(_cost(each) <= most for each in layers)


def _cost(layer: Any) -> float:
    """Return a layer's multiplications per output element, by its sizes: its weight may be lazy."""
    if isinstance(layer, nn.Linear):
        return layer.in_features or math.inf
    return layer.in_channels // layer.groups * math.prod(layer.kernel_size) or math.inf
