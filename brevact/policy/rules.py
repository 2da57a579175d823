"""Rules of a policy: which modules and ops they match, and the quantizer of each."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from brevact.arguments import check_model
from brevact.autograd import BackwardSettings, has_region
from brevact.autograd.interop import other_code
from brevact.autograd.interop.library_functions import is_exact_alone
from brevact.autograd.region.module_hooks import attachments_of, inherited_region, is_shareable, regions_of
from brevact.autograd.region.rows import OP_NAMES, is_torch_function
from brevact.autograd.region.settings import with_functions, with_overrides
from brevact.injectors import backward_settings_from
from brevact.injectors.injector_type import BackwardInjectorType
from brevact.injectors.proxies import BackwardQuantProxy, described, is_quant_proxy, modules_without_own_region
from brevact.policy.predicates import OF_MODELS, is_rectified, is_rectified_and_costly, is_separable
from brevact.quantizers.brief import brief
from brevact.tables import text_table

#: Marks regions attached by a policy, unlike those of layers with their own backward quantizer.
POLICY = "policy"
#: Rules that apply in a block of code; in a model, to all of it, or to the part that no other rule matches.
OF_BLOCKS = ("*", "")
ACCEPTED_KEYS = (
    "accepted keys are module types (nn.BatchNorm2d, or a tuple of types), torch functions (F.cross_entropy, or a "
    "tuple of functions), a torch.autograd.Function or an operator of torch.ops, "
    'name patterns ("blocks.*", "*") and functions of a name and a module that return True or '
    "False"
)


@dataclass(frozen=True)
class OpPolicy:
    """Backward quantization of an op inside a module, in place of the module's."""

    op: str
    rule: str
    source: str
    settings: BackwardSettings | None


@dataclass(frozen=True)
class Assignment:
    """Backward quantization of a module by the rules."""

    settings: BackwardSettings | None
    rule: str
    source: str
    ops: tuple[OpPolicy, ...] = ()

    def with_ops(self, ops: tuple[OpPolicy, ...]) -> Assignment:
        settings = with_functions(self.settings, tuple((each.op, each.settings) for each in ops))
        return replace(self, settings=settings, ops=ops)

    def with_overrides(self, overrides: Mapping[str, Any]) -> Assignment:
        ops = tuple(replace(each, settings=with_overrides(each.settings, overrides)) for each in self.ops)
        return replace(self, settings=with_overrides(self.settings, overrides), ops=ops)


def has_policy(model: nn.Module) -> bool:
    return any(
        has_region(module, POLICY) or inherited_region(module) is not None
        for module in model.modules()
        if module is model or not is_foreign(module)
    )


def is_foreign(module: nn.Module) -> bool:
    """Return whether a module inside a model may also belong to another model that has a policy for it."""
    return is_shareable(module) and any(each.root is not None for each in attachments_of(module))


def refuse_policy(model: nn.Module) -> None:
    if has_policy(model):
        raise ValueError("model already has a backward policy; call brevact.restore_backward(model) first")


def check_rules(rules: Any, argument: str) -> None:
    if not isinstance(rules, Mapping):
        raise TypeError(
            f"{argument}={brief(rules)} of type {type(rules).__name__}; accepted is a mapping from module types, torch "
            "functions, name patterns or functions to backward quantizers"
        )
    if not rules:
        raise ValueError(f'{argument}: got no rules; accepted is at least one, such as {{"*": StochBackward2bit}}')
    for key in rules:
        is_function = callable(key) and not isinstance(key, type | nn.Module)  # predicate of a name and a module
        if not (isinstance(key, str) or are_module_types(key) or ops_of(key) or is_function):
            fix = ""
            if isinstance(key, BackwardInjectorType):
                fix = f'; the key says where a quantizer applies, the value which one: {{"*": {key.__name__}}}'
            elif isinstance(key, nn.Module):
                fix = "; name the module by its name in model.named_modules()"
            raise TypeError(f"policy rule {brief(key)} of type {type(key).__name__}: {ACCEPTED_KEYS}{fix}")


