"""Bit widths of a model's layers: which must be equal, their costs, and how to set them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from brevact.autograd import BackwardSettings, attach_region, has_region
from brevact.autograd.hooks import regions_of
from brevact.autograd.storage_report import DERIVED, PACKED
from brevact.injectors.proxies import modules_without_own_region, names_of
from brevact.policy.rules import POLICY
from brevact.quantizers import Granularity, PackedActivation, Rounding, SampleQuantizer, SampleWeights, UniformQuantizer
from brevact.quantizers.reference import moved_seed, seed_value
from brevact.reports.in_place import ModelBefore, in_place
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
    """The regions of a model's policy whose widths may change, by module name.

    Each module gets its own region, with the settings of the region around it. Settings of one kind and width are one
    object, so that a run makes no more of them than there are widths. With `weights`, bucketed quantizers have a width
    per sample, with these factors.
    """

    def __init__(self, model: nn.Module, weights: SampleWeights | None = None) -> None:
        self.model = model
        self._settings: dict[tuple[BackwardSettings, int, bool], BackwardSettings] = {}
        self.base: dict[str, BackwardSettings] = {}
        _attach_to_all(model)
        for name, hook in _regions(model).items():
            if has_width(hook.settings):
                self.base[name] = hook.settings if weights is None else _by_samples(hook.settings, weights)

    def set(self, widths: Mapping[str, int], redrawn: Collection[str] = ()) -> None:
        for name, hook in _regions(self.model).items():
            if name in widths and name in self.base:
                key = self.base[name], widths[name], name in redrawn
                if key not in self._settings:
                    self._settings[key] = _with_width(*key)
                hook.settings = self._settings[key]

    def stored(self, run: Callable[[nn.Module], Any], bit_width: int) -> tuple[OpMemory, ...]:
        """Measure how each op saves its tensors if all layers have one width."""
        with in_place(self.model):
            self.set(dict.fromkeys(self.base, bit_width))
            return stored_ops(self.model, run)


@contextmanager
def kept_on_error(model: nn.Module) -> Iterator[None]:
    """Restore a model, with its policy or without one, if the block fails."""
    before = ModelBefore(model)
    try:
        yield
    except BaseException:
        before.restore()
        raise


class Group(NamedTuple):
    """Layers with one width, since they pack the same tensors or derive from each other's."""

    sources: tuple[str, ...]
    costs: Mapping[int, int]


class Plan(NamedTuple):
    """Layers, groups and bytes from which to choose widths.

    Args:
        layers: layers to set.
        groups: groups of layers with one width.
        groups_of: indices of the groups whose least width a layer gets: its own group, or for a layer that packs
            nothing, the groups from which it derives, or all. With more bits, it would pack its own tensor.
        uniform_bytes: total bytes, by the width of all layers.
    """

    layers: LayerWidths
    groups: tuple[Group, ...]
    groups_of: Mapping[str, tuple[int, ...]]
    uniform_bytes: Mapping[int, int]

    def of_layers(self, widths: Sequence[int]) -> dict[str, int]:
        return {name: min(widths[number] for number in numbers) for name, numbers in self.groups_of.items()}

    def set(self, widths: Sequence[int], redrawn: Collection[str] = ()) -> None:
        self.layers.set(self.of_layers(widths), redrawn)

    @property
    def fixed_bytes(self) -> int:
        """Bytes that are independent of the widths."""
        last = BIT_WIDTHS[-1]
        return self.uniform_bytes[last] - sum(group.costs[last] for group in self.groups)

    def bytes_of(self, widths: Sequence[int]) -> int:
        """Return the bytes of a training step with these widths of groups."""
        return self.fixed_bytes + sum(group.costs[w] for group, w in zip(self.groups, widths, strict=True))


def plan_of(layers: LayerWidths, run: Callable[[nn.Module], Any]) -> Plan:
    """Measure the bytes at each of the eight widths, by one forward pass each, which ``run`` makes."""
    stored = {width: layers.stored(run, width) for width in BIT_WIDTHS}
    widest = stored[BIT_WIDTHS[-1]]
    group_of, read = _grouped(widest, layers.base)
    members: dict[str, list[str]] = {}
    for name, root in group_of.items():
        members.setdefault(root, []).append(name)
    numbers = {root: number for number, root in enumerate(members)}
    found = {name: tuple(numbers[group_of[source]] for source in sources) for name, sources in read.items()}
    found |= {name: (numbers[root],) for name, root in group_of.items()}
    groups = []
    for number, sources in enumerate(members.values()):
        names = [name for name, of in found.items() if number in of]
        same = [width for width in BIT_WIDTHS if _ways(stored[width], names) == _ways(widest, names)]
        packed = {width: [row for row in stored[width] if row.layer in sources and row.how == PACKED] for width in same}
        costs = {width: sum(row.saved_bytes for row in rows) for width, rows in packed.items()}
        groups.append(Group(tuple(sources), costs))
    groups_of = {name: found.get(name, tuple(range(len(groups)))) for name in layers.base}
    totals = {width: sum(row.saved_bytes for row in rows) for width, rows in stored.items()}
    return Plan(layers, tuple(groups), groups_of, totals)


def _grouped(ops: Sequence[OpMemory], names: Collection[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return a representative of the group for each layer that packs, and the sources of each other layer."""
    group_of = {row.layer: row.layer for row in ops if row.how == PACKED and row.layer in names}
    read: dict[str, list[str]] = {}
    for row in ops:
        if row.source in group_of and row.source != row.layer and row.layer in names:
            if row.layer in group_of and row.how in (PACKED, DERIVED):
                old, new = group_of[row.layer], group_of[row.source]
                group_of = {name: new if of == old else of for name, of in group_of.items()}
            elif row.how == DERIVED:
                read.setdefault(row.layer, []).append(row.source)
    return group_of, read


def _ways(ops: Sequence[OpMemory], names: Collection[str]) -> Counter[tuple[str, str, str]]:
    """Count how often each op of these layers saves a tensor in each way."""
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
