"""Tables and plots of the noise that backward quantization adds to the gradients of a model."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
from dataclasses import dataclass

from brevact.tables import MIB, figure_kind, size_text, text_table


@dataclass(frozen=True)
class LayerNoise:
    """Noise and bias that one layer's packed tensors add to the gradients, including those of earlier layers.

    Noise, bias and their standard errors are in the unit of the report; NaN if not measured.

    Args:
        layer: qualified name of the module that packs; tensors of a container's own forward belong to the container.
        kind: class of the module.
        readers: layers that derive their tensors from these, whose errors count here; a layer that derives from several
            layers counts in the row of each.
        bit_widths: distinct bit widths of the codes, without quantizers whose width is unknown.
        saved_bytes: bytes of the packed tensors.
        noise: variance of the gradients with everything else at 8 bits, minus the variance with everything at 8 bits.
        noise_error: standard error of ``noise``.
        bias: squared norm of the mean error.
        bias_error: standard error of ``bias``.
    """

    layer: str
    kind: str
    readers: tuple[str, ...]
    bit_widths: tuple[int, ...]
    saved_bytes: int
    noise: float = math.nan
    noise_error: float = math.nan
    bias: float = math.nan
    bias_error: float = math.nan


@dataclass(frozen=True)
class GradientReport:
    """Noise and bias that backward quantization adds to the gradients of a model.

    >>> row = LayerNoise("norm", "BatchNorm2d", ("act", "conv"), (4,), 2**20, 0.05, 0.01, 0.001, 0.001)
    >>> print(GradientReport((row,), 0.05, 0.01, 0.001, 0.001, 2**20, 2**24, 1.0, False, 4, 8, 53))
    layer  kind         readers  bits     stored              noise              bias²
    ----------------------------------------------------------------------------------
    norm   BatchNorm2d        2     4  1.000 MiB  0.05000 ± 0.01000  0.00100 ± 0.00100
    ----------------------------------------------------------------------------------
    total                              1.000 MiB  0.05000 ± 0.01000  0.00100 ± 0.00100
    <BLANKLINE>
    16.0 times less is kept for backward.
    Unit of noise and bias²: variance of the gradient between the 4 batches.

    Args:
        rows: one row per layer that packs tensors, in the order of the forward pass.
        noise: variance of the gradient over the quantizers' seeds, summed over weights, in the unit.
        noise_error: standard error of ``noise``; NaN for one batch.
        bias: squared norm of the mean error of the gradient, in the unit; an unbiased estimate, which may be negative.
        bias_error: standard error of ``bias``; NaN for one batch.
        saved_bytes: bytes saved for backward, each storage once, including the loss.
        plain_bytes: bytes saved without backward quantization.
        unit: variance of the exact gradient between batches, summed over weights; with one batch, the squared norm of
            its gradient.
        is_relative: whether ``unit`` is that squared norm.
        batches: number of batches.
        draws: seeds per batch.
        passes: forward and backward passes that the report took.
        notes: sentences on how to read the report.
    """

    rows: tuple[LayerNoise, ...]
    noise: float
    noise_error: float
    bias: float
    bias_error: float
    saved_bytes: int
    plain_bytes: int
    unit: float
    is_relative: bool
    batches: int
    draws: int
    passes: int
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """Compression: ``plain_bytes / saved_bytes``."""
        return self.plain_bytes / self.saved_bytes if self.saved_bytes else float("inf")

    def __str__(self) -> str:
        beside = self.saved_bytes - sum(row.saved_bytes for row in self.rows)
        cells = [_cells(row) for row in self.rows]
        if beside:
            cells.append(("(exact)", "masks, statistics", "", "", size_text(beside), "", ""))
        figures = _with_error(self.noise, self.noise_error), _with_error(self.bias, self.bias_error)
        total = ("total", "", "", "", size_text(self.saved_bytes), *figures)
        table = text_table(("layer", "kind", "readers", "bits", "stored", "noise", "bias²"), cells, total, numbers=5)
        return "\n\n".join((table, "\n".join((self._summary(), *self.notes))))

    def _summary(self) -> str:
        unit = (
            "squared norm of the gradient of the one batch. Pass two or more for units of minibatch noise, and for "
            "standard errors."
            if self.is_relative
            else f"variance of the gradient between the {self.batches} batches."
        )
        return f"{self.ratio:.1f} times less is kept for backward.\nUnit of noise and bias²: {unit}"

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one line per layer, with the fields of a row as columns, and a last line for the layer "total".

        Args:
            path: file to write.
        """
        names = [field.name for field in dataclasses.fields(LayerNoise)]
        figures = self.noise, self.noise_error, self.bias, self.bias_error
        total = LayerNoise("total", "", (), (), self.saved_bytes, *figures)
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            for row in (*self.rows, total):
                values = (getattr(row, name) for name in names)
                writer.writerow([" ".join(map(str, each)) if isinstance(each, tuple) else each for each in values])

    def plot(self, path: str | os.PathLike[str], *, max_layers: int = 40) -> None:
        """Plot each layer's noise beside its bytes.

        Args:
            path: image file to write; its extension selects the format.
            max_layers: layers to show, at least 1: those with the most noise.

        Raises:
            ImportError: matplotlib is not installed.
            TypeError: ``max_layers`` is not an int.
            ValueError: ``max_layers`` is less than 1.
        """
        figure = figure_kind("GradientReport", max_layers)(
            figsize=(9, 1.6 + 0.24 * min(max_layers, len(self.rows))), layout="constrained"
        )
        chosen = {id(row) for row in sorted(self.rows, key=lambda row: -row.noise)[:max_layers]}
        rows = [row for row in self.rows if id(row) in chosen]
        noise, stored = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
        places = range(len(rows))
        errors = [0 if math.isnan(row.noise_error) else row.noise_error for row in rows]
        noise.barh(places, [row.noise for row in rows], xerr=errors, height=0.7)
        noise.set_yticks(places, [row.layer or "(model)" for row in rows], fontsize=7)
        noise.margins(y=0.01)
        noise.invert_yaxis()
        noise.set_xlabel("noise, in squared norms of the gradient" if self.is_relative else "noise, in minibatch noise")
        stored.barh(places, [row.saved_bytes / MIB for row in rows], height=0.7, color="C7")
        stored.set_xlabel("packed, MiB")
        figure.suptitle(f"noise {self.noise:.3g}, bias² {self.bias:.2g}, {self.ratio:.1f} times less kept for backward")
        figure.savefig(path, dpi=150)


def _cells(row: LayerNoise) -> tuple[str, ...]:
    return (
        row.layer or "(model)",
        row.kind,
        str(len(row.readers)),
        ", ".join(map(str, row.bit_widths)) or "-",
        size_text(row.saved_bytes),
        _with_error(row.noise, row.noise_error),
        _with_error(row.bias, row.bias_error),
    )


def _with_error(value: float, error: float) -> str:
    if math.isnan(value):
        return "-"
    text = f"{value:.5f}".replace("-0.00000", "0.00000")
    return text if math.isnan(error) else f"{text} ± {error:.5f}"
