"""Chains of layers: a layer that packs tensors, and the layers that derive from them."""

from __future__ import annotations

from dataclasses import dataclass

from brevact.autograd.storage_report import DERIVED, ON_BACKWARD, PACKED
from brevact.reports.memory_table import MemoryReport, OpMemory


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