def assignments(
    model: nn.Module, rules: Mapping[Any, Any], *, optional: Collection[Any] = ()
) -> dict[nn.Module, Assignment]:
    """Return the assignment of each module; the first rule that matches a module, or names an op inside, wins."""
    of_rules, all_ops = _resolved(rules)
    of_ops = [key for key in rules if ops_of(key)]
    names: dict[nn.Module, list[str]] = {}
    for name, module in modules_without_own_region(model):
        names.setdefault(module, []).append(name)
    matching = {}
    for key in of_rules:
        asked = names if key not in OF_MODELS else {model: names[model]} if model in names else {}
        matching[key] = [module for module, own in asked.items() if any([matches(key, name, module) for name in own])]
        if key in OF_MODELS and matching[key]:
            break
    assigned: dict[nn.Module, Assignment] = {}
    for key, modules in matching.items():
        count = len(assigned)
        assigned = {module: of_rules[key] for module in modules} | assigned
        if key not in optional or not (any(matching.values()) or (of_ops and names)):
            if not modules:
                hint = _hint(key, [name for each in names.values() for name in each])
                raise ValueError(f"policy rule {rule_text(key)} matches no module of {type(model).__name__}; {hint}")
            if len(assigned) == count:
                raise ValueError(
                    f"policy rule {rule_text(key)} applies nowhere: rules before it match all its modules, and the "
                    "first match wins; put it before them"
                )
    if all_ops and model in names:
        assigned.setdefault(model, Assignment(None, "", source_text(None)).with_ops(all_ops))
    found = {module: assigned[module] for module in names if module in assigned}
    applied = {each.rule for assignment in found.values() for each in assignment.ops}
    for key in of_ops:
        if not names:
            raise ValueError(
                f"policy rule {rule_text(key)} applies nowhere in {type(model).__name__}; {_hint(key, [])}"
            )
        if key not in optional and rule_text(key) not in applied:
            raise ValueError(
                f"policy rule {rule_text(key)} applies nowhere: rules before it match all modules, or the same op, and "
                "the first match wins; put it before them"
            )
    return found


def _resolved(rules: Mapping[Any, Any]) -> tuple[dict[Any, Assignment], tuple[OpPolicy, ...]]:
    of_rules: dict[Any, Assignment] = {}
    ops: dict[str, OpPolicy] = {}
    for key, source in rules.items():
        assignment = assignment_of(key, source)
        for op in ops_of(key):
            ops.setdefault(op, OpPolicy(op, assignment.rule, assignment.source, assignment.settings))
        if not ops_of(key):
            of_rules[key] = assignment.with_ops(tuple(ops.values()))
    return of_rules, tuple(ops.values())


def block_assignment(rules: Mapping[Any, Any], skipped: Collection[Any] = ()) -> Assignment:
    for key in rules:
        if key not in OF_BLOCKS and not ops_of(key) and key not in skipped:
            raise TypeError(
                f"policy rule {rule_text(key)} is for modules, of which a block of code knows nothing; accepted are "
                '"*" and torch functions; give a model all rules: brevact.quantize_backward(model, policy)'
            )
    of_rules, ops = _resolved(rules)
    found = [of_rules[key] for key in OF_BLOCKS if key in of_rules]
    return found[0] if found else Assignment(None, "", source_text(None)).with_ops(ops)


def matches(key: Any, name: str, module: nn.Module) -> bool:
    if isinstance(key, str):
        return fnmatchcase(name, key) or any(
            fnmatchcase(name[:end], key) for end, letter in enumerate(name) if letter == "."
        )
    if are_module_types(key):
        return isinstance(module, key)
    found = key(name, module)
    if not isinstance(found, bool):
        raise TypeError(
            f"policy rule {rule_text(key)} returned {brief(found)} of type {type(found).__name__} for module "
            f"{name!r}; a function of a name and a module returns True or False"
        )
    return found


