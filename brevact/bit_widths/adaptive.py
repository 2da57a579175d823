"""Adapt widths to the sensitivities of layers and samples during training: `Adaptive`, and ActNN's levels."""

from __future__ import annotations

import collections
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from brevact.arguments import check_model, check_state
from brevact.autograd.running import is_distributed
from brevact.bit_widths.budgets import Option, allocate, bytes_of_budget, check_numbers
from brevact.bit_widths.layers import BIT_WIDTHS, Groups, LayerWidths, groups_by_ops
from brevact.injectors import StochBackward2bitPerSample, StochBackward4bit
from brevact.policy.attach import quantize_backward
from brevact.policy.predicates import CONVOLUTIONS
from brevact.policy.presets import Policy
from brevact.policy.rules import has_policy
from brevact.quantizers import SampleWeights
from brevact.quantizers.brief import brief
from brevact.quantizers.checks import check_int, check_number
from brevact.reports.batches import tensors_of
from brevact.reports.gradient_noise import Loss, check_loss, gradients, squared_distance, training_eagerly
from brevact.reports.in_place import ModelBefore, in_place
from brevact.reports.memory import memory_of
from brevact.reports.step import StepLoss
from brevact.tables import text_table

#: Weight of a sample's last norm in its running mean. Source: ActNN, its published code.
_NEW_SHARE = 0.5
#: Most forward passes that may wait for their backward pass.
_MOST_BATCHES = 64


