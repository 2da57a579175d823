"""Measure the noise and bias of backward quantization in gradients, per layer: `gradient_report`."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from brevact.arguments import check_model
from brevact.autograd import BackwardSettings, attach_region, current_region, detach_region, regions_disabled
from brevact.autograd.region.module_hooks import regions_of, takes_hooks
from brevact.injectors import BackwardQuantProxy
from brevact.injectors.proxies import names_of
from brevact.policy.attach import attach_policy
from brevact.policy.rules import POLICY
from brevact.private_names.of_torch import DisableTorchFunction
from brevact.quantizers import Rounding, UniformQuantizer
from brevact.quantizers.brief import brief
from brevact.quantizers.checks import check_int
from brevact.quantizers.traits import traits_of
from brevact.reports.batches import without_surroundings
from brevact.reports.gradient_noise import (
    Estimate,
    Loss,
    check_batches,
    check_loss,
    exact_gradients,
    gradient_noise,
    in_units,
    noise_of_batches,
)
from brevact.reports.in_place import holds_graphs, in_place, uncompiled
from brevact.reports.memory import OF_GRAPHS, memory_of
from brevact.reports.memory_table import Chain, chains_of
from brevact.reports.step import StepLoss
from brevact.tables import MIB, MOST_BARS, plot_bars, progress_bar, size_text, text_table, write_csv

#: Least ratio of a heavy tail.
HEAVY = 30.0


def tail_of(x: Tensor) -> float:
    """Return the largest root mean square of a channel, the last dimension, over the median one; 1 for zeros."""
    squares = x.detach().double().flatten(0, -2).square().mean(0)
    median = squares.median()
    return float((squares.max() / median).sqrt()) if median > 0 else 1.0


@contextmanager
def tails_of_inputs(model: nn.Module, run: Any = None) -> Iterator[dict[str, float]]:
    """Yield a dictionary that gets tails of eager modules' first inputs, if they are of floats, with channels last."""
    names, found = names_of(model), dict[str, float]()

    def enter(module: nn.Module, args: Any) -> None:
        x = args[0] if args and module in names else None
        if torch.compiler.is_compiling() or type(x) is not Tensor or x.layout is not torch.strided:
            return
        if x.is_floating_point() and x.dim() in (2, 3) and x.numel() and not (x.is_nested or x.is_meta):
            with DisableTorchFunction(), torch.no_grad():
                found[names[module]] = max(tail_of(x), found.get(names[module], 0.0))

    hook: Any = nullcontext() if holds_graphs(model, run) else register_module_forward_pre_hook(enter)
    with hook:
        yield found


def note_on(noise_and_tails: Mapping[str, tuple[float, float]]) -> str:
    """Return a sentence on the layers whose tails are heavy, with the rule that cures the noisiest; "" for none."""
    heavy = {layer: each for layer, each in noise_and_tails.items() if each[1] >= HEAVY}
    if not heavy:
        return ""
    worst = max(heavy, key=lambda layer: (not math.isnan(heavy[layer][0]), heavy[layer]))
    names = ", ".join(layer or "(model)" for layer in heavy)
    return (
        f"Heavy tails: channels of the inputs of {names} are up to {max(tail for _, tail in heavy.values()):.0f} times "
        f"the median one. Where that is noise, 6 bits cure it: "
        f"brevact.DEFAULT.let({{{worst!r}: brevact.DitherBackward6bit}})"
    )


#: Bits of all other layers: their variance is 1/289 of that at 4 bits.
FINE_BIT_WIDTH = 8
#: `nominal` of a mixture whose size is drawn: equals no reader's.
_OF_ONE_SIZE = object()


