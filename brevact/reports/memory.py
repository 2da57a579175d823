"""Measure the tensors that a model saves for backward: `memory_report`."""

from __future__ import annotations

import functools
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from brevact.arguments import check_model
from brevact.autograd import region, regions_disabled
from brevact.autograd.interop.other_code import as_function, is_of_torch, watch_all
from brevact.autograd.region.module_hooks import regions_of
from brevact.autograd.region.running import is_distributed, measuring_hooks, nodes_behind
from brevact.autograd.saving.storage_report import (
    DERIVED,
    EXACT,
    FULL_PRECISION,
    MASKED,
    NO_QUANTIZER,
    ON_BACKWARD,
    ON_CONTEXT,
    PACKED,
    recording,
)
from brevact.autograd.saving.storages import bytes_of, parts_of, referent, storage_address
from brevact.autograd.saving.weights import is_parameter_or_view
from brevact.injectors.proxies import names_of
from brevact.policy.attach import attach_policy
from brevact.reports.batches import arguments_of, tensors_of, without_surroundings
from brevact.reports.gradient_noise import Loss, check_loss
from brevact.reports.in_place import holds_graphs, in_place, uncompiled
from brevact.reports.memory_table import LayerMemory, MemoryReport, OpMemory
from brevact.reports.step import StepLoss

__all__ = ["LayerMemory", "MemoryReport", "OpMemory", "memory_report"]
Run = Callable[[nn.Module], Any]
Names = Mapping[nn.Module, str]
#: Notes of a report.
BY_DEFAULT = "The model has no backward quantizer: brevact.quantize_backward(model) would store this."
NOTHING = (
    "Nothing is stored for backward: no parameter and no input requires a gradient, the output requires none "
    "(torch.no_grad or detach in the model), or no op keeps anything but weights."
)
OF_GRAPHS = "Plain bytes are those of the uncompiled model."
NO_LOSS = "The loss is not in this: memory_report(model, batch, loss) measures a step with it."


def memory_report(
    model: nn.Module, batch: Tensor | Sequence[Any] | Mapping[str, Any], loss: Loss | None = None
) -> MemoryReport:
    """Measure the bytes that a training forward pass saves for backward, per layer, plain and packed.

    Runs the model on the batch twice, with and without its backward quantizers, and sums the storages that autograd
    keeps, each once, except parameters and buffers. A model without a backward quantizer is measured as if after
    ``quantize_backward(model)``. The model, its gradients and random generators are restored bit for bit; a warning
    names parameters above 64 KiB that the forward pass modifies. The plain pass keeps no tensors alive, like inference.
    If a model does not fit in memory, measure it on the meta device, with a batch there, where nothing is compiled.

    Tensors that a Function of another library holds as attributes of its context count in full, in rows that say so. An
    input that is saved unpacked counts its own bytes, even if it is a slice of a larger tensor. Tensors that a
    checkpointed function recomputes do not count. Compiled models, blocks and losses run compiled: each tensor that
    their graphs save has a row, with the way backward uses it. Plain bytes are those of the uncompiled model.

    >>> import copy, torch, brevact
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    >>> model = brevact.quantize_backward(model, brevact.NearestBackward4bit)
    >>> report = brevact.memory_report(model, torch.randn(64, 64))
    >>> report.plain_bytes, report.saved_bytes  # of the input and of the ReLU's output
    (32768, 2608)
    >>> brevact.memory_report(copy.deepcopy(model).to("meta"), torch.empty(64, 64, device="meta")).saved_bytes
    2608
    >>> print(brevact.memory_report(torch.nn.Linear(64, 64), torch.randn(64, 64)).note)
    The model has no backward quantizer: brevact.quantize_backward(model) would store this.

    With a loss, it measures a step inside ``with brevact.backward_quant(model):``, where the loss packs, too:

    >>> loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    >>> step = brevact.memory_report(model, (torch.randn(64, 64), torch.randint(64, (64,))), loss)
    >>> step.plain_bytes > report.plain_bytes
    True

    :func:`brevact.step_report` measures the peak of a step.

    Args:
        model: module, with or without backward quantization; measured in training mode.
        batch: arguments of the model, without targets: a tensor, a tuple or list of positional arguments, or a mapping
            of keyword arguments. With ``loss``, the batch that ``loss`` takes.
        loss: takes the model and the batch, and returns the tensor to differentiate; called in the region of a model
            with a policy. None for a forward pass alone.

    Returns:
        The report: one row per layer, and how each op saves its tensors.

    Raises:
        TypeError: ``model`` is not a module; ``batch`` is a data loader, or the model does not accept it; ``loss`` is
            not a function.
        ValueError: ``model`` has lazy parameters, or wraps several devices.
    """
    check_model(model, "memory_report(model, batch)", batch)
    origin = getattr(model, "_orig_mod", model)
    if loss is not None:
        check_loss(loss)
        batch = without_surroundings(batch)
        return memory_of(model, functools.partial(StepLoss(loss), batch=batch), origin)
    args, kwargs = without_surroundings(arguments_of(model, batch))
    found = memory_of(model, lambda measured: measured(*args, **kwargs), origin)
    return replace(found, scope=NO_LOSS) if found.rows else found


