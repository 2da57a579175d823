"""Quantizers by the names that the command line uses."""

import ast
import difflib
import re
from collections.abc import Sequence

import brevitas.quant
from brevitas.inject import ExtendedInjector
from brevitas.proxy.parameter_quant import WeightQuantProxyFromInjectorBase
from brevitas.proxy.runtime_quant import ActQuantProxyFromInjectorBase

from brevact import SaveMode, injectors
from recipes.errors import RecipeError
from recipes.settings import Settings

_LEAF = r"[A-Z]\w*Backward(\d\w*)?"  # Stoch-Backward-2bit, L4-Backward
_FRAGMENTS = ("Base", "Mixin", "Solver")


def find_quantizers(settings: Settings) -> tuple[type | None, type | None, type | None]:
    """The quantizers that the settings name: for weights, for the layers' inputs, and for the backward pass.

    Raises:
        RecipeError: one is not known, or a setting of the backward quantizer is not possible.
    """
    weight_quant, input_quant, act_quant = settings.weight_quant, settings.input_quant, settings.act_quant
    if act_quant is None and settings.act_override:
        raise RecipeError("--act-override needs a backward quantizer to change: add --act-quant NAME")
    return (
        weight_quant and forward_quantizer(weight_quant, WeightQuantProxyFromInjectorBase, "--weight-quant"),
        input_quant and forward_quantizer(input_quant, ActQuantProxyFromInjectorBase, "--input-quant"),
        act_quant and backward_quantizer(act_quant, settings.act_override, settings.save_mode),
    )


def backward_quantizer(name: str, overrides: Sequence[str], save_mode: str) -> type:
    """The injector of a backward quantizer of `brevact`, with its settings changed.

    Args:
        name: a leaf class of brevact, such as "StochBackward2bit".
        overrides: "setting=value" each, such as "bucket_size=256"; values are Python literals or plain words.
        save_mode: a value of `SaveMode`.

    Returns:
        The injector, checked: brevact has resolved it once.

    Raises:
        RecipeError: unknown name or setting, or a value that is out of range.
    """
    known = {key: value for key, value in vars(injectors).items() if re.fullmatch(_LEAF, key)}
    leaf = _look_up(name, known, "--act-quant", "a backward quantizer of brevact")
    values: dict[str, object] = {"save_mode": SaveMode(save_mode)}
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not key.isidentifier():
            raise RecipeError(f"--act-override {override!r} is not of the form setting=value, such as bucket_size=256")
        values[key] = _literal(value)
    try:
        injector = leaf.let(**values)
        injectors.backward_settings_from(injector)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"backward quantizer {' '.join([name, *overrides])}: {error}") from error
    return injector


def forward_quantizer(name: str, proxy: type, option: str) -> type:
    """The quantizer of `brevitas.quant` with this name.

    Args:
        name: such as "Int8WeightPerTensorFloat".
        proxy: base class of the proxies that the option accepts.
        option: the command line's name for it, for the error.

    Returns:
        The injector.

    Raises:
        RecipeError: there is none of this name.
    """
    known = {}
    for key, value in vars(brevitas.quant).items():
        if isinstance(value, type(ExtendedInjector)) and "proxy_class" in value and not key.endswith(_FRAGMENTS):
            kind = value.proxy_class
            if isinstance(kind, type) and issubclass(kind, proxy):
                known[key] = value
    return _look_up(name, known, option, "a quantizer of brevitas.quant for this place")


def _look_up(name: str, known: dict[str, type], option: str, what: str) -> type:
    if name in known:
        return known[name]
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)[:3]
    raise RecipeError(f"{option} {name} is not {what}; nearest: {', '.join(nearest)} ({len(known)} are known)")


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
