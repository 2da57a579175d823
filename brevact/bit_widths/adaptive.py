"""Adapt widths to the sensitivities of layers and samples during training: `Adaptive`, and ActNN's levels."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from brevact.arguments import check_model, check_state
from brevact.autograd import BackwardSettings, attach_region, has_region
from brevact.autograd.region.module_hooks import regions_of
from brevact.autograd.region.running import is_distributed
from brevact.autograd.saving.storage_report import DERIVED, PACKED
from brevact.bit_widths.budgets import BIT_WIDTHS, Groups, Option, allocate, bytes_of_budget
from brevact.bit_widths.samples import SampleNorms
from brevact.injectors import StochBackward2bitPerSample, StochBackward4bit
from brevact.injectors.proxies import modules_without_own_region, names_of
from brevact.policy.attach import quantize_backward
from brevact.policy.predicates import CONVS
from brevact.policy.presets import Policy
from brevact.policy.rules import POLICY, has_policy
from brevact.quantizers import Granularity, PackedActivation, Rounding, SampleQuantizer, SampleWeights, UniformQuantizer
from brevact.quantizers.brief import brief
from brevact.quantizers.checks import check_int, check_number
from brevact.quantizers.reference import moved_seed, seed_value
from brevact.reports.gradient_noise import Loss, check_loss, gradients, squared_distance, training
from brevact.reports.in_place import ModelBefore, in_place, uncompiled
from brevact.reports.memory import memory_of, stored_ops
from brevact.reports.memory_table import OpMemory
from brevact.reports.step import StepLoss
from brevact.tables import text_table

_SHIFT = 0x9FB21C651E98DF25  # shifts seeds for another draw


class _Redrawn:
    """A quantizer that differs from its plain kind only in the random bits for the same seed."""

    plain: type

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        return _like(self, self.plain).quantize(x, moved_seed(seed_value(seed, x.device), _SHIFT))


class _RedrawnUniform(_Redrawn, UniformQuantizer):
    plain = UniformQuantizer


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
        self.base: dict[str, BackwardSettings] = {}
        _attach_to_all(model)
        for name, hook in _regions(model).items():
            if has_width(hook.settings):
                self.base[name] = hook.settings if weights is None else _by_samples(hook.settings, weights)

    def set(self, widths: Mapping[str, int], redrawn: Collection[str] = ()) -> None:
        """Set widths by name; `redrawn` layers get other random bits for the same seeds."""
        for name, hook in _regions(self.model).items():
            if name in widths and name in self.base:
                hook.settings = _with_width(self.base[name], widths[name], name in redrawn)


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


@functools.lru_cache(maxsize=1024)  # equal settings are one object
def _with_width(settings: BackwardSettings, bit_width: int, is_redrawn: bool) -> BackwardSettings:
    plain: Any = type(settings.quantizer)
    kind = {UniformQuantizer: _RedrawnUniform, SampleQuantizer: _RedrawnSample}[plain] if is_redrawn else plain
    return dataclasses.replace(settings, quantizer=_like(settings.quantizer, kind, bit_width=bit_width))


def _like(quantizer: Any, kind: Any, **changes: Any) -> Any:
    values = {field.name: getattr(quantizer, field.name) for field in dataclasses.fields(quantizer) if field.init}
    return kind(**values | changes)


def expected_noise(sensitivity: float, bit_width: int) -> float:
    return sensitivity / (2**bit_width - 1) ** 2


_log = logging.getLogger(__name__)
#: Weight of a layer's old sensitivity in its running mean.
_OLD_SHARE = 0.5


class Adaptive:
    """Gives each layer 1 to 8 bits within a budget of bytes, and moves bits between layers during training.

    A layer's sensitivity is the variance that its rounding adds to the gradient, times (2^b - 1)^2, measured as half
    the squared distance of two gradients of one batch that differ only in that layer's random bits. Widths b minimize
    sum_l sensitivity_l / (2^b_l - 1)^2 within the budget. Layers that share or derive from a packed tensor have one
    width; a chain with smooth functions has at least `derive_min_bits` bits, below which each layer would save its own
    tensor.

    A measurement takes one forward and backward pass per group of layers, and one more: with 40 groups and
    ``every=1000``, 4 % of the training time. It runs in the constructor and in every ``every``-th step, at the current
    widths, so that it needs as much memory as training plus two gradients of the weights. The constructor takes 10 more
    forward passes, one of them at full precision: if that does not fit, use a smaller batch and a budget as a ratio.

    With ``samples`` each sample of a batch also has its own width (`SampleQuantizer`): more bits for samples with
    larger gradients, at the layers' outputs, in the last epoch; a new sample counts as the mean. The model then runs
    inside ``with adaptive.batch(indices)``.

    Source: ActNN, arXiv:2104.14129, sections 4.2 and 4.3. Differs: ActNN has a closed form of the sensitivity per kind
    of layer, which needs no pass and counts only the nearest weight; the measurement counts all weights. Budgets are in
    bytes, including metadata and masks.

    >>> import torch, brevact
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    >>> model = brevact.quantize_backward(model, brevact.StochBackward4bit)
    >>> batches = torch.randn(3, 128, 64).unbind()
    >>> loss = lambda model, batch: model(batch).square().mean()
    >>> adaptive = brevact.Adaptive(model, batches[0], loss, bit_width=2.5, every=2)
    >>> for batch in batches:
    ...     with brevact.backward_quant(model):
    ...         value = loss(model, batch)
    ...     value.backward()
    ...     adaptive.step(batch)  # beside optimizer.step()
    >>> adaptive.saved_bytes <= adaptive.budget_bytes
    True

    Layers with their own ``act_quant=``, quantizers other than ``StochBackward{1..8}bit``, ``DitherBackward{1..8}bit``
    and ``StochBackward{2,4}bitPerSample``, and rules for torch functions keep their settings. In a distributed run,
    ranks average their measurements, and so agree. ``torch.compile`` recompiles when widths change.

    Args:
        model: module; without a policy it gets :data:`brevact.DEFAULT`. It may be wrapped in DDP.
        batch: passed to ``loss``; like the training batches, since bytes are measured on it.
        loss: takes the model and a batch, and returns a scalar; called in the region of the model.
        ratio: how many times fewer bytes a training step saves than at full precision.
        bit_width: alternatively, the bytes of all layers at this width, from 1 to 8; interpolated between integers.
        every: steps between measurements.
        samples: number of samples in the data set; None for widths per layer only.

    Raises:
        TypeError: ``model`` is not a module, or an argument has the wrong type.
        ValueError: not exactly one of ``ratio`` and ``bit_width`` is given, a number is out of range, no layer's width
            may change, or the budget is impossible.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Loss,
        *,
        ratio: float | None = None,
        bit_width: float | None = None,
        every: int = 500,
        samples: int | None = None,
    ) -> None:
        check_model(model, "Adaptive(model, batch, loss, ratio=24)", batch)
        if (ratio is None) is (bit_width is None):
            raise ValueError(
                f"ratio={brief(ratio)}, bit_width={brief(bit_width)}; accepted is exactly one of them: ratio=24 for 24 "
                "times less than at full precision, or bit_width=2 for the bytes of that width"
            )
        check_int("every", every, 1)
        if samples is not None:
            check_int("samples", samples, 1)
        if ratio is not None:
            check_number("ratio", ratio, 1)
        if bit_width is not None:
            check_number("bit_width", bit_width, BIT_WIDTHS[0], BIT_WIDTHS[-1])
        check_loss(loss)
        self._model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._loss, self._every, self._steps = StepLoss(loss), every, 0
        before = ModelBefore(self._model)
        try:
            self._start(batch, ratio, bit_width, samples)
        except BaseException:
            before.restore()
            raise

    def _start(self, batch: Any, ratio: float | None, bit_width: float | None, samples: int | None) -> None:
        if not has_policy(self._model):
            quantize_backward(self._model)
        self._norms = None if samples is None else SampleNorms(samples)
        self._weights = None if samples is None else SampleWeights()
        self._layers = LayerWidths(self._model, self._weights)
        if not self._layers.base:
            raise ValueError(
                "model: no layer has a width that may change; accepted are StochBackward1bit to StochBackward8bit and "
                "DitherBackward1bit to DitherBackward8bit: "
                "brevact.quantize_backward(model, brevact.StochBackward2bit)"
            )

        def run(model: nn.Module) -> Any:
            return self._loss(model, batch)

        stored = {}  # how each op saves its tensors if all layers have one width
        with in_place(self._model), uncompiled():
            for width in BIT_WIDTHS:
                self._layers.set(dict.fromkeys(self._layers.base, width))
                stored[width] = stored_ops(self._model, run)
        self._groups = groups_by_ops(stored, self._layers.base)
        costs = self._groups.costs
        if not costs:
            raise ValueError(
                "batch: no layer packs a tensor of it; accepted is a batch of the size that trains, since small "
                "tensors are kept as they are (min_numel=)"
            )
        plain = 0 if ratio is None else memory_of(self._model, run).plain_bytes
        #: Most bytes that a training step may save for a batch like the measured one.
        uniform = {width: sum(row.saved_bytes for row in rows) for width, rows in stored.items()}
        least = self._groups.saved_bytes({source: min(of_width) for source, of_width in costs.items()})
        self.budget_bytes = bytes_of_budget(uniform, least, plain, ratio, bit_width)
        self._sensitivities: list[float] = [of_width[BIT_WIDTHS[-1]] for of_width in costs.values()]
        self._allocate()
        self._sensitivities = self._measured(batch)
        if not all(map(math.isfinite, self._sensitivities)):
            raise ValueError(
                "loss: the gradient of the batch is not finite; sensitivities are measured where gradients are (a "
                "smaller init_scale of the GradScaler, another batch)"
            )
        self._allocate()

    @property
    def saved_bytes(self) -> int:
        """Bytes that a training step saves for a batch like the measured one."""
        return self._groups.saved_bytes(self._widths)

    @property
    def bit_widths(self) -> dict[str, int]:
        """Current widths by module name."""
        return {name: self._groups.width_of(name, self._widths) for name in self._layers.base}

    def step(self, batch: Any) -> None:
        """Advance by one training step, and measure every ``every`` steps.

        Args:
            batch: batch of this step; the parameters' gradients are unchanged. Sensitivities are kept if gradients are
                not finite, as in steps that a GradScaler skips.
        """
        self._steps += 1
        if self._norms is not None:
            self._norms.finish()
        if self._steps % self._every == 0:
            new = self._measured(batch)
            self._sensitivities = [
                _OLD_SHARE * a + (1 - _OLD_SHARE) * b if math.isfinite(b) else a
                for a, b in zip(self._sensitivities, new, strict=True)
            ]
            if self._norms is not None and is_distributed():
                self._norms.reduce(next(self._model.parameters()).device)
            self._allocate()

    @contextmanager
    def batch(self, indices: Any) -> Iterator[None]:
        """Run the forward pass of a batch of these samples in the block; its backward pass may run after the block.

        Args:
            indices: (N,) integers, in the order of the batch; a sample has the same index in each epoch.

        Raises:
            TypeError: ``indices`` are not integers.
            ValueError: ``indices`` are out of range or not one per sample, or ``samples`` was not given.
        """
        if self._norms is None or self._weights is None:
            raise ValueError("batch(indices): the widths are those of layers alone; make it with samples=len(dataset)")
        self._norms.finish()
        found = self._norms.checked(indices)
        norms, modules = self._norms.begin(found), dict(self._model.named_modules())
        handles = [modules[source].register_forward_hook(norms.watch) for source in self._groups.costs]
        self._weights.values = self._norms.of(found)
        try:
            yield
            norms.check_rows()
        finally:
            self._weights.values = None
            for handle in handles:
                handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next steps depend on, for a checkpoint."""
        if self._norms is not None:
            self._norms.finish()
        return {
            "steps": self._steps,
            "layers": list(self._groups.costs),
            "bit_widths": list(self._widths.values()),
            "sensitivities": list(self._sensitivities),
            "samples": None if self._norms is None else self._norms.values.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint, with this object's budget: widths that exceed it are chosen again.

        Args:
            state: result of :meth:`state_dict`.

        Raises:
            TypeError: ``state`` is not a mapping.
            ValueError: ``state`` is of other layers or another number of samples, or a number is out of range.
        """
        own = self.state_dict()
        check_state(state, own)
        if state["layers"] != own["layers"]:
            raise ValueError(
                f"state: its layers are {brief(state['layers'])}, those of this model {brief(own['layers'])}; make the "
                "object with the model, the policy and a batch of the size of the checkpoint's run"
            )
        for name in ("bit_widths", "sensitivities"):
            if len(state[name]) != len(own[name]):
                raise ValueError(f"state: got {len(state[name])} {name}; accepted are {len(own[name])}, one a group")
        check_int("state: steps", state["steps"], 0)
        for width, sensitivity in zip(state["bit_widths"], state["sensitivities"], strict=True):
            check_int("state: bit_widths", width, BIT_WIDTHS[0], BIT_WIDTHS[-1])
            check_number("state: sensitivities", sensitivity, 0)
        counts = [None if each is None else len(each) for each in (state["samples"], own["samples"])]
        if counts[0] != counts[1]:
            raise ValueError(f"state: samples={counts[0]}; accepted is {counts[1]}, with which this object was made")
        costs = self._groups.costs
        self._steps, self._widths = state["steps"], dict(zip(costs, state["bit_widths"], strict=True))
        self._sensitivities = [float(each) for each in state["sensitivities"]]
        if self._norms is not None:
            self._norms.values = state["samples"].to("cpu", copy=True).float()
        if all(self._widths[source] in costs[source] for source in costs) and self.saved_bytes <= self.budget_bytes:
            self._layers.set(self.bit_widths)
        else:
            self._allocate()

    def __str__(self) -> str:
        rows = [
            (source, str(width), str(self._groups.costs[source][width]), f"{expected_noise(sensitivity, width):.3g}")
            for (source, width), sensitivity in zip(self._widths.items(), self._sensitivities, strict=True)
        ]
        total = ("total", "", str(self.saved_bytes), f"{sum(float(row[-1]) for row in rows):.3g}")
        return text_table(("layers", "bit_width", "bytes", "noise"), rows, total, numbers=3)

    def _measured(self, batch: Any) -> list[float]:
        """Measure each group's sensitivity, averaged over ranks: half a squared distance times (2^b - 1)^2."""
        model, groups, of_layers, found = self._model, self._groups, self.bit_widths, []
        arguments = model, batch, self._loss, self._steps, self._steps
        try:
            with in_place(model), uncompiled(), training(model):
                first = gradients(*arguments)
                for source, width in self._widths.items():
                    members = {source, *(name for name, sources in groups.sources_of.items() if sources == [source])}
                    self._layers.set(of_layers, redrawn=members)
                    variance = squared_distance(gradients(*arguments), first) / 2
                    found.append(variance / expected_noise(1.0, width))
        finally:
            self._layers.set(of_layers)
        if is_distributed():
            shared = torch.tensor(found, dtype=torch.float32, device=next(model.parameters()).device)
            distributed.all_reduce(shared)
            found = (shared / distributed.get_world_size()).tolist()
        return found

    def _allocate(self) -> None:
        """Choose widths of least noise within the budget, and set them."""
        groups = self._groups
        items = [
            [Option(cost, expected_noise(sensitivity, width), width) for width, cost in costs.items()]
            for costs, sensitivity in zip(groups.costs.values(), self._sensitivities, strict=True)
        ]
        chosen = allocate(items, self.budget_bytes - groups.fixed_bytes)
        self._widths = {source: each.bit_width for source, each in zip(groups.costs, chosen, strict=True)}
        _log.info("step %d: bit widths %s", self._steps, self._widths)
        self._layers.set(self.bit_widths)


