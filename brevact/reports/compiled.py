"""Bytes that the graphs of a compiled model save for backward, for `memory_report`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from brevact.autograd.storage_report import EXACT, FULL_PRECISION, MASKED, PACKED, recording
from brevact.reports.in_place import in_place
from brevact.reports.memory_table import LayerMemory, MemoryReport, OpMemory

_NOTE = (
    "Plain bytes are those of the same tensors unpacked. What the compiler computes again in backward, by itself or "
    "for a budget, is in no row."
)


def report_of_graphs(model: nn.Module, run: Callable[[nn.Module], Any]) -> MemoryReport:
    """Run a forward pass, and report the tensors that its compiled graphs save."""
    origin = getattr(model, "_orig_mod", model)
    with in_place(origin):
        origin.train()
        with torch.enable_grad(), recording() as recorder:
            run(model)
    kinds = {name: type(module).__name__ for name, module in origin.named_modules()}
    plain, saved = Counter[str](), Counter[str]()
    ops = []
    for row in recorder.of_graphs:
        layer = _layer(row.module, kinds)
        plain[layer] += row.plain_bytes
        saved[layer] += row.nbytes
        how = PACKED if row.bits > 1 else MASKED if row.bits else FULL_PRECISION if row.use in ("", "linear") else EXACT
        ops.append(OpMemory(layer, row.op, how, row.use, row.plain_bytes, row.nbytes, None, row.bits))
    rows = tuple(LayerMemory(name, kind, plain[name], saved[name]) for name, kind in kinds.items() if plain[name])
    return MemoryReport(rows, tuple(ops), _NOTE)


def _layer(path: str, kinds: dict[str, str]) -> str:
    """The name of a module by Dynamo's path to it, such as L['self'].layers.0 or L['self']._modules['layers'][0]."""
    parts = re.findall(r"[A-Za-z_0-9]+", re.sub(r"_modules|_orig_mod", "", path))[2:]
    while parts and ".".join(parts) not in kinds:
        parts.pop(0)
    return ".".join(parts)
