"""Quantizers by the names that the command line uses."""

import difflib
from collections.abc import Sequence
from typing import Any

import brevitas.quant
import torch
from brevitas.inject import ExtendedInjector
from brevitas.proxy.parameter_quant import WeightQuantProxyFromInjectorBase
from brevitas.proxy.runtime_quant import ActQuantProxyFromInjectorBase
from torch import nn

from brevact import Policy, SaveMode
from brevact.policy import text
from recipes.errors import RecipeError
from recipes.models import Layers
from recipes.settings import Settings

_FRAGMENTS = ("Base", "Mixin", "Solver")


def find_quantizers(settings: Settings) -> tuple[type | None, type | None, type | Policy | None]:
    """The quantizers that the settings name: for weights, for the layers' inputs, and for the backward pass."""
    weight_name, input_name, act_name = settings.weight_quant, settings.input_quant, settings.act_quant
    if act_name is None and settings.act_override:
        raise RecipeError("--act-override needs a backward quantizer to change: add --act-quant NAME")
    if settings.is_reference and settings.adapt_every is not None:
        raise RecipeError("--adapt-every needs a quantizer whose bits it moves: add --act-quant NAME or --budget 24x")
    act_quant = act_name and backward_quantizer(act_name, settings.act_override, settings.save_mode)
    weight_quant = weight_name and forward_quantizer(weight_name, WeightQuantProxyFromInjectorBase, "--weight-quant")
    input_quant = input_name and forward_quantizer(input_name, ActQuantProxyFromInjectorBase, "--input-quant")
    if input_quant is not None:
        _try_out(Layers(None, input_quant), f"--input-quant {input_name}")
    if weight_quant is not None:
        _try_out(Layers(weight_quant, input_quant), f"--weight-quant {weight_name}")
    return weight_quant, input_quant, act_quant


def _try_out(layers: Layers, words: str) -> None:
    """Runs one layer of each kind: many quantizers of Brevitas are for one kind only, or need settings of their own."""
    try:
        with torch.random.fork_rng(devices=[]):
            model = nn.Sequential(
                layers.conv(4, 8, 3), layers.conv(8, 8, 3, groups=8), nn.Flatten(), layers.linear(8 * 16, 2)
            )
            model(torch.randn(2, 4, 4, 4)).sum().backward()
            model.eval()(torch.randn(2, 4, 4, 4))
    except Exception as error:  # whatever Brevitas raises, the quantizer does not serve here
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise RecipeError(
            f"{words} does not work in the layers of this model as it is ({reason}); "
            "Int8WeightPerTensorFloat and Int8ActPerTensorFloat do"
        ) from error


def backward_quantizer(name: str, overrides: Sequence[str], save_mode: str) -> type | Policy:
    """The injector of a backward quantizer of `brevact`, or a policy of it, with settings changed.

    Args:
        name: a leaf class of brevact, such as "StochBackward2bit", or a policy, such as "DEFAULT".
        overrides: "setting=value" each, such as "bucket_size=256"; values are Python literals or plain words.
        save_mode: a value of `SaveMode`.

    Returns:
        The injector, checked: brevact has resolved it once; or the policy, with the settings in each of its quantizers.

    Raises:
        RecipeError: unknown name or setting, or a value that is out of range.
    """
    try:
        found = text.named(name)
    except ValueError as error:
        raise RecipeError(f"--act-quant {error}") from error
    try:
        settings = text.settings_of(overrides)
    except ValueError as error:
        raise RecipeError(f"--act-override {error}") from error
    try:
        return text.with_settings(found, {"save_mode": SaveMode(save_mode), **settings})
    except (TypeError, ValueError) as error:
        raise RecipeError(f"backward quantizer {' '.join([name, *overrides])}: {error}") from error


def forward_quantizer(name: str, proxy: type, option: str) -> type:
    """The quantizer of `brevitas.quant` with this name."""
    known = {}
    for key, value in vars(brevitas.quant).items():
        if isinstance(value, type(ExtendedInjector)) and "proxy_class" in value and not key.endswith(_FRAGMENTS):
            kind = value.proxy_class
            if isinstance(kind, type) and issubclass(kind, proxy):
                known[key] = value
    return _look_up(name, known, option, "a quantizer of brevitas.quant for this place")


def _look_up(name: str, known: dict[str, Any], option: str, what: str) -> Any:
    if name in known:
        return known[name]
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)[:3]
    raise RecipeError(f"{option} {name} is not {what}; nearest: {', '.join(nearest)} ({len(known)} are known)")