@dataclass(frozen=True)
class ActnnLevel:
    """One of ActNN's levels: higher ones save fewer bytes, and take more time.

    Source: ActNN, arXiv:2104.14129, section 5.2 and table 2, and its published code. Differs: layers of every kind
    pack, not those of a list; L1 packs only convolutions, as in the paper (the code leaves norms unpacked); widths
    follow a measured sensitivity (`Adaptive`); swapping moves all tensors that autograd saves, including weights.

    >>> import torch, brevact
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    >>> level, x = brevact.actnn_level("L4"), torch.randn(256, 64)
    >>> loss = lambda model, batch: model(batch).square().mean()
    >>> adaptive = level.quantize(model, x, loss, samples=1000)
    >>> with level.saving(), adaptive.batch(range(256)), brevact.backward_quant(model):
    ...     value = loss(model, x)
    >>> value.backward()
    >>> adaptive.step(x)

    Args:
        name: "L0" to "L5".
        policy: policy of the layers; each packs its own tensors, in buckets of 256 elements, as in ActNN.
        bit_width: byte budget of layers and samples, as the bytes of this width everywhere. None for fixed widths.
        swaps: whether saved tensors move to host memory.
    """

    name: str
    policy: Policy
    bit_width: float | None = None
    swaps: bool = False

    def quantize(
        self, model: nn.Module, batch: Any, loss: Loss, *, every: int = 500, samples: int | None = None
    ) -> Adaptive | None:
        """Attach the level's policy to a model, in place.

        Args:
            model: module without a policy.
            batch: see :class:`Adaptive`.
            loss: see :class:`Adaptive`.
            every: see :class:`Adaptive`.
            samples: see :class:`Adaptive`.

        Returns:
            The object that adapts the widths; None for L0, L1 and L2.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: the model has a policy, or an argument is out of range.
        """
        quantize_backward(model, self.policy)
        if self.bit_width is None:
            return None
        return Adaptive(model, batch, loss, bit_width=self.bit_width, every=every, samples=samples)

    def saving(self) -> AbstractContextManager[Any]:
        """Return a context for forward passes: at L4 and L5 saved tensors move to host memory, pinned with CUDA."""
        if self.swaps:
            return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())
        return nullcontext()


