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

_LEAF = r"[A-Z]\w*Backward(\d\w*)?"  # Stoch-Backward-2bit, L4-Backward
_FRAGMENTS = ("Base", "Mixin", "Solver")


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


def forward_weight_quantizer(name: str | None) -> type | None:
    """The weight quantizer of `brevitas.quant` with this name; None for None.

    Raises:
        RecipeError: there is none of this name.
    """
    if name is None:
        return None
    known = _forward_quantizers(WeightQuantProxyFromInjectorBase)
    return _look_up(name, known, "--weight-quant", "a weight quantizer of brevitas.quant")


def forward_input_quantizer(name: str | None) -> type | None:
    """The activation quantizer of `brevitas.quant` with this name; None for None.

    Raises:
        RecipeError: there is none of this name.
    """
    if name is None:
        return None
    known = _forward_quantizers(ActQuantProxyFromInjectorBase)
    return _look_up(name, known, "--input-quant", "an activation quantizer of brevitas.quant")


def _forward_quantizers(proxy: type) -> dict[str, type]:
    """Leaf classes of `brevitas.quant` whose proxy is of the given kind; its fragments are left out."""
    found = {}
    for name, value in vars(brevitas.quant).items():
        if isinstance(value, type(ExtendedInjector)) and "proxy_class" in value and not name.endswith(_FRAGMENTS):
            kind = value.proxy_class
            if isinstance(kind, type) and issubclass(kind, proxy):
                found[name] = value
    return found


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
