"""The uniform quantizer: its arguments, formula, groups and edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from brevact.quantizers import (
    Granularity,
    Layout,
    Rounding,
    UniformQuantizer,
    mask_multiply,
    pack_codes,
    pack_mask,
    unpack_codes,
    unpack_mask,
)
from brevact.quantizers.reference import LARGEST_END, LARGEST_RANGE

NEAREST = Rounding.NEAREST


def _codes(packed) -> torch.Tensor:
    geometry = packed.quantizer.geometry(packed.layout)
    return unpack_codes(packed.codes, geometry.bit_width, geometry.numel, geometry.block_size)


class _Wrapper(torch.Tensor):
    """A tensor subclass without storage of its own, which knows no operation but to be detached."""

    @staticmethod
    def __new__(cls, wrapped: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, wrapped.shape, dtype=wrapped.dtype)

    def __init__(self, wrapped: torch.Tensor) -> None:
        self.wrapped = wrapped

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].wrapped)
        raise NotImplementedError(function)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [1.0, 2.0], "x: got \\[1.0, 2.0\\] of type list; accepted are strided tensors of torch.float32"),
        (lambda: np.ones(4, dtype=np.float32), "x: got array.* of type ndarray; .*pass torch.as_tensor"),
        (lambda: 1.0, "x: got 1.0 of type float;"),
        (lambda: torch.ones(4).to_sparse(), "x: got a torch.float32 tensor of layout torch.sparse_coo"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "a nested tensor"),
        (lambda: _Wrapper(torch.ones(4)), "x: got a _Wrapper, which gives no access to its storage"),
    ],
)
@pytest.mark.parametrize("bit_width", [2, 32])
def test_quantize_refuses_what_is_no_strided_tensor(make, message, bit_width: int):
    with pytest.raises(TypeError, match=message):
        UniformQuantizer(bit_width=bit_width).quantize(make(), seed=0)


class _Own(torch.Tensor):
    """A tensor subclass with storage."""


def test_quantize_takes_subclasses_with_storage():
    x, quantizer = torch.randn(1000), UniformQuantizer()
    packed = quantizer.quantize(x.as_subclass(_Own), seed=3)
    assert all(map(torch.equal, packed.tensors, quantizer.quantize(x, seed=3).tensors))


def test_everything_stays_on_the_cpu_under_another_default_device():
    x, quantizer = torch.randn(40, 100), UniformQuantizer()
    with torch.device("meta"):  # results made on the default device would have no memory
        packed = quantizer.quantize(x, seed=3)
        decoded = packed.dequantize()
        product = packed.dequantize_multiply(x)
        drawn = quantizer.quantize(x)
        mask = pack_mask(x)
        masked = mask_multiply(mask, Layout.of(x), x)
        bools = unpack_mask(mask, Layout.of(x))
        codes = pack_codes(packed.codes, 8)
        integers = unpack_codes(codes, 8, packed.codes.numel())
    assert all(map(torch.equal, packed.tensors, quantizer.quantize(x, seed=3).tensors))
    assert torch.equal(decoded, quantizer.quantize(x, seed=3).dequantize())
    assert torch.equal(product, decoded * x)
    assert drawn.dequantize().device == x.device
    assert torch.equal(bools, x > 0) and torch.equal(masked, torch.where(x > 0, x, 0.0))
    assert torch.equal(integers, packed.codes.to(torch.int32))


@pytest.mark.parametrize("other", [torch.zeros(3, 2), torch.zeros(2, 3, device="meta"), torch.zeros(6)])
def test_dequantize_multiply_refuses_tensors_that_do_not_fit(other: torch.Tensor):
    with pytest.raises(ValueError, match=r"other: got a tensor of shape .* on (cpu|meta); accepted is one of shape"):
        UniformQuantizer().quantize(torch.zeros(2, 3)).dequantize_multiply(other)


def test_quantize_rounds_half_to_even():
    x = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.5, 5.5, 6.5, 7.0])  # with a step of 1
    packed = UniformQuantizer(bit_width=3, rounding=NEAREST, bucket_size=8).quantize(x)
    assert packed.scale.item() == 1.0
    assert _codes(packed).tolist() == [0, 0, 2, 2, 4, 6, 6, 7]


@pytest.mark.parametrize("bit_width", [1, 2, 4, 8, 12])
def test_quantize_keeps_grid_points_under_any_noise(bit_width: int):
    grid = torch.arange(2.0**bit_width) * 0.25 - 3
    for seed in range(20):
        packed = UniformQuantizer(bit_width=bit_width, bucket_size=None).quantize(grid, seed=seed)
        assert torch.equal(packed.dequantize(), grid)


def test_quantize_rounds_up_with_the_probability_of_the_fraction():
    """Counts of 2^18 draws at 33 fractions, within 5 standard errors, down to fractions that 8 bits would miss."""
    n = 1 << 18
    for fraction in (2**-14, 2**-9, 0.01, 0.25, 1 / 3, 0.5, 0.999, 1 - 2**-12):
        x = torch.full((n + 2,), 1.0 + fraction)
        x[0], x[1] = 0.0, 3.0
        codes = _codes(UniformQuantizer(bit_width=2, bucket_size=None).quantize(x, seed=4))[2:]
        assert set(codes.tolist()) <= {1, 2}
        ups = (codes == 2).sum().item()
        assert abs(ups - n * fraction) <= 5 * (n * fraction * (1 - fraction)) ** 0.5 + n * 2**-17


def test_quantize_uses_different_noise_for_elements_blocks_and_seeds():
    """Half-way points round independently: agreements between any two streams are half, within 5 standard errors."""
    x = torch.full((1 << 16,), 0.5)
    x[::512], x[1::512] = 0.0, 1.0
    quantizer = UniformQuantizer(bit_width=1)
    streams = torch.stack([_codes(quantizer.quantize(x, seed=seed)) for seed in (0, 1, 2**32, 2**63)])
    inner = streams.view(4, 128, 512)[:, :, 2:].float()
    pairs = [(inner[i], inner[j]) for i in range(4) for j in range(i)]
    pairs += [(inner[0, 1:], inner[0, :-1]), (inner[0, :, 1:], inner[0, :, :-1])]
    pairs += [(inner[0, :, 62:126], inner[0, :, 126:190]), (inner[0, :, 62:126], inner[0, :, 318:382])]
    for left, right in pairs:
        agreements = (left == right).double().mean()
        assert abs(agreements - 0.5) <= 5 * 0.5 / left.numel() ** 0.5


def test_calibration_encloses_every_group():
    """Metadata are rounded outwards: the grid reaches from at most the minimum to at least the maximum."""
    torch.manual_seed(0)
    for minimum_dtype in (torch.float32, torch.bfloat16):
        for bit_width in (1, 2, 5, 8):
            x = torch.randn(200, 64) * torch.logspace(-6, 6, 200)[:, None] + torch.randn(200, 1) * 10
            packed = UniformQuantizer(bit_width=bit_width, bucket_size=64, minimum_dtype=minimum_dtype).quantize(x)
            even = ~torch.signbit(packed.scale)
            x, minimum, scale = x[even], packed.minimum[even], packed.scale[even]
            low, width = minimum.double(), (x.amax(1) - minimum.float()).double()  # half a unit in the last place
            high = low + scale.double() * (2**bit_width - 1)
            assert len(x) >= 195 and (low <= x.amin(1)).all() and (high >= low + width * (1 - 2**-22)).all()
            assert minimum_dtype == torch.bfloat16 or torch.equal(minimum, x.amin(1))


def test_padding_never_widens_the_last_group():
    x = torch.cat((torch.randn(512), torch.full((5,), 7.0), torch.tensor([7.5])))
    packed = UniformQuantizer(bit_width=1, rounding=NEAREST).quantize(x)
    assert packed.minimum[1] == 7.0 and packed.scale[1] == 0.5
    assert torch.equal(packed.dequantize()[512:], x[512:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_largest_values_decode_within_a_step_and_those_beyond_the_bound_to_the_bound(dtype: torch.dtype):
    largest = torch.finfo(dtype).max
    for low in (-1.0, -0.5, 0.0, 0.4, 0.9):
        for bit_width in (1, 2, 3, 8):
            for rounding in Rounding:
                x = (torch.linspace(low, 1.0, 100, dtype=torch.float64) * largest).to(dtype)
                packed = UniformQuantizer(bit_width=bit_width, rounding=rounding).quantize(x, seed=0)
                y = packed.dequantize()
                wide = x.max().double() - x.min().double() >= LARGEST_RANGE
                error = (y.double() - (x.double().clamp(-LARGEST_END, LARGEST_END) if wide else x.double())).abs()
                steps = 1.51 if rounding is Rounding.DITHERED else 1.01  # the end of a shifted grid
                assert (error <= packed.scale.double() * steps + largest * torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("rounding", [Rounding.NEAREST, Rounding.STOCHASTIC])
def test_granularity_groups_by_channel_sample_and_tensor(memory_format, rounding):
    torch.manual_seed(0)
    x = (torch.randn(4, 6, 5, 7) * torch.arange(1, 7)[:, None, None]).to(memory_format=memory_format)
    for granularity, dims in (("channel", (0, 2, 3)), ("sample", (1, 2, 3)), ("tensor", (0, 1, 2, 3))):
        packed = UniformQuantizer(bit_width=4, rounding=rounding, granularity=granularity).quantize(x, seed=3)
        assert torch.equal(packed.minimum, x.amin(dims).view(-1))
        step = (x.amax(dims) - x.amin(dims)).view(-1) / 15
        assert ((packed.scale.float() >= step) & (packed.scale.float() <= step * (1 + 2**-7))).all()
    widest = UniformQuantizer(bit_width=4, granularity="channel", channel_dim=-1).quantize(x, seed=3)
    assert torch.equal(widest.minimum, x.amin((0, 1, 2)))


def test_granularity_without_its_dimension_is_one_group():
    for granularity in (Granularity.CHANNEL, Granularity.SAMPLE):
        quantizer = UniformQuantizer(granularity=granularity)
        assert quantizer.quantize(torch.randn(())).scale.numel() == 1
    assert UniformQuantizer(granularity=Granularity.CHANNEL).quantize(torch.randn(9)).scale.numel() == 1
    assert UniformQuantizer(granularity=Granularity.CHANNEL).quantize(torch.randn(9, 1)).scale.numel() == 1
    assert UniformQuantizer(granularity=Granularity.CHANNEL).quantize(torch.randn(9, 1).expand(9, 4)).scale.numel() == 1


def test_minimum_in_bfloat16_stays_within_a_step_where_the_offset_is_large():
    x = 1000 + torch.linspace(-0.01, 0.01, 512)
    packed = UniformQuantizer(bit_width=4, rounding=NEAREST, minimum_dtype=torch.bfloat16).quantize(x)
    assert packed.minimum.item() == 996.0  # bfloat16's spacing there is 4
    assert ((packed.dequantize() - x).abs() <= packed.scale.float() * 0.5 + 2**-13).all()
