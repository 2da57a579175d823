"""Tables and plots of the tensors that a model saves for backward."""

from __future__ import annotations

import os
from dataclasses import dataclass

from brevact.autograd.saving.storage_report import DERIVED, ON_BACKWARD, PACKED
from brevact.tables import MIB, MOST_BARS, plot_bars, size_text, text_table, write_csv


@dataclass(frozen=True)
class LayerMemory:
    """Bytes that one layer saves for backward.

    Args:
        layer: qualified name of the module; ops in a container's own forward belong to the container.
        kind: class of the module.
        plain_bytes: bytes saved without backward quantization.
        saved_bytes: bytes saved with it.
        note: why ``plain_bytes`` is 0, or the layer from which its tensors derive if ``saved_bytes`` is 0; else "".
    """

    layer: str
    kind: str
    plain_bytes: int
    saved_bytes: int
    note: str = ""


@dataclass(frozen=True)
class OpMemory:
    """One tensor that an op saves for backward, with backward quantization.

    Args:
        layer: qualified name of the module that ran.
        op: torch function that saves the tensor, or its caller ("" for code that calls none).
        how: "packed"; "mask", one bit per element; "exact", if its exact values matter or are already codes;
            "derived", recomputed from a tensor that a layer saves; or "full precision".
        why: the reason if the tensor is exact, derived or in full precision.
        tensor_bytes: bytes of the tensor when decoded.
        saved_bytes: bytes of its storages, 0 if an earlier op saved it.
        source: layer that saves the tensor from which this one derives, or that saved this one before; None otherwise.
        bit_width: bits per code of the packed tensor or of its source; 0 if there is none or it is unknown.
    """

    layer: str
    op: str
    how: str
    why: str
    tensor_bytes: int
    saved_bytes: int
    source: str | None = None
    bit_width: int = 0


@dataclass(frozen=True)
class MemoryReport:
    """The bytes that a model saves for backward, with and without backward quantization.

    ``print(report)`` shows a table of layers and a table of ops; ``print(report.explain())`` shows the ops of each
    layer. A storage that several ops save counts once, for the first one.

    >>> import torch, brevact
    >>> report = brevact.memory_report(torch.nn.Linear(64, 64), torch.randn(32, 64))
    >>> report.plain_bytes, report.rows[0].kind, report.ops[0].why
    (8192, 'Linear', 'fewer elements than min_numel')

    Args:
        rows: one row per layer that saves tensors, in the order of ``model.named_modules()``.
        ops: one row per tensor that an op saves with backward quantization, in the order of the forward pass.
        note: that the model has no backward quantizer, or why it saves nothing at all; "" otherwise.
        would_save: whether the model has no backward quantizer, so that ``saved_bytes`` is measured with
            ``brevact.DEFAULT``: tables, files and plots then say "would store".
        scope: the part of a step that was not measured; "" for a whole step.
    """

    rows: tuple[LayerMemory, ...]
    ops: tuple[OpMemory, ...] = ()
    note: str = ""
    would_save: bool = False
    scope: str = ""

    @property
    def saved_bytes(self) -> int:
        """Bytes saved with backward quantization, or with ``brevact.DEFAULT`` if ``would_save``."""
        return sum(row.saved_bytes for row in self.rows)

    @property
    def plain_bytes(self) -> int:
        """Bytes saved without backward quantization."""
        return sum(row.plain_bytes for row in self.rows)

    @property
    def ratio(self) -> float:
        """Compression: ``plain_bytes / saved_bytes``."""
        return self.plain_bytes / self.saved_bytes if self.saved_bytes else float("inf")

    def __str__(self) -> str:
        total = LayerMemory("total", "", self.plain_bytes, self.saved_bytes)
        table = text_table(
            ("layer", "kind", "plain", self._stored, "ratio"),
            [*map(_cells, self.rows)],
            _cells(total),
            numbers=3,
            notes=[row.note for row in self.rows],
        )
        remarks = " ".join(filter(None, (self.note, self.scope)))
        table = f"{table}\n\n{remarks}" if remarks else table
        return f"{table}\n\n{self._by_op(())}" if self.ops else table

    @property
    def _stored(self) -> str:
        return "would store" if self.would_save else "stored"

    def explain(self) -> str:
        """Return a table of how each op of each layer saves its tensors, and why."""
        return self._by_op(("layer",))

    def _by_op(self, names: tuple[str, ...]) -> str:
        names = (*names, "op", "how", "why")
        groups: dict[tuple[str, ...], list[OpMemory]] = {}
        for row in self.ops:
            key = {name: getattr(row, name) for name in names}
            if row.how == DERIVED and "layer" not in key:
                key["why"] = "recomputed from a tensor that another layer saves"
            groups.setdefault(tuple(key.values()), []).append(row)
        cells = []
        for values, rows in groups.items():
            tensor_bytes = sum(row.tensor_bytes for row in rows)
            cells.append(
                (*values, str(len(rows)), size_text(tensor_bytes), size_text(sum(row.saved_bytes for row in rows)))
            )
        return text_table((*names, "tensors", "decoded", self._stored), cells, numbers=3)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one line per layer: layer, kind, plain_bytes, saved_bytes (or would_save_bytes), note.

        Args:
            path: file to write.
        """
        saved = "would_save_bytes" if self.would_save else "saved_bytes"
        lines = ((row.layer, row.kind, row.plain_bytes, row.saved_bytes, row.note) for row in self.rows)
        write_csv(path, [("layer", "kind", "plain_bytes", saved, "note"), *lines])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plot plain and saved bytes as a pair of bars per layer, of the 40 largest.

        Args:
            path: image file to write; its extension selects the format.

        Raises:
            ImportError: matplotlib is not installed.
        """
        chosen = {id(row) for row in sorted(self.rows, key=lambda row: -row.plain_bytes)[:MOST_BARS]}
        rows = [row for row in self.rows if id(row) in chosen]
        series = {
            f"plain, {self.plain_bytes / MIB:.1f} MiB": [row.plain_bytes / MIB for row in rows],
            f"{self._stored}, {self.saved_bytes / MIB:.1f} MiB": [row.saved_bytes / MIB for row in rows],
        }
        title = f"{self.ratio:.1f} times less kept for backward" + f"\n{self.note}" * bool(self.note)
        plot_bars(path, title, [row.layer for row in rows], {"kept for backward, MiB": series})


