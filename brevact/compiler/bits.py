"""Choose the bits of each saved tensor.

Once a joint graph's saved tensors are known, settings and use of each decide its quantizer: scores, smooth functions
and sources of other layers get more bits than tensors that backward reads linearly. Passes that choose between
tensors compare their bits. A budget gets the widths of least noise within it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from torch import fx

from brevact.autograd.ops.vector_norms import EMBEDDING_BITS
from brevact.autograd.region.settings import BackwardSettings, bits_of
from brevact.compiler.aten import Use
from brevact.compiler.dependence import Saved
from brevact.compiler.joint_graph import JointGraph
from brevact.compiler.nodes import is_mask, numel_of
from brevact.compiler.norms import is_embedding, statistics_of
from brevact.quantizers import UniformQuantizer
from brevact.quantizers.formats.uniform import BIT_WIDTHS
from brevact.quantizers.traits import traits_of

#: Fewest bits of tensors from which layers are computed again, which take at least two bits more than others.
_DEEP_BITS = 6
#: Noise of sources of recomputed layers, as a multiple of other tensors'.
_DEEP_NOISE = 4.0
#: Bits per element of minima and scales.
_METADATA = 8 * 6 / 512
#: Bit widths that a limit chooses among.
WIDTHS = (8, 7, 6, 5, 4, 3, 2)


@functools.cache
def with_bits(settings: BackwardSettings, bits: int) -> BackwardSettings:
    if bits_of(settings.quantizer) in (0, bits):
        return settings
    try:
        quantizer = dataclasses.replace(settings.quantizer, bit_width=bits)
    except (TypeError, ValueError):
        quantizer = _uniform(settings.quantizer, bits)
    return dataclasses.replace(settings, quantizer=quantizer, score_bit_width=max(bits, settings.score_bit_width))


def _uniform(quantizer: Any, bits: int) -> UniformQuantizer:
    return UniformQuantizer(bit_width=bits, rounding=traits_of(quantizer).rounding)


def settings_for(joint: JointGraph, saved: Saved, width: int | None = None) -> BackwardSettings:
    settings: BackwardSettings = joint.settings_of(saved.readers)
    if width is None and joint.widths:
        width = joint.widths.get(saved.node.name) or min(joint.widths.values())
    return settings if width is None else with_bits(settings, width)


def quantizer_of(joint: JointGraph, saved: Saved, width: int | None = None) -> Any:
    """The settings' quantizer, or a finer one for a tensor that backward reads in another way than linearly."""
    settings = settings_for(joint, saved, width)
    quantizer, least = settings.quantizer, 0
    if saved.use is Use.SCORES:
        least = settings.score_bit_width
    elif saved.use is Use.SMOOTH or (saved.use is Use.AVERAGED and not statistics_of(saved.node, settings)):
        least = settings.derive_min_bits or 4
    if is_embedding(saved.node):
        least = EMBEDDING_BITS
    if saved.is_deep and not settings.recompute:
        least = max(least, _DEEP_BITS, next((each for each in BIT_WIDTHS if each >= bits_of(quantizer) + 2), 0))
    return _uniform(quantizer, least) if 0 < bits_of(quantizer) < least else quantizer


def exact_bits(joint: JointGraph, node: fx.Node) -> int:
    """Bits per element of a tensor that is saved without rounding."""
    if is_mask(node):
        return 1
    return joint.integers.width_of(node) or 8 * node.meta["val"].itemsize


def stored_bits(joint: JointGraph, node: fx.Node) -> float:
    """Bits per element of a saved tensor."""
    saved: Any = joint.uses.get(node)
    return bits_of(quantizer_of(joint, saved)) + _METADATA if joint.is_lossy(saved) else exact_bits(joint, node)


def costs(joint: JointGraph, width: int | None = None) -> Iterator[tuple[fx.Node, float, float]]:
    """Saved tensors, their bytes, and a figure for their noise: variances in units of squared ranges."""
    for node in joint.saved:
        saved: Any = joint.uses.get(node)
        if not joint.adds(node):
            continue
        if joint.is_lossy(saved):
            bits, size = bits_of(quantizer_of(joint, saved, width)), numel_of(node)
            yield node, size * (bits + _METADATA) / 8, size * 4.0**-bits * (_DEEP_NOISE if saved.is_deep else 1.0)
        else:
            yield node, numel_of(node) * exact_bits(joint, node) / 8, 0.0


def nbytes_of_saved(joint: JointGraph) -> float:
    return sum(nbytes for _, nbytes, _ in costs(joint))


def widths_within(joint: JointGraph, limit: float) -> tuple[dict[str, int], float]:
    """Bit widths of tensors by name, of least noise within a limit or else the least ones, and their bytes."""
    lossy = filter(joint.is_lossy, joint.uses.values())
    widths = {each.node.name: bits_of(joint.settings_of(each.readers).quantizer) for each in lossy}
    steps: list[tuple[float, str, int, float]] = []  # noise per byte
    before, total = dict[str, tuple[float, float]](), 0.0
    for width in (None, *WIDTHS):
        for node, nbytes, noise in costs(joint, width):
            more, less = before.get(node.name, (noise, nbytes))
            if width is None:
                total += nbytes
            elif nbytes < less:
                steps.append(((noise - more) / (less - nbytes), node.name, width, less - nbytes))
            if nbytes <= less:
                before[node.name] = noise, nbytes
    for _, name, width, nbytes in sorted(steps):
        if total <= limit:
            break
        widths[name], total = width, total - nbytes
    return widths, total