class Isolation:
    """Lets some layers store under the model's policy, and all others the same tensors at 8 bits."""

    def __init__(self, model: nn.Module) -> None:
        self._regions: list[tuple[Any, nn.Module, BackwardSettings | None, BackwardSettings | None]] = []
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._enter(model, None, {*names_of(model)})

    def _enter(self, module: nn.Module, around: BackwardSettings | None, left: set[nn.Module]) -> None:
        """Give each module its own region; one without inherits the settings of the region around it."""
        if module not in left or isinstance(module, BackwardQuantProxy):
            return
        left.remove(module)
        if not regions_of(module) and around is not None and takes_hooks(module):
            attach_region(module, around, POLICY)
        for hook in regions_of(module):
            self._regions.append((hook, module, hook.settings, fine(hook.settings)))
            around = hook.settings  # the last one decides
        for child in module.children():
            self._enter(child, around, left)

    def has_region(self, layer: str) -> bool:
        module = self._modules[layer]
        return any(each is module for _, each, _, _ in self._regions)

    def restrict_to(self, layers: Collection[str]) -> None:
        """Store under the policy in these layers, not in their children, and at 8 bits in all others."""
        chosen = {self._modules[layer] for layer in layers}
        for hook, module, settings, finer in self._regions:
            hook.settings = settings if module in chosen else finer


@dataclass(frozen=True, kw_only=True)
class StandIn(UniformQuantizer):
    """Stores another quantizer's tensors at 8 bits: derivations, and their bits, stay the same."""

    nominal: Any = None


@dataclass(frozen=True, kw_only=True)
class _MixtureStandIn(StandIn):
    """Replaces a mixture, which draws a quantizer for each tensor."""

    draws_size = True

    def with_drawn_size(self, numel: int, host_seed: int) -> StandIn:
        return StandIn(bit_width=self.bit_width, rounding=self.rounding, nominal=_OF_ONE_SIZE)


def _finer(quantizer: Any) -> Any:
    """Return the 8-bit replacement of a quantizer; a plain one for a module, whose tensors no cache may hold."""
    form: dict[str, Any] = {"rounding": Rounding.STOCHASTIC if quantizer.is_stochastic else Rounding.NEAREST}
    if isinstance(quantizer, nn.Module):
        return UniformQuantizer(bit_width=FINE_BIT_WIDTH, **form)
    if isinstance(quantizer, UniformQuantizer):
        form = {field.name: getattr(quantizer, field.name) for field in dataclasses.fields(quantizer) if field.init}
    kind = _MixtureStandIn if traits_of(quantizer).draws_size else StandIn
    return kind(**(form | {"bit_width": FINE_BIT_WIDTH, "nominal": quantizer}))


def fine(settings: BackwardSettings | None) -> BackwardSettings | None:
    """Return settings that store the same tensors at 8 bits, evenly spaced; exact settings and None are unchanged."""
    if settings is None:
        return None
    quantizer = settings.quantizer
    if quantizer is not None and not (settings.is_exact or settings.is_lossless or settings.keeps_elements):
        quantizer = _finer(quantizer)
    return dataclasses.replace(
        settings,
        quantizer=quantizer,
        residual_bit_width=max(FINE_BIT_WIDTH, settings.residual_bit_width),
        score_bit_width=FINE_BIT_WIDTH,
        of_functions=tuple((name, fine(each)) for name, each in settings.of_functions),
    )


@dataclass(frozen=True)
class LayerNoise:
    """Noise and bias that one layer's packed tensors add to the gradients, including those of earlier layers.

    Noise, bias and their standard errors are in the unit of the report; NaN if not measured.

    Args:
        layer: qualified name of the module that packs; tensors of a container's own forward belong to the container.
        kind: class of the module.
        readers: layers that derive their tensors from these, whose errors count here; a layer that derives from several
            layers counts in the row of each.
        bit_widths: distinct bit widths of the codes, without quantizers whose width is unknown.
        saved_bytes: bytes of the packed tensors.
        noise: variance of the gradients with everything else at 8 bits, minus the variance with everything at 8 bits.
        noise_error: standard error of ``noise``.
        bias: squared norm of the mean error.
        bias_error: standard error of ``bias``.
        tail: largest root mean square of a channel of the layer's input over the median one, in the first batch; NaN if
            the input has no channels in its last dimension.
    """

    layer: str
    kind: str
    readers: tuple[str, ...]
    bit_widths: tuple[int, ...]
    saved_bytes: int
    noise: float = math.nan
    noise_error: float = math.nan
    bias: float = math.nan
    bias_error: float = math.nan
    tail: float = math.nan


