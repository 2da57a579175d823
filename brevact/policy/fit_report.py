"""The report of `fit`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from brevact.tables import MIB, text_table


@dataclass(frozen=True)
class FittedGroup:
    """A layer that packs tensors, with the layers that derive from it.

    Args:
        source: qualified name of the layer.
        readers: number of layers that derive from it.
        bit_width: bits per code; 32 for full precision.
        saved_bytes: bytes that they save.
        noise: predicted noise and squared bias that they cause, in units of minibatch noise.
    """

    source: str
    readers: int
    bit_width: int
    saved_bytes: int
    noise: float


@dataclass(frozen=True)
class FitReport:
    """Bytes and gradient noise of a fitted policy; noise is in units of the noise between minibatches.

    ``print(report)`` shows a table of the layers that pack tensors, with their bit widths.

    >>> report = FitReport("ratio=24", 2**20, 25 * 2**20, 0.045, 0.048, 0.002, 0.001, 0.001, passes=73)
    >>> report.ratio, round(report.harm, 3)
    (25.0, 0.049)
    >>> print(report.summary.partition(";")[0])
    ratio=24: 1.00 of 25.00 MiB, 25.0 times less

    Args:
        budget: the budget, as text.
        saved_bytes: measured bytes saved for backward.
        plain_bytes: measured bytes without backward quantization.
        predicted: sum of noise and squared bias over layers, each measured alone.
        noise: measured noise.
        noise_error: its standard error.
        bias: measured squared bias; an unbiased estimate, which may be negative.
        bias_error: its standard error.
        passes: number of forward and backward passes of the fit.
        note: the part of the budget that was not reached; "" if all was.
        groups: layers that pack, in the order of the forward pass.
        recompute: maximum multiplications per element of recomputed layers.
        time: time of a step at this level of recomputation, as a multiple of a plain step; 0 if not measured.
    """

    budget: str
    saved_bytes: int
    plain_bytes: int
    predicted: float
    noise: float
    noise_error: float
    bias: float
    bias_error: float
    passes: int
    note: str = ""
    groups: tuple[FittedGroup, ...] = ()
    recompute: int = 0
    time: float = 0.0

    @property
    def ratio(self) -> float:
        """Reduction factor of saved bytes: ``plain_bytes / saved_bytes``."""
        return self.plain_bytes / self.saved_bytes if self.saved_bytes else float("inf")

    @property
    def harm(self) -> float:
        """Measured noise plus squared bias, the latter no less than 0."""
        return self.noise + max(0.0, self.bias)

    def __str__(self) -> str:
        rows = [
            (
                group.source or "(model)",
                str(group.readers),
                "full" if group.bit_width > 8 else str(group.bit_width),
                f"{group.saved_bytes / MIB:.3f} MiB",
                f"{group.noise:.2g}",
            )
            for group in self.groups
        ]
        total = ("total", "", "", f"{self.saved_bytes / MIB:.3f} MiB", f"{self.predicted:.2g}")
        table = text_table(("layer that packs", "readers", "bits", "stored", "noise"), rows, total, numbers=4)
        return f"{table}\n\n{self.summary}"

    @property
    def summary(self) -> str:
        """One line with the budget, the saved bytes and the measured noise, and the part that was not reached."""
        text = (
            f"{self.budget}: {self.saved_bytes / MIB:.2f} of {self.plain_bytes / MIB:.2f} MiB, "
            f"{self.ratio:.1f} times less; noise {self.noise:.4f} ± {self.noise_error:.4f}, "
            f"bias² {self.bias:.4f} ± {self.bias_error:.4f} (predicted together: {self.predicted:.4f}), "
            "in units of minibatch noise"
        )
        if self.time:
            text += f"; a step takes {self.time:.2f} times as long"
        if self.recompute:
            text += f", layers of up to {self.recompute} multiplications an element are recomputed"
        return f"{text}\n{self.note}" if self.note else text

    @classmethod
    def from_plain(cls, plain: Any) -> FitReport:
        try:
            return cls(**{**plain, "groups": tuple(FittedGroup(**each) for each in plain["groups"])})
        except (TypeError, KeyError) as error:
            raise TypeError(f"report: {error}; Policy.save writes it") from error