def _cells(row: LayerMemory) -> tuple[str, str, str, str, str]:
    ratio = f"{row.plain_bytes / row.saved_bytes:.1f}" if row.saved_bytes else "-"
    return row.layer or "(model)", row.kind, size_text(row.plain_bytes), size_text(row.saved_bytes), ratio


@dataclass(frozen=True)
class Chain:
    """A layer that packs tensors, and the layers that pack none, but derive from them.

    A reader derives from its source's packed tensors unless its own quantizer has more bits: then it packs its own.

    Args:
        source: qualified name of the layer that packs.
        readers: names of layers that pack nothing, but derive from the source or read the same tensor; one that derives
            from several sources, as after a residual sum, is in the chain of each.
        saved_bytes: bytes of the packed tensors.
        tensor_bytes: bytes of these tensors when decoded.
        bit_widths: distinct bit widths of their codes, without quantizers whose width is unknown.
    """

    source: str
    readers: tuple[str, ...]
    saved_bytes: int
    tensor_bytes: int
    bit_widths: tuple[int, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        return self.source, *self.readers


def chains_of(report: MemoryReport) -> tuple[Chain, ...]:
    """Return the chains of a model with backward quantization, in the order in which sources first pack a tensor.

    Other saved tensors (masks, statistics, weights, tensors below ``min_numel``) are exact, and belong to no chain.

    >>> import torch, brevact
    >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(64), torch.nn.SiLU(), torch.nn.Linear(64, 8))
    >>> report = brevact.memory_report(brevact.quantize_backward(model), torch.randn(64, 64))
    >>> chains_of(report)
    (Chain(source='0', readers=('1', '2'), saved_bytes=2096, tensor_bytes=16384, bit_widths=(4,)),)
    """
    packed: dict[str, list[OpMemory]] = {}
    for row in report.ops:
        if (row.how == PACKED or row.why == ON_BACKWARD) and row.saved_bytes:
            packed.setdefault(row.layer, []).append(row)
    readers: dict[str, dict[str, None]] = {source: {} for source in packed}
    for row in report.ops:
        if row.how in (DERIVED, PACKED) and row.source in packed and row.layer not in packed:
            readers[row.source][row.layer] = None
    return tuple(
        Chain(
            source,
            tuple(readers[source]),
            sum(row.saved_bytes for row in rows),
            sum(row.tensor_bytes for row in rows),
            tuple(sorted({row.bit_width for row in rows if row.bit_width})),
        )
        for source, rows in packed.items()
    )