def ops_of(key: Any) -> tuple[str, ...]:
    """Return the names of a rule's ops, including a Function or an operator; none for a module rule."""
    functions = key if isinstance(key, tuple) else (key,)
    others = [other_code.name_of(func) for func in functions]
    if not functions or not all(x or is_torch_function(func) for x, func in zip(others, functions, strict=True)):
        return ()
    for func, other in zip(functions, others, strict=True):
        if (other is None and func not in OP_NAMES) or is_exact_alone(other):
            name = getattr(func, "__name__", brief(func))
            near = difflib.get_close_matches(name, dict.fromkeys(OP_NAMES.values()), n=3, cutoff=0.5)
            nearest = f"nearest: {', '.join(near)}; " if near else ""
            raise TypeError(
                f"policy rule {name}: no quantizer changes what this function stores for backward; "
                f"{nearest}accepted are functions whose activations are "
                "packed, such as F.cross_entropy, F.scaled_dot_product_attention and torch.matmul"
            )
    return tuple(dict.fromkeys(x or OP_NAMES[func] for x, func in zip(others, functions, strict=True)))


def rule_text(key: Any) -> str:
    if isinstance(key, tuple):
        return " | ".join(map(rule_text, key))
    if other_code.name_of(key) is not None:
        return other_code.label_of(key)
    if isinstance(key, type):
        return key.__name__
    return repr(key) if isinstance(key, str) else getattr(key, "__name__", brief(key))


def source_text(source: Any, overrides: Mapping[str, Any] | None = None) -> str:
    if source is None:
        return "full precision"
    source = source.quantizer if isinstance(source, BackwardSettings) else source
    text = source.__name__ if isinstance(source, type) else type(source).__name__
    return f"{text}({', '.join(f'{name}={brief(value)}' for name, value in overrides.items())})" if overrides else text


def assignment_of(key: Any, source: Any) -> Assignment:
    """Return a rule's assignment to a matching module, without rules for ops."""
    settings = None if source is None else backward_settings_from(source, f"policy rule {rule_text(key)}")
    return Assignment(settings, rule_text(key), source_text(source))


def are_module_types(key: Any) -> bool:
    kinds = key if isinstance(key, tuple) and key else (key,)
    return all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds)


def _hint(key: Any, names: list[str]) -> str:
    if key in (is_separable, is_rectified, is_rectified_and_costly):
        return "rules before those of a policy that is shipped: brevact.DEFAULT.let({...: StochBackward8bit})"
    if not names:
        return "it has a backward quantizer of its own (act_quant=), which stays"
    near = difflib.get_close_matches(key, names, n=3, cutoff=0.4) if isinstance(key, str) else []
    return f"nearest names: {', '.join(near)}" if near else "see [name for name, _ in model.named_modules()]"


_OWN = "its own"


@dataclass(frozen=True)
class ModulePolicy:
    """Backward quantization of one module."""

    module: str
    kind: str
    rule: str
    source: str
    settings: BackwardSettings | None
    ops: tuple[OpPolicy, ...] = ()


@dataclass(frozen=True)
class BackwardPolicy:
    """Which backward quantizer applies where in a model.

    ``print(policy)`` shows a tree: a line for each module whose quantizers differ from its parent's, and below it a
    line for each op with a rule of its own.

    >>> import torch.nn as nn, brevact
    >>> model = brevact.quantize_backward(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), brevact.StochBackward2bit)
    >>> print(brevact.backward_policy(model))
    module   kind        modules  rule  backward quantizer
    ------------------------------------------------------------------------------------
    (model)  Sequential  3        '*'   StochBackward2bit: UniformQuantizer, bit_width=2

    Args:
        rows: one per module, in the order of ``model.named_modules()``.
    """

    rows: tuple[ModulePolicy, ...]

    def __str__(self) -> str:
        shown: dict[str, ModulePolicy] = {}
        counts: dict[str, int] = {}
        above: dict[str, str] = {}
        for row in self.rows:
            parent = above.get(row.module.rpartition(".")[0]) if row.module else None
            differs = parent is None or (shown[parent].settings, shown[parent].ops) != (row.settings, row.ops)
            above[row.module] = row.module if differs or parent is None else parent
            if differs:
                shown[row.module] = row
            counts[above[row.module]] = counts.get(above[row.module], 0) + 1
        header = ("module", "kind", "modules", "rule", "backward quantizer")
        cells = []
        for row in shown.values():
            name = "  " * (row.module.count(".") + 1) + row.module if row.module else "(model)"
            cells.append((name, row.kind, str(counts[row.module]), row.rule or "-", quantizer_text(row)))
            indent = " " * (len(name) - len(name.lstrip()) + 2)
            cells += [(indent + op.op, "op", "-", op.rule, quantizer_text(op)) for op in row.ops]
        return text_table(header, cells)