def memory_of(model: nn.Module, run: Run, origin: nn.Module | None = None) -> MemoryReport:
    return MemoryOfPass(model, run, origin).measured()


class MemoryOfPass:
    """Measures a forward pass of a model whose policy changes between measurements; the plain pass is measured once."""

    def __init__(self, model: nn.Module, run: Run, origin: nn.Module | None = None) -> None:
        self._model, self._run, self._names = model, run, names_of(origin or model)
        self._plain: list[OpMemory] | None = None

    def measured(self) -> MemoryReport:
        """Measure the pass under the model's current policy, or under the default one if it has none."""
        model, run, names, note = self._model, self._run, self._names, ""
        has_regions = any(regions_of(module) for module in model.modules())
        saved = _measure(model, run, names) if has_regions else _measured_plain(model, run, names)
        if has_regions or any(op.why not in (NO_QUANTIZER, ON_CONTEXT) for op in saved):
            if self._plain is None:
                with regions_disabled():
                    self._plain = _measured_plain(model, run, names)
            plain, saved = self._plain, saved if has_regions else _measure(model, run, names)
        else:
            plain = saved
            try:
                saved, note = _measure(model, run, names, attach_policy), BY_DEFAULT
            except (TypeError, RuntimeError) as error:  # NotImplementedError, too
                note = f"The model has no backward quantizer, and brevact.quantize_backward(model) fails: {error}"
        plain_bytes, saved_bytes = _by_layer(plain), _by_layer(saved)
        rows = tuple(
            LayerMemory(name, type(module).__name__, plain_bytes[name], saved_bytes[name], _note_of(name, plain, saved))
            for module, name in names.items()
            if plain_bytes[name] or saved_bytes[name]
        )
        notes = [note, *([OF_GRAPHS] if any(isinstance(op, _OfGraph) for op in saved) else [])]
        text = " ".join(filter(None, notes)) if rows else NOTHING
        return MemoryReport(rows, tuple(saved), text, would_save=bool(rows) and note == BY_DEFAULT)


def stored_ops(model: nn.Module, run: Run) -> tuple[OpMemory, ...]:
    """Measure how each op saves its tensors, as :func:`memory_of` does, without the plain pass."""
    return tuple(_measure(model, run, names_of(model)))


def _note_of(layer: str, plain: list[OpMemory], saved: list[OpMemory]) -> str:
    """Return why a layer saves nothing of its own, with its policy or, if that saves something, without; or ""."""
    own, of_plain = ([row for row in rows if row.layer == layer] for rows in (saved, plain))
    if any(row.saved_bytes for row in of_plain):
        is_derived = not any(row.saved_bytes for row in own)
        return next((row.why for row in own if is_derived and row.how == DERIVED), "")
    source = next((row.source for row in of_plain if row.source is not None), None)
    if source is None:
        return "plain stores nothing here"
    return f"plain stores the tensor of {source or '(model)'}, which counts there"


