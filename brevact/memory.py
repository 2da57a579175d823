"""What a model stores for backward, measured: `memory_report`."""

from __future__ import annotations

import copy
import csv
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import UninitializedTensorMixin

from brevact.autograd import region, regions_disabled
from brevact.injectors.proxies import is_quant_proxy

_MIB = 2**20


@dataclass(frozen=True)
class LayerMemory:
    """What one layer stores for backward.

    Args:
        layer: qualified name of the module; what a container's own forward computes stands under the container.
        kind: class of the module.
        plain_bytes: bytes stored without backward quantization.
        saved_bytes: bytes stored with it.
    """

    layer: str
    kind: str
    plain_bytes: int
    saved_bytes: int


@dataclass(frozen=True)
class MemoryReport:
    """What a model stores for backward, with and without backward quantization.

    ``print(report)`` gives a text table; a storage that several ops keep counts once, for the first of them.

    Args:
        rows: one row a layer, in the order of ``model.named_modules()``; layers that store nothing are left out.
    """

    rows: tuple[LayerMemory, ...]

    @property
    def saved_bytes(self) -> int:
        """Bytes stored with backward quantization."""
        return sum(row.saved_bytes for row in self.rows)

    @property
    def plain_bytes(self) -> int:
        """Bytes stored without backward quantization."""
        return sum(row.plain_bytes for row in self.rows)

    @property
    def ratio(self) -> float:
        """How many times less is stored: ``plain_bytes / saved_bytes``."""
        return self.plain_bytes / self.saved_bytes if self.saved_bytes else float("inf")

    def __str__(self) -> str:
        """Return the table, a row a layer and the total."""
        total = LayerMemory("total", "", self.plain_bytes, self.saved_bytes)
        cells = [("layer", "kind", "plain", "stored", "ratio"), *(_cells(row) for row in (*self.rows, total))]
        widths = [max(len(row[column]) for row in cells) for column in range(5)]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one line a layer: layer, kind, plain_bytes, saved_bytes.

        Args:
            path: file to write.
        """
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("layer", "kind", "plain_bytes", "saved_bytes"))
            writer.writerows((row.layer, row.kind, row.plain_bytes, row.saved_bytes) for row in self.rows)

    def plot(self, path: str | os.PathLike[str], *, max_layers: int = 40) -> None:
        """Draw plain against stored bytes, a pair of bars a layer.

        Args:
            path: image file to write; its ending chooses the format.
            max_layers: layers to show; the smaller ones are summed up in one pair of bars.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("MemoryReport.plot draws with matplotlib; install it: pip install matplotlib") from error
        rows = _largest(self.rows, max_layers)
        height = 0.8 / 2
        figure = Figure(figsize=(9, 1.6 + 0.24 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for offset, label, values in (
            (-height / 2, f"plain, {self.plain_bytes / _MIB:.1f} MiB", [row.plain_bytes for row in rows]),
            (height / 2, f"stored, {self.saved_bytes / _MIB:.1f} MiB", [row.saved_bytes for row in rows]),
        ):
            axes.barh([y + offset for y in range(len(rows))], [v / _MIB for v in values], height, label=label)
        axes.set_yticks(range(len(rows)), [row.layer or "(model)" for row in rows], fontsize=7)
        axes.margins(y=0.01)
        axes.invert_yaxis()
        axes.set_xlabel("kept for backward, MiB")
        axes.set_title(f"{self.ratio:.1f} times less kept for backward")
        axes.legend(loc="lower right")
        figure.savefig(path, dpi=150)


def memory_report(model: nn.Module, batch: Any) -> MemoryReport:
    """Measure what one training forward pass of a model stores for backward, each storage once.

    Runs a copy of the model on the batch twice, as it is and with its backward quantizers switched off, and adds up
    the storages that autograd keeps, without parameters and buffers. Model, gradients and random generators stay
    untouched. An input that is stored as it is counts; the caller holds it anyway. What a checkpointed function will
    compute again does not.

    Args:
        model: module, with or without backward quantization; measured in training mode.
        batch: what the model is called with: a tensor, a tuple or list of positional arguments, or a mapping of
            keyword arguments.

    Returns:
        The report, a row a layer.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``model`` cannot be copied.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {model!r} of type {type(model).__name__}; accepted is a torch.nn.Module")
    saved = _measure(model, batch)
    with regions_disabled():
        plain = _measure(model, batch)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    layers = [name for name in kinds if name in plain or name in saved]
    return MemoryReport(
        tuple(LayerMemory(name, kinds[name], plain.get(name, 0), saved.get(name, 0)) for name in layers)
    )


def _measure(model: nn.Module, batch: Any) -> dict[str, int]:
    """Return the bytes that each layer of a copy of the model keeps for backward."""
    model = _copy(model)
    if not model.training:
        model.train()
    held: dict[int, Any] = {x.untyped_storage()._cdata: x for x in (*model.parameters(), *model.buffers())}
    layers: dict[str, int] = {}

    def pack(x: Tensor) -> Tensor:
        x = x if x.grad_fn is None else x.detach()
        storage = x.untyped_storage()
        if storage._cdata not in held:
            held[storage._cdata] = x
            layers[running[-1]] = layers.get(running[-1], 0) + storage.nbytes()
        return x

    devices = {x.device for x in held.values() if x.device.type == "cuda"}
    with _running_module(model) as running, torch.random.fork_rng([device.index for device in devices]):
        with torch.inference_mode(False), torch.enable_grad(), region(None):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                if isinstance(batch, Mapping):
                    output = model(**batch)
                else:
                    output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    del output
    return layers


def _copy(model: nn.Module) -> nn.Module:
    if any(isinstance(x, UninitializedTensorMixin) for x in (*model.parameters(), *model.buffers())):
        raise ValueError("model: some lazy modules have no parameters yet; call the model on a batch first")
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:
        raise ValueError(
            f"model: {type(model).__name__} cannot be copied ({error}). The legacy weight_norm and spectral_norm keep "
            "a computed tensor: use those of torch.nn.utils.parametrizations, or measure before the first forward pass"
        ) from error


@contextmanager
def _running_module(model: nn.Module) -> Iterator[list[str]]:
    """Keep a list of the names of the modules that run, outermost first."""
    names = dict(_layers(model))
    running = [""]

    def enter(module: nn.Module, args: Any) -> None:
        running.append(names.get(module, running[-1]))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    handles = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


def _layers(module: nn.Module, name: str = "") -> Iterator[tuple[nn.Module, str]]:
    """Yield modules and names; the quantizers inside a Brevitas layer belong to the layer."""
    yield module, name
    for child_name, child in module.named_children():
        if not is_quant_proxy(child):
            yield from _layers(child, f"{name}.{child_name}" if name else child_name)


def _cells(row: LayerMemory) -> tuple[str, str, str, str, str]:
    ratio = f"{row.plain_bytes / row.saved_bytes:.1f}" if row.saved_bytes else "-"
    return row.layer or "(model)", row.kind, _size(row.plain_bytes), _size(row.saved_bytes), ratio


def _size(count: int) -> str:
    return f"{count / _MIB:.3f} MiB" if count >= 1024 else f"{count} B"


def _largest(rows: tuple[LayerMemory, ...], count: int) -> list[LayerMemory]:
    """The rows with the most plain bytes, in their order, and the sum of the others as a last row."""
    if len(rows) <= count:
        return list(rows)
    chosen = set(sorted(rows, key=lambda row: -row.plain_bytes)[: count - 1])
    others = [row for row in rows if row not in chosen]
    rest = LayerMemory(
        f"{len(others)} other layers", "", sum(r.plain_bytes for r in others), sum(r.saved_bytes for r in others)
    )
    return [*(row for row in rows if row in chosen), rest]
