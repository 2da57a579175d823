"""Accuracy of a tensor that is derived, or that others are derived from."""

from __future__ import annotations

from typing import Any, NamedTuple

from brevact.autograd.settings import BackwardSettings, bits_of, nominal_quantizer


class Quality(NamedTuple):
    """Accuracy of a derived tensor: that of its worst source.

    ``quantizer`` is the packed source's, or None if all sources are lossless. ``is_curved``: a nonlinear function of a
    packed source lies on the way. ``cost`` is in multiplications and additions per output element of the most
    expensive layer that is recomputed on the way; 0 if there is none.
    """

    quantizer: Any = None
    is_curved: bool = False
    cost: int = 0

    @property
    def is_exact(self) -> bool:
        return self.quantizer is None

    def serves(self, settings: BackwardSettings, *, bends: bool = False) -> bool:
        """Return whether a reader, which may be nonlinear (``bends``), can use the tensor in place of a packed one."""
        if self.cost > settings.recompute:
            return False
        if self.quantizer is None:
            return True
        reader, is_curved = settings.quantizer, bends or self.is_curved
        if self.quantizer is reader:  # of most chains
            return settings.derives and (not is_curved or settings.derives_curved)
        if not settings.derives or (is_curved and bits_of(self.quantizer) < settings.derive_min_bits):
            return False
        if nominal_quantizer(self.quantizer) == nominal_quantizer(reader):
            return True
        is_fine = bits_of(self.quantizer) >= bits_of(reader) > 0
        return is_fine and (bool(self.quantizer.is_stochastic) or not reader.is_stochastic)

    def with_other(self, other: Quality) -> Quality:
        is_curved, cost = self.is_curved or other.is_curved, max(self.cost, other.cost)
        if self.quantizer is None or other.quantizer is None:
            return Quality(self.quantizer or other.quantizer, is_curved, cost)
        coarser = min(self.quantizer, other.quantizer, key=lambda q: (bits_of(q), not q.is_stochastic))
        return Quality(coarser, is_curved, cost)


#: Quality of a tensor that is saved losslessly.
EXACT = Quality()