_4_BITS = StochBackward4bit.let(bucket_size=256, derive_min_bits=0)
_2_BITS = Policy({"*": StochBackward2bitPerSample.let(bucket_size=256, derive_min_bits=0)})

_LEVELS = {
    level.name: level
    for level in (
        ActnnLevel("L0", Policy({"*": None})),
        ActnnLevel("L1", Policy({CONVS: _4_BITS, "*": None})),
        ActnnLevel("L2", Policy({"*": _4_BITS})),
        ActnnLevel("L3", _2_BITS, 2),
        ActnnLevel("L4", _2_BITS, 2, swaps=True),
        ActnnLevel("L5", _2_BITS, 2, swaps=True),
    )
}


def actnn_level(name: str) -> ActnnLevel:
    """Return one of ActNN's optimization levels.

    | level | here |
    |---|---|
    | L0 | full precision |
    | L1 | convolutions at 4 bits |
    | L2 | all layers at 4 bits |
    | L3 | 2 bits on average over layers and samples, by their sensitivities |
    | L4 | L3, and saved tensors move to host memory |
    | L5 | L4, with an allocator that joins free segments: start with `PYTORCH_ALLOC_CONF=expandable_segments:True` |

    >>> actnn_level("L2").policy.rules.keys()
    dict_keys(['*'])

    Args:
        name: "L0" to "L5".

    Returns:
        The level.

    Raises:
        ValueError: there is no such level.
    """
    if not isinstance(name, str) or name not in _LEVELS:
        raise ValueError(f"name={brief(name)}; accepted are {', '.join(_LEVELS)}")
    return _LEVELS[name]
