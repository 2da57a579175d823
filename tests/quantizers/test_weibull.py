"""The Weibull quantizer: less variance than evenly spaced levels, exact ends and zeros, the same on every device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from brevact.geometry import SMALLEST_GAP
from brevact.quantizers import PackedActivation, UniformQuantizer, WeibullQuantizer
from brevact.quantizers.formats.weibull_levels import level_table
from brevact.quantizers.reference import LARGEST_RANGE
from tests.crosses import taking_turns

BUCKET = 4096
every_width = pytest.mark.parametrize("bit_width", [2, 3, 4])


def _weibull(shape: float) -> Callable[[int], Tensor]:
    def draw(numel: int) -> Tensor:
        magnitude = (-torch.rand(numel, dtype=torch.float64).clamp(min=2**-53).log()) ** (1 / shape)
        return (magnitude * torch.randn(numel).sign()).float()

    return draw


LONG_TAILED: dict[str, Callable[[int], Tensor]] = {
    **{f"Weibull {shape}": _weibull(shape) for shape in (0.3, 0.5, 0.7, 1.0)},
    "ReLU": lambda numel: torch.randn(numel).relu(),
    "SiLU": lambda numel: torch.nn.functional.silu(torch.randn(numel) * 2),
    "log-normal": lambda numel: torch.randn(numel).exp(),
    "dropout": lambda numel: torch.nn.functional.dropout(torch.randn(numel)),
}
OTHERS = {
    "normal": torch.randn,
    "offset": lambda numel: torch.randn(numel) * 0.01 + 1000,
    "negative": lambda numel: -torch.randn(numel).relu(),
}
every_case = pytest.mark.parametrize(
    "bit_width, draw", taking_turns((2, 3, 4), [*LONG_TAILED.values(), *OTHERS.values()])
)


def _levels(packed: PackedActivation) -> Tensor:
    geometry = packed.quantizer.geometry(packed.layout)
    return packed.quantizer.grid(geometry, packed.tensors[1:], packed.buffer.device).levels


def _variance(x: Tensor, levels: Tensor) -> float:
    """Mean of (b - x)(x - a) over whole buckets, a and b the levels around x."""
    rows = x.view(len(levels), -1)
    above = torch.searchsorted(levels, rows, right=True).clamp(1, levels.shape[1] - 1)
    a, b = (levels.gather(1, index).double() for index in (above - 1, above))
    return float(((b - rows) * (rows - a)).mean())


def _even_variance(x: Tensor, quantizer: UniformQuantizer) -> float:
    packed = quantizer.quantize(x, seed=0)
    steps = torch.arange(2**quantizer.bit_width, dtype=torch.float64)
    return _variance(x, packed.minimum[:, None].double() + packed.scale[:, None].double() * steps)


@every_width
@pytest.mark.parametrize("draw", LONG_TAILED.values(), ids=LONG_TAILED.keys())
def test_variance_is_less_than_with_even_levels(bit_width: int, draw: Callable[[int], Tensor]):
    """Also than with those of the smaller buckets that uniform quantizers have by default."""
    torch.manual_seed(0)
    x = draw(16 * BUCKET)
    found = _variance(x, _levels(WeibullQuantizer(bit_width=bit_width).quantize(x, seed=0)))
    even = UniformQuantizer(bit_width=bit_width, scale_dtype=torch.float32)  # buckets with tails have uneven levels
    assert found < _even_variance(x, even)
    assert found < 0.7 * _even_variance(x, replace(even, bucket_size=BUCKET))


@every_case
def test_minimum_and_maximum_are_exact(bit_width: int, draw: Callable[[int], Tensor]):
    torch.manual_seed(0)
    x = draw(4 * BUCKET + 100)
    y = WeibullQuantizer(bit_width=bit_width).quantize(x, seed=1).dequantize()
    for rows, decoded in zip(x.split(BUCKET), y.split(BUCKET), strict=True):
        for end in (rows.argmin(), rows.argmax()):
            assert decoded[end] == rows[end]
        assert (decoded >= rows.min()).all() and (decoded <= rows.max()).all()


@every_width
def test_one_zero_between_others_makes_zero_a_level(bit_width: int):
    torch.manual_seed(0)
    x = torch.randn(3 * BUCKET + 11)
    plain = _levels(WeibullQuantizer(bit_width=bit_width).quantize(x, seed=1))
    x[[5, BUCKET + 7]] = 0.0
    packed = WeibullQuantizer(bit_width=bit_width).quantize(x, seed=1)
    assert (packed.dequantize()[[5, BUCKET + 7]] == 0).all()
    assert torch.equal(_levels(packed)[2:], plain[2:])


LARGEST = torch.finfo(torch.float32).max
SPECIAL = (0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-38, 3e-31, LARGEST, -LARGEST, 0.49 * LARGEST, 1e-10, 65504.0)
values = st.lists(st.one_of(st.sampled_from(SPECIAL), st.floats(width=32, allow_nan=False, allow_infinity=False)))


@settings(max_examples=150, deadline=None)
@given(values=values, bit_width=st.sampled_from((2, 3, 4)))
def test_any_finite_values_decode_within_their_range(values: list[float], bit_width: int):
    x = torch.tensor(values, dtype=torch.float32)
    quantizer = WeibullQuantizer(bit_width=bit_width, bucket_size=7)
    packed = quantizer.quantize(x, seed=1)
    assert (_levels(packed).nan_to_num().diff(dim=1) >= 0).all()
    for rows, decoded in zip(x.split(7), packed.dequantize().split(7), strict=True):
        if not rows.numel():
            continue
        low, high = rows.aminmax()
        assert (decoded >= low).all() and (decoded <= high).all()
        if high - low < LARGEST_RANGE:
            ends = torch.stack((decoded[rows.argmin()] - low, decoded[rows.argmax()] - high))
            assert (ends.abs() <= 15 * SMALLEST_GAP).all()  # levels that are closer count as one


@pytest.mark.gpu
@every_case
def test_bytes_are_the_same_on_a_gpu(bit_width: int, draw: Callable[[int], Tensor]):
    torch.manual_seed(0)
    x = draw(5 * BUCKET + 77)
    x[BUCKET] = torch.nan
    quantizer = WeibullQuantizer(bit_width=bit_width)
    assert torch.equal(quantizer.quantize(x.cuda(), seed=3).buffer.cpu(), quantizer.quantize(x, seed=3).buffer)


def test_first_use_under_a_mode_leaves_no_trace():
    x = torch.randn(5000)
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode(), torch.device("meta")):
        level_table.cache_clear()
        with mode:
            WeibullQuantizer().quantize(x, seed=0).dequantize()
        packed = WeibullQuantizer().quantize(x, seed=0)
        assert type(packed.buffer) is Tensor and not packed.buffer.is_inference()
        assert packed.dequantize().isfinite().all()
