"""Measure the noise and bias of backward quantization in gradients, per layer: `gradient_report`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from brevact.arguments import check_model
from brevact.autograd import current_region, detach_region
from brevact.injectors.proxies import names_of
from brevact.policy.attach import attach_policy
from brevact.policy.rules import POLICY
from brevact.quantizers.brief import brief
from brevact.reports.batches import without_surroundings
from brevact.reports.gradient_noise import Estimate, exact_gradients, gradient_noise, in_units, noise_of_batches
from brevact.reports.gradient_passes import Loss, check_batches, check_draws, check_loss
from brevact.reports.gradient_table import GradientReport, LayerNoise
from brevact.reports.in_place import in_place
from brevact.reports.isolation import Isolation
from brevact.reports.memory import BY_DEFAULT, memory_of
from brevact.reports.memory_table import Chain, MemoryReport, chains_of
from brevact.reports.step import StepLoss
from brevact.tables import progress_bar

#: Accepted values of `layers=`.
LAYERS = ("measured", None)
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
    all other tensors at 8 bits, whose noise is subtracted.

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
    check_draws(draws)
    check_draws(layer_draws, "layer_draws")
    with in_place(model):
        return _report(model, batches, StepLoss(loss), policy, draws, layers, layer_draws, progress)


def _report(
    model: nn.Module,
    batches: Sequence[Any],
    loss: Loss,
    policy: Any,
    draws: int,
    layers: str | None,
    layer_draws: int,
    progress: bool,
) -> GradientReport:
    memory = _take_policy(model, batches[0], loss, policy)
    chains = chains_of(memory)
    is_measured = layers is not None and bool(chains)
    passes = 1 + len(batches) * (1 + draws) + is_measured * (len(chains) + 1) * len(batches) * layer_draws
    with progress_bar("gradient_report", passes, progress) as on_pass:
        exact = exact_gradients(model, batches, loss, on_pass)
        whole = gradient_noise(model, batches, loss, exact, draws, on_pass)
        of_layer = functools.partial(noise_of_batches, model, batches, loss, exact, layer_draws, on_pass)
        figures, notes = _of_chains(model, chains, of_layer, exact.unit) if is_measured else ({}, [])
    kinds = {name: type(module).__name__ for module, name in names_of(model).items()}
    rows = []
    for chain in chains:
        noise, bias = figures.get(chain.source, (UNKNOWN, UNKNOWN))
        of_chain = chain.readers, chain.bit_widths, chain.saved_bytes
        rows.append(LayerNoise(chain.source, kinds[chain.source], *of_chain, *noise, *bias))
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
        notes=tuple(note for note in (memory.note, *notes) if note),
    )


def _of_chains(
    model: nn.Module,
    chains: Sequence[Chain],
    measured: Callable[[], Tensor],
    unit: Estimate,
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


def _take_policy(model: nn.Module, batch: Any, loss: Loss, policy: Any) -> MemoryReport:
    """Attach the policy to measure, and return the bytes that the model saves under it."""
    if policy is not None:
        for module in model.modules():
            detach_region(module, POLICY)
        attach_policy(model, policy)
    batch = without_surroundings(batch)
    memory = memory_of(model, lambda measured: loss(measured, batch), batch)
    if memory.note == BY_DEFAULT:
        attach_policy(model)
    return memory


def _check(model: Any, batches: Any, loss: Any, layers: Any) -> None:
    if current_region() is not None:
        raise ValueError(
            "gradient_report: called in a region, as of brevact.backward_quant, which would quantize what is to be "
            "exact; call it outside"
        )
    check_model(model, "gradient_report(model, batches, loss)", batches)
    check_batches(batches, "gradient_report(model, batches, loss)")
    check_loss(loss)
    if layers not in LAYERS:
        raise ValueError(f"layers={brief(layers)}; accepted are {', '.join(map(repr, LAYERS))}")
