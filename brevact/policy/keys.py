"""Keys of a policy's rules as plain JSON values, and back: names of closed lists, and name patterns."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from brevact.autograd import other_code
from brevact.autograd.rows import OP_NAMES
from brevact.policy.layer_types import LAYER_TYPES
from brevact.policy.predicates import OF_MODELS, computes_attention, is_activation_function, is_norm, is_rectified
from brevact.policy.rules import are_module_types, ops_of
from brevact.private_names.of_brevitas import IS_INSTALLED, MISSING
from brevact.quantizers.brief import brief

#: Functions of a name and a module, by their public path.
PREDICATES: dict[str, Callable[[str, nn.Module], bool]] = {
    f"brevact.policy.predicates.{each.__name__}": each
    for each in (computes_attention, is_activation_function, is_norm, is_rectified, *OF_MODELS)
}
#: Fields for a rule's subject.
FIELDS = ("name", "types", "functions", "predicate")


def key_to_plain(key: Any) -> dict[str, Any]:
    """Return a rule's key as a field and its value.

    Another library's layer type, or a user's function, raises a TypeError. A Function is written as its import path, an
    operator as its name.

    >>> import torch.nn.functional as F
    >>> key_to_plain(nn.Conv2d), key_to_plain(F.cross_entropy), key_to_plain("blocks.*")
    ({'types': ['torch.nn.Conv2d']}, {'functions': ['cross_entropy']}, {'name': 'blocks.*'})
    """
    if isinstance(key, str):
        return {"name": key}
    if ops_of(key):
        for each in key if isinstance(key, tuple) else (key,):
            _check_found(each)
        return {"functions": list(ops_of(key))}
    if are_module_types(key):
        names = {kind: name for name, kind in LAYER_TYPES.items()}
        kinds = key if isinstance(key, tuple) else (key,)
        return {"types": [names[kind] if kind in names else _refuse_type(kind) for kind in kinds]}
    for name, predicate in PREDICATES.items():
        if key is predicate:
            return {"predicate": name}
    raise TypeError(
        f"policy rule {getattr(key, '__qualname__', brief(key))} is a function of yours, which a file cannot hold; "
        f"accepted functions are {', '.join(PREDICATES)}; write name patterns in its place: "
        "{name: quantizer for name, module in model.named_modules() if rule(name, module)}"
    )


def key_from_plain(entry: Mapping[str, Any]) -> Any:
    """Return the key that :func:`key_to_plain` wrote, from an entry with exactly one of the key fields.

    A value of another type raises a TypeError, an unknown name a ValueError. The module of a Function must be imported
    already: a file imports none.
    """
    given = [field for field in FIELDS if field in entry]
    if len(given) != 1:
        raise ValueError(f"got {', '.join(given) or 'none'} of {', '.join(FIELDS)}; accepted is exactly one")
    (field,) = given
    value = entry[field]
    if field in ("name", "predicate") and isinstance(value, str):
        return value if field == "name" else _find(value, PREDICATES, "predicate")
    if field in ("types", "functions") and isinstance(value, list) and value:
        is_type = field == "types"
        found = tuple(_find(each, LAYER_TYPES, "type") if is_type else _find_function(each) for each in value)
        return found if len(found) > 1 else found[0]
    accepted = "a string" if field in ("name", "predicate") else "a list of names"
    raise TypeError(f"{field}: got {brief(value)} of type {type(value).__name__}; accepted is {accepted}")


def _functions() -> dict[str, Callable]:
    """Return a torch function for each op, preferably one with the op's own name."""
    found: dict[str, Callable] = {}
    for func, op in OP_NAMES.items():
        if op not in found or func.__name__ == op != found[op].__name__:
            found[op] = func
    return found


_FUNCTIONS = _functions()


def _find_function(name: Any) -> Any:
    if isinstance(name, str) and name not in _FUNCTIONS and ("." in name or "::" in name):
        found = other_code.find(name)
        if other_code.name_of(found) == name:
            return found
        raise ValueError(
            f"function {brief(name)} is not imported here, and a file imports nothing; import its module before the "
            "policy is loaded, or leave the rule out"
        )
    return _find(name, _FUNCTIONS, "function")


def _check_found(func: Any) -> None:
    name = other_code.name_of(func)
    if name is not None and other_code.name_of(other_code.find(name)) != name:
        raise TypeError(
            f"policy rule {name} cannot be saved: nothing has that path, by which a file names a Function; "
            "define it at the top level of a module"
        )


def _find(name: Any, known: Mapping[str, Any], what: str) -> Any:
    if isinstance(name, str) and name in known:
        return known[name]
    if not IS_INSTALLED and str(name).startswith(("brevitas.", "brevact.nn.")):
        raise ImportError(f"{what} {name} {MISSING}")
    by_last: dict[str, str] = {each.rpartition(".")[2]: each for each in known}
    near = difflib.get_close_matches(str(name).rpartition(".")[2], by_last, n=3, cutoff=0.4) or sorted(by_last)[:3]
    raise ValueError(f"{what} {brief(name)} is not known here; nearest: {', '.join(by_last[each] for each in near)}")


def _refuse_type(kind: type) -> str:
    raise TypeError(
        f"policy rule {kind.__module__}.{kind.__qualname__} cannot be saved: a file names types of torch.nn, "
        "brevitas.nn and brevact.nn alone, so that it runs no code; write name patterns in its place: "
        f"{{name: quantizer for name, module in model.named_modules() if isinstance(module, {kind.__name__})}}"
    )