class BatchNorms:
    """Squared norms of the gradients at layers' outputs, per sample of a batch; (N,) int64 indices."""

    def __init__(self, indices: Tensor) -> None:
        self.indices = indices
        self._squares: list[Tensor] = []
        self._rows: set[int] = set()

    def watch(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook: collect gradients of outputs with one row per sample."""
        for x in tensors_of(output):
            if x.requires_grad and x.dim():
                self._rows.add(len(x))
                if len(x) == len(self.indices):
                    x.register_hook(self._add)

    def check_rows(self) -> None:
        """Raise a ValueError if outputs had gradients, but none has one row per sample."""
        if self._rows and len(self.indices) not in self._rows:
            raise ValueError(
                f"indices: got {len(self.indices)}, and the outputs of layers have {sorted(self._rows)} rows; accepted "
                "is one for each sample of the batch, in its order, which dimension 0 of the outputs has"
            )

    def mean(self) -> Tensor | None:
        """Return the (N,) float32 mean over layers, each relative to its mean over the batch; None before backward."""
        if not self._squares:
            return None
        squares_LN = torch.stack([each.cpu() for each in self._squares])
        mean_L1 = squares_LN.mean(1, keepdim=True)
        return torch.where(mean_L1 > 0, squares_LN / mean_L1, squares_LN).sum(0) / (mean_L1 > 0).sum()

    def _add(self, grad: Tensor) -> None:
        self._squares.append(grad.detach().float().flatten(1).square().sum(1))


class SampleNorms:
    """Relative squared gradient norm per sample of a data set, with mean 1 over a batch; 0 for unseen samples.

    Source: ActNN, arXiv:2104.14129, section 4.3: the stale magnitude of the last epoch. Differs: one number per sample
    for all layers, the mean of their squared norms; ActNN has one per layer.

    >>> norms = SampleNorms(4)
    >>> norms.remember(torch.tensor([0, 1]), torch.tensor([1.0, 3.0]))
    >>> norms.of(torch.tensor([0, 1, 2]))
    tensor([1., 3., 2.])
    """

    def __init__(self, samples: int) -> None:
        self.values = torch.zeros(samples)
        self._batches: collections.deque[BatchNorms] = collections.deque(maxlen=_MOST_BATCHES)

    def of(self, indices: Tensor) -> Tensor:
        """Return (N,) float32 squared norms; unseen samples get the mean of the known ones, or 1 if none is known."""
        known = self.values > 0
        mean = self.values.sum() / known.sum() if known.any() else torch.ones(())
        return torch.where(known[indices], self.values[indices], mean)

    def begin(self, indices: Tensor) -> BatchNorms:
        """Return a collector of a batch's norms, which count once its backward pass has run."""
        self._batches.append(BatchNorms(indices))
        return self._batches[-1]

    def finish(self) -> None:
        for batch in list(self._batches):
            squares = batch.mean()
            if squares is not None:
                self.remember(batch.indices, squares)
                self._batches.remove(batch)

    def remember(self, indices: Tensor, squares: Tensor) -> None:
        """Update running means with new (N,) squared norms; skips norms that are 0 or not finite."""
        old = self.values[indices]
        new = torch.where(old > 0, (1 - _NEW_SHARE) * old + _NEW_SHARE * squares, squares)
        self.values[indices] = torch.where(squares.isfinite() & (squares > 0), new, old)

    def reduce(self, device: torch.device) -> None:
        """Average each sample's norm over the ranks that have seen it."""
        parts = torch.stack((self.values, (self.values > 0).float())).to(device)
        distributed.all_reduce(parts)
        total, count = parts.cpu()
        self.values = total / count.clamp(min=1)

    def checked(self, indices: Any) -> Tensor:
        """Return sample indices (a tensor, an array or a sequence) as an int64 tensor on the CPU."""
        accepted = f"accepted are the indices of the batch's samples, integers from 0 to {len(self.values) - 1}"
        found = None
        if not isinstance(indices, str) and (isinstance(indices, Tensor | Sequence) or hasattr(indices, "__array__")):
            with suppress(TypeError, ValueError, RuntimeError):
                found = torch.as_tensor(indices).cpu()
        if found is None or (found.numel() and (found.is_floating_point() or found.dtype is torch.bool)):
            raise TypeError(f"indices: got {brief(indices)} of type {type(indices).__name__}; {accepted}")
        if found.dim() != 1 or not len(found) or found.min() < 0 or found.max() >= len(self.values):
            raise ValueError(f"indices: got {brief(indices)}; {accepted}")
        return found.long()


def sensitivities(
    layers: LayerWidths, groups: Groups, widths: Mapping[str, int], batch: Any, loss: Loss, step: int
) -> list[float]:
    """Measure each group's sensitivity, averaged over ranks: half a squared distance times (2^b - 1)^2."""
    model, found = layers.model, []
    of_layers = {name: groups.width_of(name, widths) for name in layers.base}
    try:
        with in_place(model), training_eagerly(model):
            first = gradients(model, batch, loss, step, step)
            for source, width in widths.items():
                members = {source, *(name for name, sources in groups.sources_of.items() if sources == [source])}
                layers.set(of_layers, redrawn=members)
                variance = squared_distance(gradients(model, batch, loss, step, step), first) / 2
                found.append(variance / expected_noise(1.0, width))
    finally:
        layers.set(of_layers)
    if is_distributed():
        shared = torch.tensor(found, dtype=torch.float32, device=next(model.parameters()).device)
        distributed.all_reduce(shared)
        found = (shared / distributed.get_world_size()).tolist()
    return found


def expected_noise(sensitivity: float, bit_width: int) -> float:
    return sensitivity / (2**bit_width - 1) ** 2


def check_groups(state: Any, own: Mapping[str, Any]) -> None:
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
        check_numbers(ratio=ratio, bit_width=bit_width, every=every, samples=samples)
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

        stored = self._layers.stored(run)
        self._groups = groups_by_ops(stored, self._layers.base)
        costs = self._groups.costs
        if not costs:
            raise ValueError(
                "batch: no layer packs a tensor of it; accepted is a batch of the size that trains, since small "
                "tensors are kept as they are (min_numel=)"
            )
        plain = 0 if ratio is None else memory_of(self._model, run, batch).plain_bytes
        #: Most bytes that a training step may save for a batch like the measured one.
        uniform = {width: sum(row.saved_bytes for row in rows) for width, rows in stored.items()}
        least = self._groups.saved_bytes({source: min(of_width) for source, of_width in costs.items()})
        self.budget_bytes = bytes_of_budget(uniform, least, plain, ratio, bit_width)
        self._sensitivities: list[float] = [of_width[BIT_WIDTHS[-1]] for of_width in costs.values()]
        self._widths = self._allocate()
        self._sensitivities = self._measured(batch)
        if not all(map(math.isfinite, self._sensitivities)):
            raise ValueError(
                "loss: the gradient of the batch is not finite; sensitivities are measured where gradients are (a "
                "smaller init_scale of the GradScaler, another batch)"
            )
        self._widths = self._allocate()

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
            self._widths = self._allocate()

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
        check_groups(state, self.state_dict())
        costs = self._groups.costs
        self._steps, self._widths = state["steps"], dict(zip(costs, state["bit_widths"], strict=True))
        self._sensitivities = [float(each) for each in state["sensitivities"]]
        if self._norms is not None:
            self._norms.values = state["samples"].to("cpu", copy=True).float()
        if all(self._widths[source] in costs[source] for source in costs) and self.saved_bytes <= self.budget_bytes:
            self._layers.set(self.bit_widths)
        else:
            self._widths = self._allocate()

    def __str__(self) -> str:
        rows = [
            (source, str(width), str(self._groups.costs[source][width]), f"{expected_noise(sensitivity, width):.3g}")
            for (source, width), sensitivity in zip(self._widths.items(), self._sensitivities, strict=True)
        ]
        total = ("total", "", str(self.saved_bytes), f"{sum(float(row[-1]) for row in rows):.3g}")
        return text_table(("layers", "bit_width", "bytes", "noise"), rows, total, numbers=3)

    def _measured(self, batch: Any) -> list[float]:
        return sensitivities(self._layers, self._groups, self._widths, batch, self._loss, self._steps)

    def _allocate(self) -> dict[str, int]:
        groups = self._groups
        items = [
            [Option(cost, expected_noise(sensitivity, width), width) for width, cost in costs.items()]
            for costs, sensitivity in zip(groups.costs.values(), self._sensitivities, strict=True)
        ]
        chosen = allocate(items, self.budget_bytes - groups.fixed_bytes)
        widths = {source: each.bit_width for source, each in zip(groups.costs, chosen, strict=True)}
        _log.info("step %d: bit widths %s", self._steps, widths)
        self._layers.set({name: groups.width_of(name, widths) for name in self._layers.base})
        return widths


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
        ActnnLevel("L1", Policy({CONVOLUTIONS: _4_BITS, "*": None})),
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
