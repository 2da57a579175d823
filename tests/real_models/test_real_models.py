"""Models as their libraries ship them: forward, gradients, bytes, and that no weight is packed."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import brevact
from benchmarks.small_models import CONVOLUTIONAL, IMAGE_MODELS, TRANSFORMERS
from benchmarks.step import Step, gradient, loss_of, quantized, relative_error
from brevact import BackwardSettings, PackedActivation, StochBackward2bit, StochBackward8bit, UniformQuantizer
from brevact.autograd import region
from brevact.autograd.region.rows import row_of
from brevact.autograd.region.running import current_region
from brevact.injectors import backward_settings_from
from tests.crosses import some_of

pytest.importorskip("timm", reason="needs timm and torchvision")
ALL = {**IMAGE_MODELS, **TRANSFORMERS, **CONVOLUTIONAL}
#: Of the kinds that were hard, all in the exhaustive tier: class tokens, shuffles; branches that are added.
QUICK = ("vit_tiny_patch16_224", "shufflenet_v2_x0_5")
HARD = (*QUICK, "repvgg_a0", "mobilenetv4_conv_small", "convnextv2_atto")


def cases(quick: Sequence[str], turn: int) -> list:
    """Every other model, from one of two turns on, marked `exhaustive`; and the quick ones."""
    chosen = [name for place, name in enumerate(ALL) if place % 2 == turn or name in HARD]
    return some_of(chosen, quick)


#: Norms that packed rows and channels of other scales together had errors of 96 to 3e8 times the gradient.
EXPLODED = 10.0
#: `DEFAULT` has at least 3 bits, whose step is 3/7 of one at 2 bits, and rounding that varies no more than stochastic
#: rounding: its errors are at most 3/7 of those at 2 bits. A sixth more is for how much draws differ.
OF_TWO_BITS = 3 / 7 * 7 / 6
#: Where 3 times the norm of the gradient is too little at 2 bits: 49 SiLUs whose noise adds up, over maps of 2x2 (3.4).
MOST_NOISE = {"efficientnet_b0": 4.0}


class Spy(UniformQuantizer):
    """Keeps a digest of each tensor."""

    seen: ClassVar[list[tuple[tuple[int, ...], int]]] = []

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        if x.numel() and x.min() < x.max():  # a constant may be a dead channel
            Spy.seen.append((tuple(sorted(x.shape)), hash(x.detach().contiguous().numpy().tobytes())))
        return super().quantize(x, seed)


def packed_at(subject: Step) -> set[tuple[tuple[int, ...], int]]:
    Spy.seen.clear()
    torch.manual_seed(0)
    loss_of(subject)
    return set(Spy.seen)


def without_zeros(model: nn.Module) -> None:
    """Replace parameters that start at zero, such as scales of residual branches, which hide the batch."""
    with torch.no_grad():
        for p in model.parameters():
            if not p.any():
                p.uniform_(-1, 1)


def packed_weights(subject: Step) -> set[tuple[tuple[int, ...], int]]:
    """Digests of packed tensors that depend on weights alone: equal for each batch, and changed with the weights."""
    without_zeros(subject.model)
    fixed = packed_at(subject) & packed_at(subject._replace(batch=other_batch(subject.batch)))
    with torch.no_grad():
        for p in subject.model.parameters():
            p.mul_(1.25)
    return fixed - packed_at(subject) if fixed else fixed


def other_batch(batch: Any) -> Any:
    """A batch that shares no input with ``batch``: noise for floats, other tokens and labels."""
    generator = torch.Generator().manual_seed(1)  # models draw nothing that moves torch's own since the batch was made
    return tree_map_only(
        Tensor,
        lambda x: torch.randn(x.shape, generator=generator) if x.is_floating_point() else (x + 1) % (int(x.max()) + 1),
        batch,
    )


def errors_of(found: Tensor, expected: Tensor, model: nn.Module) -> tuple[float, float]:
    """Relative error of all gradients, and the median of the parameters' own: the head alone may make up the first."""
    sizes = [p.numel() for p in model.parameters() if p.grad is not None]
    own = [
        relative_error(*pair) for pair in zip(found.split(sizes), expected.split(sizes), strict=True) if pair[1].any()
    ]
    return relative_error(found, expected), statistics.median(own)


@pytest.mark.parametrize("name", cases(QUICK, 0))
def test_real_models_train_as_they_are(name):
    plain = ALL[name].build()
    two, eight = quantized(plain, StochBackward2bit), quantized(plain, StochBackward8bit)
    spied = quantized(plain, BackwardSettings(Spy(bit_width=2)))
    assert torch.equal(loss_of(two, 0), loss_of(plain, 0))
    expected = gradient(plain, 0)
    errors = [errors_of(gradient(subject, 0), expected, subject.model) for subject in (eight, two)]
    report = brevact.memory_report(two.model, two.batch, two.loss)
    assert packed_at(spied) and not packed_weights(spied)
    assert 0.0 < errors[0][0] < 0.1 and errors[1][0] < MOST_NOISE.get(name, 3.0), errors
    assert errors[0][1] < 0.1 and errors[1][1] < EXPLODED, errors
    assert report.ratio >= 8.0, str(report).splitlines()[-40:]


def spied_default() -> brevact.Policy:
    """The rules of `DEFAULT`, with quantizers that keep digests."""
    rules = {}
    for key, leaf in brevact.DEFAULT.rules.items():
        settings = backward_settings_from(leaf)
        quantizer = settings.quantizer
        assert type(quantizer) is UniformQuantizer
        spy = Spy(**{each.name: getattr(quantizer, each.name) for each in dataclasses.fields(quantizer) if each.init})
        rules[key] = dataclasses.replace(settings, quantizer=spy)
    return brevact.Policy(rules)


@pytest.mark.parametrize("name", cases((), 1))
def test_real_models_train_by_the_default(name):
    plain = ALL[name].build()
    default, two = quantized(plain, brevact.DEFAULT), quantized(plain, StochBackward2bit)
    spied = quantized(plain, spied_default())
    assert torch.equal(loss_of(default, 0), loss_of(plain, 0))
    expected = gradient(plain, 0)
    error, worst = (errors_of(gradient(subject, 0), expected, subject.model) for subject in (default, two))
    report = brevact.memory_report(default.model, default.batch, default.loss)
    assert packed_at(spied) and not packed_weights(spied)
    assert 0.0 < error[0] < OF_TWO_BITS * worst[0], (error, worst)
    assert error[1] <= OF_TWO_BITS * worst[1], (error, worst)
    assert report.ratio >= 8.0, str(report).splitlines()[-40:]


@pytest.mark.parametrize("name, bits", [("mobilenet_v2", 6), ("efficientnet_b0", 6), ("resnet50", 3), ("googlenet", 3)])
def test_the_default_fits_models_of_torchvision(name, bits):
    models = pytest.importorskip("torchvision").models
    settings = {"init_weights": False} if name == "googlenet" else {}
    with torch.device("meta"):
        model = brevact.quantize_backward(models.get_model(name, weights=None, **settings))
    assert brevact.backward_policy(model).rows[0].source == f"DitherBackward{bits}bit"
    assert not any(p.device.type != "meta" for p in model.parameters())


@pytest.mark.parametrize("name", ["deform_conv2d", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool"])
def test_operators_that_save_places_of_what_they_read_keep_them_exact(name):
    with region(BackwardSettings(brevact.quantizer(StochBackward2bit))):
        active = current_region()
        assert row_of(getattr(torch.ops.torchvision, name)).must_not_round(active, ())
        assert row_of(torch.ops.aten.add).must_not_round is None
