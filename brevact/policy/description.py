"""Which quantizer applies where in a model: `backward_policy`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from brevact.arguments import check_model
from brevact.autograd import BackwardSettings
from brevact.autograd.hooks import inherited_region, regions_of
from brevact.injectors.proxies import BackwardQuantProxy, described, is_quant_proxy
from brevact.policy.rules import POLICY, Assignment, OpPolicy, source_text
from brevact.tables import text_table

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
