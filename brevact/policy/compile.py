"""Compile code whose graphs hand packed tensors to backward: `brevact.compile`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from brevact.policy.attach import attachment_of, backward_quant, quantize_backward
from brevact.policy.presets import DEFAULT
from brevact.policy.text import budget_of
from brevact.quantizers.brief import brief


def compile(
    function: Callable[..., Any],
    policy: Any = DEFAULT,
    *,
    budget: float | str | None = None,
    backend: Any = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **others: Any,
) -> Any:
    """Compile a model or a function by `torch.compile`, so that its graphs hand packed tensors to backward.

    PyTorch's partitioner chooses which tensors a graph saves and which backward computes again; those that backward
    reads only linearly or smoothly are then packed by the policy. The forward pass is that of `torch.compile`.

    >>> import torch, brevact
    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 10))
    >>> step = brevact.compile(model, budget=0.5, backend="aot_eager")
    >>> step(torch.randn(64, 256)).sum().backward()

    Args:
        function: a module, which gets the policy as by :func:`brevact.quantize_backward` unless it has one, or a
            function, whose body then runs in ``backward_quant(policy)``.
        policy: backward quantizer, :class:`brevact.Policy`, or words for :func:`brevact.parse_policy`.
        budget: which part of the packed bytes that a graph saves without computing layers again it may save, from 0 to
            1; backward computes layers again for the rest, where it can. A ratio such as ``"20x"`` or bytes such as
            ``"512MiB"``: each graph saves at most that; it computes as few layers again as codes of 8 bits allow, and
            bits fall by least estimated noise. A ratio divides the bytes that the graph would save unpacked. None takes
            ``torch._functorch.config.activation_memory_budget`` for the part.
        backend: compiler, as for `torch.compile`; one that compiles by AOTAutograd.
        mode: mode of Inductor, as for `torch.compile`.
        options: options of Inductor, as for `torch.compile`.
        **others: further arguments of `torch.compile`, such as ``fullgraph`` and ``dynamic``.

    Returns:
        The compiled module or function.

    Raises:
        TypeError: ``function`` is not callable, or ``policy`` is none.
        ValueError: ``budget`` is out of range, or ``backend`` has no partitioner.
    """
    if not callable(function):
        raise TypeError(f"function: got {brief(function)}; accepted is a module or a function: brevact.compile(model)")
    if backend == "eager":
        raise ValueError(
            'backend="eager" has no partitioner, which packs; accepted are "inductor", "aot_eager" and others that '
            "compile by AOTAutograd. Without a compiler, call brevact.quantize_backward(model)"
        )
    wanted = _budget(budget)
    if isinstance(function, nn.Module):
        packed: Callable[..., Any] = function
    else:

        @functools.wraps(function)
        def packed(*args: Any, **kwargs: Any) -> Any:
            with backward_quant(policy):
                return function(*args, **kwargs)

    if wanted is not None:
        from brevact.compiler.graphs import Partitioner, with_budget  # it imports Inductor
        from brevact.private_names.of_compiler import mode_options

        if backend == "inductor":
            settings = mode_options(mode) if mode else {}
            mode, options = None, {**settings, **(options or {}), "custom_partitioner_fn": Partitioner(wanted)}
        else:
            backend = with_budget(backend, wanted)
    compiled = torch.compile(packed, backend=backend, mode=mode, options=options, **others)
    if isinstance(function, nn.Module) and (policy is not DEFAULT or attachment_of(function) is None):
        quantize_backward(function, policy)
    return compiled


def _budget(budget: Any) -> tuple[str, float] | None:
    """The kind of a budget ("part", "ratio" or "bytes") and its size."""
    if budget is None:
        return None
    if isinstance(budget, int | float) and not isinstance(budget, bool) and 0 <= budget <= 1:
        return "part", float(budget)
    with suppress(ValueError):
        found = budget_of(budget) if isinstance(budget, str) else None
        for name, kind in (("ratio", "ratio"), ("saved_bytes", "bytes")):
            if found and found.keys() == {name}:
                return kind, float(found[name])
    raise ValueError(
        f'budget={brief(budget)}; accepted are a number from 0 to 1, a ratio such as "20x", bytes such as "512MiB", '
        "or None"
    )