@dataclass(frozen=True)
class GradientReport:
    """Noise and bias that backward quantization adds to the gradients of a model.

    >>> row = LayerNoise("norm", "BatchNorm2d", ("act", "conv"), (4,), 2**20, 0.05, 0.01, 0.001, 0.001)
    >>> print(GradientReport((row,), 0.05, 0.01, 0.001, 0.001, 2**20, 2**24, 1.0, False, 4, 8, 53))
    layer  kind         readers  bits     stored              noise              bias²
    ----------------------------------------------------------------------------------
    norm   BatchNorm2d        2     4  1.000 MiB  0.05000 ± 0.01000  0.00100 ± 0.00100
    ----------------------------------------------------------------------------------
    total                              1.000 MiB  0.05000 ± 0.01000  0.00100 ± 0.00100
    <BLANKLINE>
    16.0 times less is kept for backward.
    Unit of noise and bias²: variance of the gradient between the 4 batches.

    Args:
        rows: one row per layer that packs tensors, in the order of the forward pass.
        noise: variance of the gradient over the quantizers' seeds, summed over weights, in the unit.
        noise_error: standard error of ``noise``; NaN for one batch.
        bias: squared norm of the mean error of the gradient, in the unit; an unbiased estimate, which may be negative.
        bias_error: standard error of ``bias``; NaN for one batch.
        saved_bytes: bytes saved for backward, each storage once, including the loss.
        plain_bytes: bytes saved without backward quantization.
        unit: variance of the exact gradient between batches, summed over weights; with one batch, the squared norm of
            its gradient.
        is_relative: whether ``unit`` is that squared norm.
        batches: number of batches.
        draws: seeds per batch.
        passes: forward and backward passes that the report took.
        notes: sentences on how to read the report.
    """

    rows: tuple[LayerNoise, ...]
    noise: float
    noise_error: float
    bias: float
    bias_error: float
    saved_bytes: int
    plain_bytes: int
    unit: float
    is_relative: bool
    batches: int
    draws: int
    passes: int
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """Compression: ``plain_bytes / saved_bytes``."""
        return self.plain_bytes / self.saved_bytes if self.saved_bytes else float("inf")

    def __str__(self) -> str:
        beside = self.saved_bytes - sum(row.saved_bytes for row in self.rows)
        header = ("layer", "kind", "readers", "bits", "stored", "noise", "bias²", "tail")
        cells = [_cells(row) for row in self.rows]
        if beside:
            cells.append(("(exact)", "masks, statistics", "", "", size_text(beside), "", "", ""))
        figures = _with_error(self.noise, self.noise_error), _with_error(self.bias, self.bias_error)
        total = ("total", "", "", "", size_text(self.saved_bytes), *figures, "")
        shown = len(header) - (not any(row.tail >= HEAVY for row in self.rows))  # the last column for heavy tails alone
        table = text_table(header[:shown], [row[:shown] for row in cells], total[:shown], numbers=shown - 2)
        unit = (
            "squared norm of the gradient of the one batch. Pass two or more for units of minibatch noise, and for "
            "standard errors."
            if self.is_relative
            else f"variance of the gradient between the {self.batches} batches."
        )
        summary = f"{self.ratio:.1f} times less is kept for backward.\nUnit of noise and bias²: {unit}"
        return "\n\n".join((table, "\n".join((summary, *self.notes))))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one line per layer, with the fields of a row as columns, and a last line for the layer "total".

        Args:
            path: file to write.
        """
        names = [field.name for field in dataclasses.fields(LayerNoise)]
        figures = self.noise, self.noise_error, self.bias, self.bias_error
        total = LayerNoise("total", "", (), (), self.saved_bytes, *figures)
        lines = ([getattr(row, name) for name in names] for row in (*self.rows, total))
        texts = ([" ".join(map(str, each)) if isinstance(each, tuple) else each for each in line] for line in lines)
        write_csv(path, [names, *texts])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plot the noise beside the bytes of the 40 layers with the most noise.

        Args:
            path: image file to write; its extension selects the format.

        Raises:
            ImportError: matplotlib is not installed.
        """
        chosen = {id(row) for row in sorted(self.rows, key=lambda row: -row.noise)[:MOST_BARS]}
        rows = [row for row in self.rows if id(row) in chosen]
        title = f"noise {self.noise:.3g}, bias² {self.bias:.2g}, {self.ratio:.1f} times less kept for backward"
        axis = "noise, in squared norms of the gradient" if self.is_relative else "noise, in minibatch noise"
        stored = {"packed": [row.saved_bytes / MIB for row in rows]}
        panels = {axis: {"noise": [row.noise for row in rows]}, "packed, MiB": stored}
        errors = [0 if math.isnan(row.noise_error) else row.noise_error for row in rows]
        plot_bars(path, title, [row.layer for row in rows], panels, errors)