def _by_layer(ops: list[OpMemory]) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in ops:
        found[row.layer] += row.saved_bytes
    return found


def _measure(
    model: nn.Module, run: Run, names: Names, change: Run = lambda model: None, *, holds: bool = True
) -> list[OpMemory]:
    """Apply `change`, measure a pass and restore the model; unless `holds`, saved tensors are freed as in inference."""
    with in_place(model), uncompiled(any(x.is_meta for x in model.parameters())):  # which Inductor cannot differentiate
        change(model)
        if not model.training:
            model.train()
        return _measure_as_it_is(model, run, names, holds)


class _OfGraph(OpMemory):
    """A tensor that a compiled graph saves, or the output of a layer that its backward computes again."""


class _UnheldError(Exception):
    """A backward pass inside the forward pass needs a tensor that was not kept."""


def _measured_plain(model: nn.Module, run: Run, names: Names) -> list[OpMemory]:
    """Measure an uncompiled pass, without keeping its saved tensors where possible."""
    with uncompiled():
        try:
            return _measure(model, run, names, holds=False)
        except _UnheldError:
            return _measure(model, run, names)


def _measure_as_it_is(model: nn.Module, run: Run, names: Names, holds: bool) -> list[OpMemory]:
    weights = {_storage_key(part): part for x in (*model.parameters(), *model.buffers()) for part in parts_of(x)}
    held: dict[int, tuple[Tensor | weakref.ref[torch.UntypedStorage], str]] = {}
    rows = list[tuple[int, OpMemory]]()
    source = ""  # layer that saved the tensor from which the last one derives
    is_missed = False

    def pack_unheld(x: Tensor) -> Tensor | None:
        place = _storage_key(x)
        before, _ = held.get(place, (None, ""))
        if isinstance(before, weakref.ref) and referent(before) is None:  # a new tensor reuses the address
            del held[place]
        pack(x)
        if place not in held or place < 0:
            return x
        held[place] = weakref.ref(x.untyped_storage()), held[place][1]
        return None

    def unpack_unheld(x: Tensor | None) -> Tensor:
        nonlocal is_missed
        if x is None:
            is_missed = True
            raise _UnheldError
        return x

    def pack(x: Tensor) -> Tensor:
        is_gathered = is_distributed() and is_parameter_or_view(x)  # for this pass, from all processes
        x = x if x.grad_fn is None else x.detach()
        if x.layout is not torch.strided and parts_of(x)[0] is not x:
            for part in parts_of(x):
                pack(part)
            return x
        place, layer = _storage_key(x), _running(names)
        old, (graph, inputs) = recorder.replaced.pop(place, None), recorder.graph or ([], {place})
        rows.extend((0, _row_of_graph(row, layer, names)) for row in graph)
        graph.clear()
        if place not in inputs:  # it has one of these rows
            held.setdefault(place, (x, layer))
        elif old is not None:
            index = next(index for index, (other, _) in enumerate(rows) if other == old)
            size = 0 if place in held else x.untyped_storage().nbytes()
            rows[index] = place, replace(rows[index][1], saved_bytes=size)
            held.setdefault(place, (x, rows[index][1].layer))
        elif place not in weights and not is_gathered:
            nonlocal source
            stored = recorder.stored(x)
            whole = x.untyped_storage().nbytes() if storage_address(x) else bytes_of(x)
            size = 0 if place in held else whole
            how, why = stored.how, stored.why
            if how == DERIVED:
                is_packed = x.dtype is torch.uint8
                is_source = is_packed or 0 < stored.tensor_bytes <= x.nbytes  # unpacked, to be packed on backward
                if is_source and place in held:
                    source = held[place][1]
                if is_source and place not in held:
                    how, why = (PACKED, why) if is_packed else (FULL_PRECISION, ON_BACKWARD)
                else:
                    why = f"derived from {source or '(model)'}"
                    held.setdefault(place, (x, source))
            _, owner = held.setdefault(place, (x, layer))
            layer = owner if how == DERIVED and size else layer  # copies of weights belong to the source
            of = source if how == DERIVED else owner if owner != layer else None
            op = recorder.op if recorder.graph is None else "input"
            row = OpMemory(layer, op, how, why, stored.tensor_bytes, size, of, stored.bit_width)
            rows.append((place, row))
        return x

    seen, thread = set[Any](), threading.get_ident()

    def note_contexts(result: Any) -> None:
        """Add rows for the tensors that other code's Functions hold as attributes, once per storage."""
        if torch.compiler.is_compiling() or threading.get_ident() != thread:
            return
        for name, x in _on_contexts(result, seen):
            place, layer = _storage_key(x), _running(names)
            before, _ = held.get(place, (None, ""))
            is_known = before is not None and not (isinstance(before, weakref.ref) and referent(before) is None)
            if place not in weights and not is_known:
                held[place] = x if holds else weakref.ref(x.untyped_storage()), layer
                size = x.untyped_storage().nbytes()
                rows.append((place, OpMemory(layer, name, FULL_PRECISION, ON_CONTEXT, x.nbytes, size)))

    watch_all()
    leave: Any = nullcontext()
    if not holds_graphs(model, run):  # which would trace a hook
        leave = register_module_forward_hook(lambda module, args, output: note_contexts(output))
    with leave, torch.enable_grad(), recording() as recorder, region(None):
        recorder.hooks = (pack, lambda x: x) if holds else (pack_unheld, unpack_unheld)
        with measuring_hooks(*recorder.hooks):
            try:
                note_contexts(run(model))
            finally:
                held.clear()  # regions refer to it until garbage collection, and later steps would share it
                if is_missed:
                    raise _UnheldError  # even if the model caught it or raised another
    return [row for place, row in rows if place not in recorder.withdrawn]


