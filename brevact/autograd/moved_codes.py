"""Track the results of ops that move the elements of forward-quantized tensors without changing them.

For concatenation, padding, reordered copies and repetition, backward decodes the sources' codes and runs the op again,
at no additional byte. Maximum pooling returns fewer elements than it reads: their codes are picked out
(:func:`track_pooled_codes`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd import known_values, storage_report
from brevact.autograd.saved import Decoder
from brevact.private_names.of_torch import TreeSpec, tree_flatten, tree_unflatten
from brevact.quantizers import Layout, pack_codes, unpack_codes


@dataclass(frozen=True, slots=True)
class _Moved(Decoder):
    """Decoder of the result of an op that moved known tensors.

    ``leaves`` are the op's flattened arguments, of structure ``spec``, with a ``_Source`` for each decoded tensor.
    ``sources`` has for each of those the end of its tensors among the saved ones, and its decoder.
    """

    func: Callable[..., Tensor]
    leaves: tuple[Any, ...]
    spec: TreeSpec
    sources: tuple[tuple[int, Decoder], ...]
    nbytes: int

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        decoded, start = [], 0
        for stop, decoder in self.sources:
            decoded.append(decoder.decode(tensors[start:stop]))
            start = stop
        return self.applied(decoded)

    def applied(self, sources: list[Tensor]) -> Tensor:
        leaves = [sources[leaf.place] if type(leaf) is _Source else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        with torch.no_grad():
            return self.func(*args, **kwargs)

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        return storage_report.EXACT, self.nbytes


class _Source(NamedTuple):
    place: int


def track_moved_codes(func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
    """Register how the result of an op that moves elements is decoded, if its tensor arguments are known.

    A view of an argument is known already.
    """
    if type(result) is not Tensor or known_values.find(result) is not None:
        return
    leaves, spec = tree_flatten((args, kwargs))
    kept: list[Tensor] = []
    sources: list[tuple[int, Decoder]] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            known = known_values.find(leaf)
            if known is None:
                return
            kept += known[0]
            leaves[index] = _Source(len(sources))
            sources.append((len(kept), known[1]))
    if sources:
        moved = _Moved(func, tuple(leaves), spec, tuple(sources), result.nbytes)
        known_values.register(result, tuple(kept), moved)


def track_pooled_codes(input: Tensor, index: Tensor, out: Tensor, rank: int) -> None:
    """Register the codes of the elements that pooling has picked from a known tensor.

    ``index`` has the result's shape and is flat over the input's last ``rank`` dimensions.
    """
    known = known_values.find(input)
    found = None if known is None else _codes_of(*known)
    if known is None or found is None or len(known[0]) > 3:  # with a NaN mask, which is not picked from
        return
    (_, zero_point, scale), (codes, integers) = known[0], found
    for x in (zero_point, scale):
        if x.numel() != 1 and not (known[1] is integers and x.dim() == input.dim() and x.shape[-rank:].numel() == 1):
            return  # groups of a map have their own scales
    picked = torch.empty_like(out, dtype=torch.uint8)
    picked.copy_(codes.flatten(-rank).gather(-1, index.flatten(-rank)).view(out.shape))
    layout = Layout.of_sizes(out.shape, out.stride(), integers.layout.dtype)
    tensors = pack_codes(layout.flatten(picked), integers.bit_width), zero_point, scale
    known_values.register(out, tensors, replace(integers, layout=layout, nbytes=out.nbytes))


def _codes_of(tensors: tuple[Tensor, ...], decoder: Any) -> tuple[Tensor, known_values.IntegerCodes] | None:
    """Return a known tensor's codes in its shape, and their decoder; None if it has no codes."""
    if isinstance(decoder, known_values.IntegerCodes):
        flat = unpack_codes(tensors[0], decoder.bit_width, decoder.layout.numel)
        return decoder.layout.restore(flat), decoder
    if isinstance(decoder, known_values.View):
        found = _codes_of(tensors, decoder.decoder)
        return found and (found[0].as_strided(decoder.shape, decoder.stride, decoder.offset), found[1])
    if isinstance(decoder, _Moved) and len(decoder.sources) == 1 and decoder.func is not F.pad:
        found = _codes_of(tensors, decoder.sources[0][1])
        return found and (decoder.applied([found[0]]), found[1])
    return None
