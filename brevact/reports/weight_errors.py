"""Direct errors of quantization in weight gradients, by a closed form: one pass for all layers.

A linear layer or a convolution has the weight gradient g (*) x, with g the gradient at its output and x its input. With
the decoded x~ in place of x, its error is g (*) (x~ - x) regardless of other quantization: the gradient under backward
quantization minus g (*) x.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import grad as of_weights

from brevact.autograd import regions_disabled
from brevact.injectors.proxies import names_of
from brevact.reports.gradient_passes import Loss, gradients, squared_norm

_OF_CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: of_weights.conv1d_weight,
    nn.Conv2d: of_weights.conv2d_weight,
    nn.Conv3d: of_weights.conv3d_weight,
}
#: Largest relative squared error, from arithmetic, of a product that equals the weight gradient.
_MOST_ERROR = 1e-6

Layers = Mapping[str, Any]


def layers_with_formula(model: nn.Module, batch: Any, loss: Loss, seed: int) -> Layers:
    """Return the layers, by name, whose exact weight gradient is the product of input and output gradient.

    Those are linear layers and convolutions of any class, unless they share their weight or compute with another one.
    Runs one exact pass with `seed` for the model's random numbers; gradients are None afterwards.
    """
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    layers = {}
    for module, name in names_of(model).items():
        weight = getattr(module, "weight", None)
        is_own = isinstance(weight, nn.Parameter) and weight.requires_grad and uses[id(weight)] == 1
        if is_own and (isinstance(module, nn.Linear) or _is_convolution(module)):
            layers[name] = module
    with regions_disabled():
        errors = _errors(model, layers, batch, loss, seed, None)
    return {name: layers[name] for name, (error, square) in errors.items() if error <= _MOST_ERROR * square}


def weight_errors(
    model: nn.Module, layers: Layers, batch: Any, loss: Loss, seed: int, quantization: int
) -> dict[str, float]:
    """Return the squared error of each layer's weight gradient that comes from its decoded input.

    Runs one pass that keeps the layers' inputs, as plain training does; gradients are None afterwards. Omits layers
    that did not run or whose input changed. `seed` is for the model, `quantization` for its quantizers.
    """
    found = _errors(model, layers, batch, loss, seed, quantization)
    return {name: error for name, (error, _) in found.items()}


def _errors(
    model: nn.Module, layers: Layers, batch: Any, loss: Loss, seed: int, quantization: int | None
) -> dict[str, tuple[float, float]]:
    products: dict[Any, Tensor | None] = {}
    handles = [module.register_forward_hook(functools.partial(_watch, products)) for module in layers.values()]
    try:
        found = gradients(model, batch, loss, seed, quantization)
    finally:
        for handle in handles:
            handle.remove()
    trained = [p for p in model.parameters() if p.requires_grad]
    found_of = {id(p): grad.double() for p, grad in zip(trained, found, strict=True)}
    return {
        name: (squared_norm([found_of[id(module.weight)] - product]), squared_norm([found_of[id(module.weight)]]))
        for name, module in layers.items()
        if (product := products.get(module)) is not None
    }


def _watch(products: dict[Any, Tensor | None], module: Any, args: tuple[Any, ...], out: Any) -> None:
    """Forward hook: accumulate products of the input and the gradient at the output."""
    if not args or type(args[0]) is not Tensor or type(out) is not Tensor or not out.requires_grad:
        return
    x = args[0].detach()
    version = x._version

    def multiply(grad: Tensor) -> None:
        if x._version != version:
            products[module] = None
            return
        product = products.setdefault(module, torch.zeros_like(module.weight))
        if product is not None:
            product += _product(module, x.to(module.weight.dtype), grad.to(module.weight.dtype))

    out.register_hook(multiply)


def _is_convolution(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return False
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _product(module: Any, x: Tensor, grad: Tensor) -> Tensor:
    if isinstance(module, nn.Linear):
        return grad.reshape(-1, grad.shape[-1]).T @ x.reshape(-1, x.shape[-1])
    if x.dim() < module.weight.dim():  # one sample
        x, grad = x[None], grad[None]
    settings = module.stride, module.padding, module.dilation, module.groups
    product = next(product for kind, product in _OF_CONVOLUTIONS.items() if isinstance(module, kind))
    return product(x, module.weight.shape, grad, *settings)