def _storage_key(x: Tensor) -> int:
    """Return a key for a tensor's storage, or for the tensor if it has none, such as oneDNN's."""
    return storage_address(x) or -id(x)


def _on_contexts(result: Any, seen: set[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that nodes not ``seen`` before hold as attributes, with the names of their Functions."""
    for node in nodes_behind([x.grad_fn for x in tensors_of(result)], seen):
        function = as_function(getattr(node, "_forward_cls", None))
        if function is not None and not is_of_torch(function):
            for x in tensors_of(list(vars(node).values())):
                for part in parts_of(x):
                    if storage_address(part):
                        yield function.__name__, part


def _running(names: Names) -> str:
    """Return the name of the innermost module that runs; hooks on modules would change what a compiler traces."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL.__code__:
            module = frame.f_locals["self"]
            if (name := names.get(getattr(module, "_orig_mod", module))) is not None:
                return name
        frame = frame.f_back
    return ""


_CALL: Any = nn.Module.__call__
#: How a tensor that is not packed is saved, by its use in a graph.
_HOW = {"": FULL_PRECISION, "linear": FULL_PRECISION, "recomputed": DERIVED}


def _row_of_graph(row: Any, running: str, names: Names) -> OpMemory:
    how = PACKED if row.bits > 1 else MASKED if row.bits else _HOW.get(row.use, EXACT)
    layer = _layer(running, row.module, names)
    return _OfGraph(layer, row.op, how, row.use, row.plain_bytes, row.nbytes, None, row.bits)


def _layer(running: str, path: str, names: Names) -> str:
    """The name of a module by Dynamo's path to it from the one that runs, as L['self']._modules['layers'][0]."""
    parts = re.findall(r"[A-Za-z_0-9]+", path.replace("_modules", ""))[2:]
    while parts and (name := ".".join(filter(None, (running, *parts)))) not in names.values():
        parts.pop(0)
    return name if parts else running