def _cells(row: LayerNoise) -> tuple[str, ...]:
    return (
        row.layer or "(model)",
        row.kind,
        str(len(row.readers)),
        ", ".join(map(str, row.bit_widths)) or "-",
        size_text(row.saved_bytes),
        _with_error(row.noise, row.noise_error),
        _with_error(row.bias, row.bias_error),
        "-" if math.isnan(row.tail) else f"{row.tail:.1f}",
    )


def _with_error(value: float, error: float) -> str:
    if math.isnan(value):
        return "-"
    text = f"{value:.5f}".replace("-0.00000", "0.00000")
    return text if math.isnan(error) else f"{text} ± {error:.5f}"


UNKNOWN = Estimate(math.nan, math.nan)


def gradient_report(
    model: nn.Module,
    batches: Sequence[Any],
    loss: Loss,
    policy: Any = None,
    draws: int = 8,
    *,
    layers: str | None = "measured",
    layer_draws: int = 2,
    progress: bool = True,
) -> GradientReport:
    """Measure the noise and bias that backward quantization adds to a model's gradients, in all and per layer.

    With g_b the exact gradient of batch b, all weights in one vector, h_b the gradient with backward quantization, and
    E the mean over the seeds of random rounding:

        noise = mean_b E |h_b - E h_b|^2 / V,    bias = mean_b |E h_b - g_b|^2 / V,    V = variance of g_b over batches

    Noise 1 doubles the variance of a step, as half the batch size does. Both estimates are unbiased. A layer's row has
    the noise of the tensors that the layer packs, including their effect in layers that derive from them: measured with
    all other tensors at 8 bits, whose noise is subtracted. If inputs of layers have channels at least 30 times the
    median one (massive activations), a column shows these ratios, and a note the rule that cures their noise. The rows
    have no noise if the model, modules in it or the loss are compiled.

    The model runs in training mode, with the same random numbers from torch (dropout) in all passes of a batch. For B
    batches and L rows, the total takes 1 + B + B draws passes, and the rows (L + 1) B layer_draws more. The gradients
    of all batches stay in memory. Weights, buffers, gradients, policy and random generators are restored bit for bit.

    >>> import torch, brevact
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    >>> model = brevact.quantize_backward(model)
    >>> batches = [torch.randn(64, 64) for _ in range(3)]
    >>> report = brevact.gradient_report(model, batches, lambda model, batch: (model(batch) - 1).square().mean())
    >>> report.noise > 0, report.passes
    (True, 46)
    >>> [(row.layer, row.readers, row.bit_widths, row.saved_bytes) for row in report.rows]
    [('0', (), (4,), 2096), ('1', ('2',), (4,), 2096)]

    Args:
        model: module, with or without backward quantization.
        batches: a list of a few batches, each passed to ``loss``. With a single batch, values are relative to the
            squared norm of its gradient, and have no standard errors.
        loss: takes the model and a batch, and returns the mean over the batch, a scalar; called in the region of the
            model, as in ``with brevact.backward_quant(model):``.
        policy: replaces the model's policy during the measurement, as in ``quantize_backward``. None for the model's
            own, or :data:`DEFAULT` in a model without one.
        draws: seeds per batch for the total, at least 2.
        layers: "measured" for the noise of each layer, None for the total only.
        layer_draws: seeds per batch for each row, at least 2.
        progress: whether to show a progress bar after some seconds, if tqdm is installed.

    Returns:
        The report: ``print`` it, or use ``to_csv`` and ``plot``.

    Raises:
        TypeError: ``model`` is not a module, ``batches`` not a list, ``loss`` not a function, or its result not a
            tensor.
        ValueError: there are no batches, or too few draws; no parameter requires a gradient; the loss is not a scalar,
            is not finite, does not use the model, or draws its own random numbers; the gradients of all batches are
            equal; the policy does not fit; or a region is active.
    """
    _check(model, batches, loss, layers)
    check_int("draws", draws, 2)  # for a variance
    check_int("layer_draws", layer_draws, 2)
    loss, origin = StepLoss(loss), getattr(model, "_orig_mod", model)
    with in_place(model):
        if policy is not None:
            for module in model.modules():
                detach_region(module, POLICY)
            attach_policy(model, policy)
        batch = without_surroundings(batches[0])
        run = functools.partial(loss, batch=batch)
        with tails_of_inputs(model, run) as tails:
            memory = memory_of(model, run, origin)
        if memory.would_save:
            attach_policy(model)
        chains, is_compiled = chains_of(memory), OF_GRAPHS in memory.note
        is_measured = layers is not None and bool(chains) and not is_compiled
        passes = 1 + len(batches) * (1 + draws) + is_measured * (len(chains) + 1) * len(batches) * layer_draws
        with uncompiled(not is_compiled), progress_bar("gradient_report", passes, progress) as on_pass:
            with regions_disabled(is_compiled):
                exact = exact_gradients(model, batches, loss, on_pass)
            whole = gradient_noise(model, batches, loss, exact, draws, on_pass)
            of_layer = functools.partial(noise_of_batches, model, batches, loss, exact, layer_draws, on_pass)
            figures, notes = _of_chains(origin, chains, of_layer, exact.unit) if is_measured else ({}, [])
        notes += [_OF_GRAPHS] if is_compiled else []
        kinds = {name: type(module).__name__ for module, name in names_of(origin).items()}
        rows = []
        for chain in chains:
            noise, bias = figures.get(chain.source, (UNKNOWN, UNKNOWN))
            layer, tail = (chain.source, kinds[chain.source]), tails.get(chain.source, math.nan)
            rows.append(LayerNoise(*layer, chain.readers, chain.bit_widths, chain.saved_bytes, *noise, *bias, tail))
    notes = [memory.note, *notes, note_on({row.layer: (row.noise, row.tail) for row in rows})]
    return GradientReport(
        rows=tuple(rows),
        noise=whole.noise.value,
        noise_error=whole.noise.error,
        bias=whole.bias.value,
        bias_error=whole.bias.error,
        saved_bytes=memory.saved_bytes,
        plain_bytes=memory.plain_bytes,
        unit=exact.unit.value,
        is_relative=exact.is_relative,
        batches=len(batches),
        draws=draws,
        passes=passes,
        notes=tuple(filter(None, notes)),
    )


