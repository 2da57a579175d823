"""Inputs of Dynamo's graphs that are constant numbers: the buffers of Brevitas' quantizers, such as bit widths.

Modules of one class share a graph, whatever their bit widths are: a guard on the values lets Dynamo compile another.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from brevact.private_names.of_torch import TracingContext, WeakTensorKeyDictionary
from brevact.user_lines import warn

#: Brevitas' module for them; `repr` of other modules' buffers may change in each step.
_OWNER = "StatelessBuffer"
#: Dynamo of PyTorch 2.11 does not check such guards.
HAS_GUARDS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
_seen = WeakTensorKeyDictionary()  # versions and values of tensors on devices that reading waits for


def constants_of(graph: fx.Graph, inputs: Sequence[Any]) -> Iterator[float | None]:
    """Values of the inputs that are constants, None for others; guards on them are added to the code that is traced."""
    for node, x in zip((node for node in graph.nodes if node.op == "placeholder"), inputs, strict=True):
        if not (isinstance(x, Tensor) and x.dim() == 0 and not x.requires_grad and _is_constant(node)):
            yield None
            continue
        if not HAS_GUARDS:
            _warn_once()
            yield None
            continue
        value = _value_of(x)
        argument = node.meta.get("grapharg")
        if argument is None or (context := TracingContext.try_get()) is None:
            yield None
            continue
        context.guards_context.dynamo_guards.add(argument.source.make_guard(_guard_on(value)))
        yield value


@functools.cache
def _warn_once() -> None:
    warn(
        f"PyTorch {torch.__version__} has no guards on the bit widths of Brevitas' quantizers: compiled graphs pack "
        "their results by the policy, not as the integers that they are. PyTorch 2.13 and newer ones keep the integers"
    )


def _is_constant(node: fx.Node) -> bool:
    owners = [list((user.meta.get("nn_module_stack") or {"": ("", None)}).values())[-1][1] for user in node.users]
    return bool(owners) and all(getattr(owner, "__name__", "") == _OWNER for owner in owners)


def _value_of(x: Tensor) -> float:
    if x.device.type == "cpu":
        return float(x)
    found = _seen.get(x)
    if found is None or found[0] != x._version:
        found = _seen[x] = x._version, float(x)
    return found[1]


def _guard_on(value: float) -> Any:
    def guard(builder: Any, guard: Any) -> None:
        def has_value(x: Tensor) -> bool:
            return _value_of(x) == value

        builder.get_guard_manager(guard).add_lambda_guard(has_value, [f"{guard.name} == {value}"], guard.user_stack)

    return guard
