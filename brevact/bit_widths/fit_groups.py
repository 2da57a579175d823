"""What `fit` gives a bit width to: each layer that packs tensors, with the layers that derive from it.

Everything that can derive from a packed tensor does, at any width (``derive_min_bits=1``): which tensors are packed
then hardly depends on the widths, so that bytes add up over the layers that pack. A layer that derives from several
has the width of the coarsest, and all others, which pass tensors on or keep masks, the smallest of all: with more bits
than what it reads, a layer would pack a tensor of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from brevact import injectors
from brevact.autograd import attach_region, detach_region
from brevact.autograd.storage_report import DERIVED, PACKED, SMALL
from brevact.injectors import backward_settings_from
from brevact.policy.presets import Policy
from brevact.policy.rules import POLICY, layers_of
from brevact.reports.chains import chains_of
from brevact.reports.memory_table import MemoryReport

#: Bits of codes, and what stands for full precision beside them.
BIT_WIDTHS = tuple(range(1, 9))
FULL_PRECISION = 32
_MOST = max(BIT_WIDTHS)
#: Bits of query and key of attention beyond those of the layer, since they are exponentiated.
_MORE_SCORE_BITS = 2
_LEAST_SCORE_BITS = 2


@dataclass(frozen=True)
class Group:
    """A layer that packs tensors, and those that derive from it.

    Args:
        source: qualified name of the layer.
        readers: names of the layers that derive from it, and pack nothing.
        bytes_of: what they store, by bit width; of a layer that derives from several, the first has its bytes.
    """

    source: str
    readers: tuple[str, ...]
    bytes_of: Mapping[int, int]


@dataclass(frozen=True)
class Groups:
    """All that a model stores.

    Args:
        groups: in the order of the forward pass.
        fixed_bytes: what no width changes: masks, statistics, small tensors.
        plain_bytes: what is stored at full precision.
        small: layers that keep tensors as they are, for they are small.
        attending: layers that compute attention.
        parents: of each module that may have a rule, the name of the module around it; the model's own is "".
    """

    groups: tuple[Group, ...]
    fixed_bytes: int
    plain_bytes: int
    small: frozenset[str]
    attending: frozenset[str]
    parents: Mapping[str, str]

    @functools.cached_property
    def sources_of(self) -> dict[str, list[str]]:
        """Names of the layers from which each of the others derives."""
        found: dict[str, list[str]] = {}
        for group in self.groups:
            for reader in group.readers:
                found.setdefault(reader, []).append(group.source)
        return found

    def saved_bytes(self, widths: Mapping[str, int]) -> int:
        """Return the bytes that the groups, whose sources have these widths, and all else store, by adding them up."""
        return self.fixed_bytes + sum(group.bytes_of[widths[group.source]] for group in self.groups)

    def widths_of_modules(self, widths: Mapping[str, int]) -> dict[str, int]:
        """Return the bit widths of the modules that differ from what is around them, of attention, and of the model."""
        lowest = min(widths.values(), default=_MOST)
        found: dict[str, int] = {}
        effective: dict[str, int] = {}
        for name, parent in self.parents.items():
            if name in widths:
                width = widths[name]
            elif name in self.sources_of:
                width = min(widths[source] for source in self.sources_of[name])
            else:
                width = _MOST if name in self.small else lowest
            effective[name] = width
            if not name or effective[parent] != width or name in self.attending:
                found[name] = width
        return found

    def quantizers(self, widths: Mapping[str, int]) -> dict[str, Any]:
        """Return the backward quantizers of these modules, None for full precision, by the bit width of each source."""
        found = self.widths_of_modules(widths)
        return {name: quantizer_of(width, attends=name in self.attending) for name, width in found.items()}

    def policy(self, widths: Mapping[str, int]) -> Policy:
        """Return the rules that give each source its bit width."""
        found = self.quantizers(widths)
        inner_first = sorted(found, key=lambda name: -len(name.split(".")) if name else 0)
        return Policy({_pattern(name): found[name] for name in inner_first})


def groups_of(model: nn.Module, reports: Mapping[int, MemoryReport]) -> Groups:
    """Return what a model without a policy stores, from reports of it with a width of 1 to 8 bits everywhere."""
    finest = reports[_MOST]
    chains = chains_of(finest)
    owner = {chain.source: chain.source for chain in chains}
    for chain in chains:
        for reader in chain.readers:
            owner.setdefault(reader, chain.source)
    costs = {chain.source: dict.fromkeys((*BIT_WIDTHS, FULL_PRECISION), 0) for chain in chains}
    fixed = 0
    for row in finest.rows:
        fixed += 0 if row.layer in owner else row.saved_bytes
    for op in finest.ops:  # what several layers share without a policy counts for each of them: too much at most
        if op.layer in owner and op.how in (PACKED, DERIVED):
            costs[owner[op.layer]][FULL_PRECISION] += op.tensor_bytes
    for width, report in reports.items():
        for row in report.rows:
            if row.layer in owner:
                costs[owner[row.layer]][width] += row.saved_bytes
    others = {op.layer for op in finest.ops if op.why != SMALL}
    small = frozenset(op.layer for op in finest.ops) - others - owner.keys()
    attending = frozenset(op.layer for op in finest.ops if "attention" in op.op)
    names = layers_of(model)
    return Groups(
        tuple(Group(chain.source, chain.readers, costs[chain.source]) for chain in chains),
        *(fixed, finest.plain_bytes, small, attending),
        {name: name.rpartition(".")[0] for name in sorted(names, key=lambda name: len(name.split(".")) if name else 0)},
    )


@functools.cache
def quantizer_of(bit_width: int, *, attends: bool) -> Any:
    """Return the backward quantizer of a bit width, None for full precision.

    Args:
        bit_width: 1 to 8, or 32.
        attends: whether it is for what computes attention: query and key have more bits.
    """
    if bit_width == FULL_PRECISION:
        return None
    settings = {"score_bit_width": max(_LEAST_SCORE_BITS, min(_MOST, bit_width + _MORE_SCORE_BITS))} if attends else {}
    return getattr(injectors, f"DitherBackward{bit_width}bit").let(derive_min_bits=1, **settings)


@contextmanager
def with_quantizers(model: nn.Module, quantizers: Mapping[str, Any]) -> Iterator[None]:
    """Give modules of a model without a policy backward quantizers, None for full precision, for a block of code."""
    modules = dict(model.named_modules(remove_duplicate=False))
    with without_policy(model):
        for name, source in quantizers.items():
            attach_region(modules[name], None if source is None else backward_settings_from(source), POLICY)
        yield


@contextmanager
def without_policy(model: nn.Module) -> Iterator[None]:
    """Take away, after a block of code, the policy that the model got in it."""
    try:
        yield
    finally:
        for module in model.modules():
            detach_region(module, POLICY)


def _pattern(name: str) -> str:
    """Return the pattern of a rule that matches this name alone, and what is inside."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