def _of_chains(
    model: nn.Module, chains: Sequence[Chain], measured: Callable[[], Tensor], unit: Estimate
) -> tuple[dict[str, tuple[Estimate, Estimate]], list[str]]:
    """Return noise and bias of each chain alone, by source, and notes; modifies the model's regions."""
    isolation = Isolation(model)
    isolation.restrict_to(())
    fine_B, _ = measured()
    found, left = {}, []
    for chain in chains:
        isolation.restrict_to(chain.layers)
        noise_B, bias_B = measured()
        if isolation.has_region(chain.source):
            found[chain.source] = in_units(noise_B - fine_B, unit), in_units(bias_B, unit)
        else:
            left.append(chain.source or "(model)")
    note = f"In {', '.join(left)} the code of the model itself sets a region: measured in the total only."
    return found, [note] if left else []


_OF_GRAPHS = "Noise of compiled graphs is in the total alone: pass the model before torch.compile for that of layers."


def _check(model: Any, batches: Any, loss: Any, layers: Any) -> None:
    if current_region() is not None:
        raise ValueError(
            "gradient_report: called in a region, as of brevact.backward_quant, which would quantize what is to be "
            "exact; call it outside"
        )
    check_model(model, "gradient_report(model, batches, loss)", batches)
    check_batches(batches, "gradient_report(model, batches, loss)")
    check_loss(loss)
    if layers not in ("measured", None):
        raise ValueError(f"layers={brief(layers)}; accepted are 'measured', None")