def backward_policy(model: nn.Module) -> BackwardPolicy:
    """Return which backward quantizer applies to each module of a model.

    >>> import torch.nn as nn, brevact
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    >>> model = brevact.quantize_backward(model, {nn.LayerNorm: None, "*": brevact.StochBackward2bit})
    >>> [(row.module, row.rule, row.source) for row in brevact.backward_policy(model).rows]
    [('', "'*'", 'StochBackward2bit'), ('0', "'*'", 'StochBackward2bit'), ('1', 'LayerNorm', 'full precision')]

    Args:
        model: module, with a policy, with layers that have their own quantizer, or with neither.

    Returns:
        The rules and where each applies; ``print`` shows them as a table.

    Raises:
        TypeError: ``model`` is no module.
    """
    check_model(model)
    rows: list[ModulePolicy] = []
    _describe(model, "", ModulePolicy("", "", "", source_text(None), None), rows)
    return BackwardPolicy(tuple(rows))


def _describe(module: nn.Module, name: str, parent: ModulePolicy, rows: list[ModulePolicy]) -> None:
    rule, source, settings, ops = "", parent.source, parent.settings, parent.ops
    hooks = regions_of(module)
    around = None if name else inherited_region(module)
    if around is not None:  # a separate part of a model
        hooks.insert(0, around)
    for hook in hooks:  # the last one is entered last, and decides
        settings = hook.settings
        if hook.origin == POLICY:
            rule, source, of_ops = hook.label
        else:
            rule, source = _OWN, source_text(None) if settings is None else type(settings.quantizer).__name__
            of_ops = ()
        of_functions = () if settings is None else settings.of_functions
        ops = tuple(
            OpPolicy(name, rule, source, each)
            for (name, rule, source), (_, each) in zip(of_ops, of_functions, strict=False)
        )
        if settings is not None and settings.quantizer is None:
            settings = None
    row = ModulePolicy(name, type(module).__name__, rule, source, settings, ops)
    rows.append(row)
    for child_name, child in module.named_children():
        if not (is_quant_proxy(child) or isinstance(child, BackwardQuantProxy)):
            _describe(child, f"{name}.{child_name}" if name else child_name, row, rows)


def quantizer_text(row: ModulePolicy | OpPolicy | Assignment) -> str:
    if row.settings is None:
        return row.source
    text = described(row.settings, brief=True)
    return text if text.startswith(row.source) else f"{row.source}: {text}"


#: Differences that an error lists.
_SHOWN = 5


def layers_of(model: nn.Module) -> dict[str, str]:
    """Return the types of a model's modules by name, without layers that have their own backward quantizer."""
    return {name: type(module).__name__ for name, module in modules_without_own_region(model)}


def check_layers(model: nn.Module, layers: Mapping[str, str]) -> None:
    """Raise a ValueError unless a model's modules have the names and types, or subclasses, of a fitted policy's."""
    modules = dict(modules_without_own_region(model))
    differences = [
        f"{name or '(model)'} is a {type(module).__name__}, and was a {layers[name]}"
        for name, module in modules.items()
        if name in layers and layers[name] not in [kind.__name__ for kind in type(module).__mro__]
    ]
    differences += [f"{name} is missing" for name in layers if name not in modules]
    differences += [f"{name} is new" for name in modules if name not in layers]
    if differences:
        more = f" and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise ValueError(
            f"policy: it was fitted for another model than this {type(model).__name__}: "
            f"{', '.join(differences[:_SHOWN])}{more}; give it to the model that it was fitted for (the one inside of "
            "a wrapper: model.module), or fit again"
        )
