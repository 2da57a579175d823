"""Bit widths of a model's layers: which must be equal, their costs, and how to set them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from brevact.autograd import BackwardSettings, attach_region, has_region
from brevact.autograd.hooks import regions_of
from brevact.autograd.storage_report import DERIVED, PACKED
from brevact.injectors.proxies import modules_without_own_region, names_of
from brevact.policy.rules import POLICY
from brevact.quantizers import Granularity, PackedActivation, Rounding, SampleQuantizer, SampleWeights, UniformQuantizer
from brevact.quantizers.reference import moved_seed, seed_value
from brevact.reports.in_place import in_place
from brevact.reports.memory import stored_ops
from brevact.reports.memory_table import OpMemory

BIT_WIDTHS = range(1, 9)
_SHIFT = 0x9FB21C651E98DF25  # shifts seeds for another draw


class _Redrawn:
    """A quantizer that differs from its plain kind only in the random bits for the same seed."""

    plain: type

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        return _like(self, self.plain).quantize(x, moved_seed(seed_value(seed, x.device), _SHIFT))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RedrawnUniform(_Redrawn, UniformQuantizer):
    plain = UniformQuantizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RedrawnSample(_Redrawn, SampleQuantizer):
    plain = SampleQuantizer


def has_width(settings: BackwardSettings | None) -> bool:
    """Whether the bit width of settings may change: unbiased rounding to evenly spaced levels."""
    if settings is None or type(settings.quantizer) not in (UniformQuantizer, SampleQuantizer):
        return False
    quantizer = settings.quantizer
    return quantizer.rounding is not Rounding.NEAREST and quantizer.bit_width <= BIT_WIDTHS[-1]


class LayerWidths:
    """The regions of a model's policy whose widths may change, by module name."""

    def __init__(self, model: nn.Module, weights: SampleWeights | None = None) -> None:
        self.model = model
        self._settings: dict[tuple[BackwardSettings, int, bool], BackwardSettings] = {}
        self.base: dict[str, BackwardSettings] = {}
        _attach_to_all(model)
        for name, hook in _regions(model).items():
            if has_width(hook.settings):
                self.base[name] = hook.settings if weights is None else _by_samples(hook.settings, weights)

    def set(self, widths: Mapping[str, int], redrawn: Collection[str] = ()) -> None:
        """Set widths by name; `redrawn` layers get other random bits for the same seeds."""
        for name, hook in _regions(self.model).items():
            if name in widths and name in self.base:
                key = self.base[name], widths[name], name in redrawn
                if key not in self._settings:
                    self._settings[key] = _with_width(*key)
                hook.settings = self._settings[key]

    def stored(self, run: Callable[[nn.Module], Any]) -> dict[int, tuple[OpMemory, ...]]:
        """Measure how each op saves its tensors if all layers have one width, by one forward pass per width."""
        found = {}
        with in_place(self.model):
            for width in BIT_WIDTHS:
                self.set(dict.fromkeys(self.base, width))
                found[width] = stored_ops(self.model, run)
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Groups:
    """Layers that pack tensors, each with one width, and layers that derive from them.

    A layer that derives from several sources has the smallest of their widths, and all others, which pass tensors on or
    save masks, the smallest of all: with more bits than its source, a layer would pack its own tensor.
    """

    costs: Mapping[str, Mapping[int, int]]  # bytes by width, of each source
    sources_of: Mapping[str, Sequence[str]]  # of each layer that derives
    fixed_bytes: int  # independent of the widths

    def saved_bytes(self, widths: Mapping[str, int]) -> int:
        return self.fixed_bytes + sum(costs[widths[source]] for source, costs in self.costs.items())

    def width_of(self, name: str, widths: Mapping[str, int]) -> int:
        if name in widths:
            return widths[name]
        return min((widths[source] for source in self.sources_of.get(name, widths)), default=BIT_WIDTHS[-1])


def groups_by_ops(stored: Mapping[int, Sequence[OpMemory]], names: Collection[str]) -> Groups:
    """Return the groups of named layers, whose bytes add up exactly, from the ops' saved tensors at each width.

    Layers that also derive from another's tensors join its group. Widths at which a group's layers would save other
    tensors than at the largest are left out.
    """
    widest = stored[BIT_WIDTHS[-1]]
    root_of, sources_of = _grouped(widest, names)
    sources_of = {name: list(dict.fromkeys(root_of[each] for each in found)) for name, found in sources_of.items()}
    sources_of |= {name: [root] for name, root in root_of.items() if name != root}
    costs: dict[str, dict[int, int]] = {}
    for root in dict.fromkeys(root_of.values()):
        found = {root, *(name for name, sources in sources_of.items() if root in sources)}
        same = [width for width in BIT_WIDTHS if _ways(stored[width], found) == _ways(widest, found)]
        packs = {name for name, each in root_of.items() if each == root}
        costs[root] = {
            width: sum(row.saved_bytes for row in stored[width] if row.layer in packs and row.how == PACKED)
            for width in same
        }
    fixed = sum(row.saved_bytes for row in widest) - sum(of_width[BIT_WIDTHS[-1]] for of_width in costs.values())
    return Groups(costs=costs, sources_of=sources_of, fixed_bytes=fixed)


def _grouped(ops: Sequence[OpMemory], names: Collection[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the root of each layer that packs, and the sources of each layer that only derives."""
    root_of = {row.layer: row.layer for row in ops if row.how == PACKED and row.layer in names}
    read: dict[str, list[str]] = {}
    for row in ops:
        if row.source in root_of and row.source != row.layer and row.layer in names:
            if row.layer in root_of and row.how in (PACKED, DERIVED):
                old, new = root_of[row.layer], root_of[row.source]
                root_of = {name: new if root == old else root for name, root in root_of.items()}
            elif row.how == DERIVED:
                read.setdefault(row.layer, []).append(row.source)
    return root_of, read


def _ways(ops: Sequence[OpMemory], names: Collection[str]) -> Counter[tuple[str, str, str]]:
    return Counter((row.layer, row.op, row.how) for row in ops if row.layer in names)


def _regions(model: nn.Module) -> dict[str, Any]:
    names = names_of(model)
    return {name: hook for module, name in names.items() for hook in regions_of(module) if hook.origin == POLICY}


def _attach_to_all(model: nn.Module) -> None:
    """Attach a region to each module without one, with its parent's settings and label."""
    names = names_of(model)
    found: dict[str, Any] = {}  # under all names of a module
    for name, module in modules_without_own_region(model):
        around = found.get(name.rpartition(".")[0]) if name else None
        if module in names and around is not None and not has_region(module, POLICY):
            attach_region(module, around.settings, POLICY, label=around.label)
        for hook in regions_of(module):
            if hook.origin == POLICY:
                found[name] = hook


def _by_samples(settings: BackwardSettings, weights: SampleWeights) -> BackwardSettings:
    quantizer = settings.quantizer
    if isinstance(quantizer, UniformQuantizer):
        if quantizer.granularity is not Granularity.BUCKET or quantizer.bucket_size is None:
            return settings
        quantizer = SampleQuantizer(bit_width=quantizer.bit_width, bucket_size=max(8, quantizer.bucket_size))
    return dataclasses.replace(settings, quantizer=dataclasses.replace(quantizer, weights=weights))


def _with_width(settings: BackwardSettings, bit_width: int, is_redrawn: bool) -> BackwardSettings:
    plain: Any = type(settings.quantizer)
    kind = {UniformQuantizer: _RedrawnUniform, SampleQuantizer: _RedrawnSample}[plain] if is_redrawn else plain
    return dataclasses.replace(settings, quantizer=_like(settings.quantizer, kind, bit_width=bit_width))


def _like(quantizer: Any, kind: Any, **changes: Any) -> Any:
    values = {field.name: getattr(quantizer, field.name) for field in dataclasses.fields(quantizer) if field.init}
    return kind(**values | changes)
