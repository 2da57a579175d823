"""Brevitas' activation quantizers as activation quantizers: what is stored, and what it decodes to."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from brevitas.core.scaling.runtime import RuntimeDynamicGroupStatsScaling
from brevitas.core.stats import NegativeMinOrZero
from brevitas.core.zero_point import RuntimeDynamicGroupZeroPoint
from brevitas.inject import ExtendedInjector
from brevitas.inject.enum import ScalingPerOutputType
from brevitas.proxy.groupwise_int_runtime_quant import GroupwiseActQuantProxyFromInjector
from brevitas.quant import (
    Int8ActPerTensorFixedPoint,
    Int8ActPerTensorFloat,
    Int8ActPerTensorFloatMSE,
    NoneActQuant,
    ShiftedUint8ActPerTensorFloat,
    SignedBinaryActPerTensorConst,
    SignedTernaryActPerTensorConst,
    Uint8ActPerTensorFloat,
    Uint8ActPerTensorFloatMaxInit,
)
from brevitas.quant.fixed_point import Uint8ActPerTensorFixedPoint
from brevitas.quant.float import Fp8e4m3Act, Fp8e4m3ActPerTensorFloat, Fp8e5m2ActPerTensorFloat
from brevitas.quant.float_quant_fnuz import Fp8e4m3FNUZActPerTensorFloat
from brevitas.quant.float_quant_ocp import Fp8e4m3OCPActPerTensorFloat, Fp8e5m2OCPActPerTensorFloat, FpOCPAct
from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Act, MXInt8Act
from brevitas.quant.scaled_int import Int8ActPerTensorFloatBatchQuant2d
from torch import Tensor, nn

import brevact
import brevact.nn as bnn
from brevact.injectors import BrevitasQuantizer
from brevact.injectors.number_codes import MinifloatCodes
from brevact.injectors.scaled_codes import grouped as grouped_elements
from brevact.injectors.scaled_codes import ungrouped
from brevact.quantizers import Layout
from tests.saving import by_torch_save

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PER_CHANNEL = {
    "scaling_per_output_type": "channel",
    "per_channel_broadcastable_shape": (1, 6, 1, 1),
    "scaling_stats_permute_dims": (1, 0, 2, 3),
}


class PlainGroups(Int8ActPerTensorFloat):
    """Groups with a scale that is no power of two."""

    proxy_class = GroupwiseActQuantProxyFromInjector
    scaling_impl = RuntimeDynamicGroupStatsScaling
    scaling_stats_op = "max"
    scaling_per_output_type = ScalingPerOutputType.GROUP
    group_size = 8


class ShiftedGroups(PlainGroups):
    """Groups with a zero point that is no integer."""

    signed = False
    scaling_stats_op = "min_max"
    zero_point_impl = RuntimeDynamicGroupZeroPoint
    zero_point_stats_impl = NegativeMinOrZero
    quantize_zero_point = False


MXFP4 = {"bit_width": 4, "exponent_bit_width": 2, "mantissa_bit_width": 1}
MXFP6 = {"bit_width": 6, "exponent_bit_width": 3, "mantissa_bit_width": 2}
OCP = {"bit_width": 8, "exponent_bit_width": 5, "mantissa_bit_width": 2, "saturating": False}

#: Injector, overrides, bits a code, bytes of metadata a group.
SUBJECTS = {
    "thesis": (Int8ActPerTensorFloat, {"bit_width": 2}, 2, 4),
    "int8": (Int8ActPerTensorFloat, {}, 8, 4),
    "narrow": (Int8ActPerTensorFloat, {"narrow_range": True, "bit_width": 3}, 3, 4),
    "uint5": (Uint8ActPerTensorFloat, {"bit_width": 5}, 5, 4),
    "int16": (Int8ActPerTensorFloat, {"bit_width": 16}, 16, 4),
    "int32": (Int8ActPerTensorFloat, {"bit_width": 32}, 32, 4),
    "uint32": (Uint8ActPerTensorFloat, {"bit_width": 32}, 32, 4),
    "shifted": (ShiftedUint8ActPerTensorFloat, {"bit_width": 4}, 4, 5),
    "fixed point": (Int8ActPerTensorFixedPoint, {"bit_width": 6}, 6, 4),
    "unsigned fixed point": (Uint8ActPerTensorFixedPoint, {}, 8, 4),
    "parameter": (Uint8ActPerTensorFloatMaxInit, {"max_val": 2.0}, 8, 4),
    "mean square": (Int8ActPerTensorFloatMSE, {"bit_width": 4}, 4, 4),
    "batch": (Int8ActPerTensorFloatBatchQuant2d, {}, 8, 4),
    "per channel": (Int8ActPerTensorFloat, PER_CHANNEL, 8, 24),
    "shifted per channel": (ShiftedUint8ActPerTensorFloat, PER_CHANNEL, 8, 30),
    "binary": (SignedBinaryActPerTensorConst, {}, 1, 4),
    "ternary": (SignedTernaryActPerTensorConst, {}, 2, 4),
    "ternary core": (SignedTernaryActPerTensorConst, {"quant_type": "ternary", "threshold": 0.5}, 2, 4),
    "e4m3": (Fp8e4m3ActPerTensorFloat, {}, 8, 4),
    "e5m2": (Fp8e5m2ActPerTensorFloat, {}, 8, 4),
    "e4m3 unscaled": (Fp8e4m3Act, {}, 8, 4),
    "e4m3 ocp": (Fp8e4m3OCPActPerTensorFloat, {}, 8, 4),
    "e5m2 ocp": (Fp8e5m2OCPActPerTensorFloat, {}, 8, 4),
    "e5m2 with infinities": (FpOCPAct, OCP, 8, 4),
    "e4m3 fnuz": (Fp8e4m3FNUZActPerTensorFloat, {}, 8, 4),
    "e2m1": (Fp8e4m3Act, {"exponent_bit_width": 2, "mantissa_bit_width": 1}, 4, 4),
    "e3m2": (Fp8e4m3Act, {"exponent_bit_width": 3, "mantissa_bit_width": 2}, 6, 4),
    "e3m2 unsigned": (Fp8e4m3Act, {"exponent_bit_width": 3, "mantissa_bit_width": 2, "signed": False}, 5, 4),
}
GROUPED = {
    "mx int8": (MXInt8Act, {}, 8, 1),
    "mx int4": (MXInt8Act, {"bit_width": 4, "group_size": 16}, 4, 1),
    "mx e4m3": (MXFloat8e4m3Act, {}, 8, 1),
    "mx e2m1": (MXFloat8e4m3Act, MXFP4, 4, 1),
    "mx e3m2": (MXFloat8e4m3Act, MXFP6, 6, 1),
    "groups": (PlainGroups, {"bit_width": 4}, 4, 4),
    "shifted groups": (ShiftedGroups, {"bit_width": 4}, 4, 8),
}
subjects = pytest.mark.parametrize("subject", [pytest.param(value, id=key) for key, value in SUBJECTS.items()])
grouped = pytest.mark.parametrize("subject", [pytest.param(value, id=key) for key, value in GROUPED.items()])
everything = pytest.mark.parametrize(
    "subject", [pytest.param(value, id=key) for key, value in (SUBJECTS | GROUPED).items()]
)


def activations(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(5, 6, 7, 9, generator=generator) * 1.5).to(dtype)


def forward_proxy(injector: type, overrides: dict, group_dim: int = -1) -> nn.Module:
    """What Brevitas itself builds to quantize a forward pass."""
    overrides = {"group_dim": group_dim, **overrides} if "group_size" in injector else overrides
    injector = injector.let(**overrides)
    return injector.proxy_class(nn.Identity(), injector)


def fake_quantized(proxy: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        result = proxy(x)
    return (result if type(result) is Tensor else result.value).to(x.dtype)


def equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0))


@everything
@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_gives_brevitas_own_values(subject, dtype):
    injector, overrides, *_ = subject
    quantizer, proxy = brevact.quantizer(injector, **overrides), forward_proxy(injector, overrides)
    for seed in range(2):
        x = activations(dtype, seed)
        expected = fake_quantized(proxy, x)
        packed = quantizer.quantize(x)
        decoded = packed.dequantize()
        if dtype == torch.float64 and packed.quantizer.codes.bit_width == 32:
            # Brevitas' bounds are float32 numbers, one more than fits; differences round
            assert ((decoded - expected).abs() <= packed.scale * 1.001).all()
            continue
        finite = expected.isfinite()  # e5m2 overflows in float16: Brevitas makes that NaN
        assert torch.equal(decoded.isfinite(), finite)
        assert equal(decoded, expected)


@subjects
def test_codes_take_their_true_width(subject):
    injector, overrides, bit_width, metadata = subject
    packed = brevact.quantizer(injector, **overrides).quantize(activations())
    numel = activations().numel()
    whole, tail = divmod(numel, 8)
    assert packed.codes.numel() == bit_width * (whole + (tail > 0))
    assert packed.nbytes <= packed.codes.numel() + metadata + 3  # of alignment


@grouped
@pytest.mark.parametrize("group_dim", [-1, 1, 0, -2])
def test_padding_of_the_last_group_is_not_stored(subject, group_dim):
    injector, overrides, bit_width, metadata = subject
    x = activations()
    size = overrides.get("group_size", injector.group_size)
    groups = x.numel() // x.shape[group_dim] * -(-x.shape[group_dim] // size)
    quantizer = brevact.quantizer(injector, group_dim=group_dim, **overrides)
    packed = quantizer.quantize(x)
    expected = fake_quantized(forward_proxy(injector, overrides, group_dim), x)
    assert equal(packed.dequantize(), expected)
    assert packed.nbytes <= bit_width * -(-x.numel() // 8) + metadata * groups + 3


def test_the_thesis_baseline_is_two_bits_and_a_scale():
    x = activations()[0].contiguous()[:, :4, :4].contiguous()
    packed = brevact.quantizer(Int8ActPerTensorFloat, bit_width=2).quantize(x)
    assert packed.nbytes == x.numel() * 2 // 8 + 4
    assert packed.scale.shape == (1,)


MEMORY_ORDERS = {
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 2),
    "with gaps": lambda x: x[:, ::2, 1:],
    "expanded": lambda x: x[:, :1].expand(-1, 6, -1, -1),
    "one element": lambda x: x[:1, :1, :1, :1],
    "vector": lambda x: x.reshape(-1),
    "matrix": lambda x: x.reshape(6, -1),
    "negative": lambda x: torch._neg_view(x),
}


@pytest.mark.parametrize("name", ["thesis", "shifted", "e4m3", "binary", "mx e2m1", "groups"])
@pytest.mark.parametrize("order", MEMORY_ORDERS.values(), ids=MEMORY_ORDERS)
def test_memory_order_changes_nothing(name, order):
    injector, overrides, *_ = (SUBJECTS | GROUPED)[name]
    x = order(activations())
    decoded = brevact.quantizer(injector, **overrides).quantize(x).dequantize()
    assert decoded.shape == x.shape
    assert torch.equal(decoded, fake_quantized(forward_proxy(injector, overrides), x.contiguous()))


@pytest.mark.parametrize("order", ["channels last", "with gaps", "expanded"])
def test_scales_of_channels_and_memory_order(order):
    x = MEMORY_ORDERS[order](activations())
    overrides = {**PER_CHANNEL, "per_channel_broadcastable_shape": (1, x.shape[1], 1, 1)}
    decoded = brevact.quantizer(Int8ActPerTensorFloat, **overrides).quantize(x).dequantize()
    assert torch.equal(decoded, fake_quantized(forward_proxy(Int8ActPerTensorFloat, overrides), x))


def test_strides_are_restored():
    x = activations().to(memory_format=torch.channels_last)
    assert brevact.quantizer(Int8ActPerTensorFloat).quantize(x).dequantize().stride() == x.stride()


@everything
def test_dequantize_multiply_is_the_product(subject):
    injector, overrides, *_ = subject
    packed = brevact.quantizer(injector, **overrides).quantize(activations())
    other = activations(seed=1)
    assert torch.equal(packed.dequantize_multiply(other), packed.dequantize() * other)


@pytest.mark.parametrize("name", ["thesis", "shifted", "binary", "e4m3", "mx int8"])
def test_empty_and_scalar_tensors(name):
    injector, overrides, *_ = (SUBJECTS | GROUPED)[name]
    quantizer = brevact.quantizer(injector, **overrides)
    empty = quantizer.quantize(torch.empty(0, 6, 7, 9))
    assert empty.dequantize().shape == (0, 6, 7, 9)
    assert empty.nbytes == 0
    assert quantizer.quantize(torch.tensor(0.75)).dequantize().shape == ()


NOT_FINITE = [(math.nan,), (math.inf,), (-math.inf,), (math.nan, math.inf, -math.inf)]


def with_missing(x: Tensor, values: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """These values in place of four elements, two of which share a scale of any kind, and where they are."""
    places = torch.tensor([1, 2, 777, 1200])
    x, missing = x.clone(), torch.zeros(x.shape, dtype=torch.bool)
    x.view(-1)[places] = torch.tensor(values).repeat(4)[:4].to(x.dtype)
    missing.view(-1)[places] = True
    return x, missing


def of_each(x: Tensor, scales: Tensor, group: tuple[int, int] | None) -> Tensor:
    """The scale, or what there is one of for each scale, of each element."""
    groups = grouped_elements(x, group)
    return ungrouped(scales.expand(groups.shape), group, x.shape)


def largest_loss(packed, x: Tensor) -> Tensor:
    """How much larger than Brevitas' own an error may be: by the step of the code that is given up."""
    codes, kind = packed.quantizer.codes, packed.quantizer.scale
    stored = packed.scale.view(kind.shape)
    scales = kind.read(stored) if codes.has_spare else kind.read_flagged(stored)[0]
    step = of_each(x, scales.double(), packed.quantizer.group)
    if codes.has_spare:
        return torch.zeros_like(step)
    if codes.bit_width == 1:
        return step
    if isinstance(codes, MinifloatCodes):  # those of a number of mantissa bits are as far apart as the largest two
        largest, next_one = codes.decode(torch.tensor([codes.nan_code, codes.nan_code - 1]), torch.float64)
        return step * (largest - next_one)
    return step


@everything
@pytest.mark.parametrize(("values", "dtype"), zip(NOT_FINITE, DTYPES, strict=True), ids=str)
def test_what_is_not_finite_decodes_to_nan_and_spares_the_rest(subject, values, dtype):
    """The others decode as with zeros in its place, but for the code that is given up; other groups are the same."""
    injector, overrides, *_ = subject
    for held in (False, True):  # statistics of the tensor itself, or a scale that was collected before
        quantizers = [brevact.quantizer(injector, **overrides) for _ in range(2)]
        if held:
            for quantizer in quantizers:
                quantizer.quantize(activations(dtype))
                quantizer.eval()
        x, missing = with_missing(activations(dtype), values)
        packed, plain = quantizers[0].quantize(x), quantizers[1].quantize(x.masked_fill(missing, 0.0))
        decoded, expected = packed.dequantize(), plain.dequantize()
        assert packed.nbytes == plain.nbytes
        assert decoded[missing].isnan().all()
        assert torch.equal(decoded[~missing].isfinite(), expected[~missing].isfinite())
        error, before = ((y.double() - x.double()).abs() for y in (decoded, expected))
        rounding = torch.finfo(dtype).eps * expected.double().abs()  # of the product with the scale
        sound = ~missing & expected.isfinite()
        assert (error <= before + largest_loss(packed, x) + rounding)[sound].all()
        shape = packed.quantizer.scale.shape
        groups = of_each(x, torch.arange(math.prod(shape)).view(shape), packed.quantizer.group)
        untouched = ~torch.isin(groups, groups[missing])
        assert equal(decoded[untouched], expected[untouched])
        factor = torch.randn(x.shape).to(dtype)
        torch.testing.assert_close(packed.dequantize_multiply(factor), decoded * factor, rtol=0, atol=0, equal_nan=True)


@everything
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_tensor_of_nothing_finite_decodes_to_nan(subject, value):
    injector, overrides, *_ = subject
    x = torch.full_like(activations(), value)
    assert brevact.quantizer(injector, **overrides).quantize(x).dequantize().isnan().all()


@pytest.mark.parametrize("name", ["thesis", "shifted", "mean square", "batch", "per channel", "shifted per channel"])
def test_what_is_not_finite_is_no_part_of_statistics(name):
    injector, overrides, *_ = SUBJECTS[name]
    spoiled, plain = (brevact.quantizer(injector, **overrides) for _ in range(2))
    for seed in range(3):
        x, missing = with_missing(activations(seed=seed), NOT_FINITE[-1])
        spoiled.quantize(x)
        plain.quantize(x.masked_fill(missing, 0.0))
    states = spoiled.state_dict(), plain.state_dict()
    assert states[0].keys() == states[1].keys() and states[0]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_two_binary_values_beside_what_is_not_finite_are_zero():
    quantizer = brevact.quantizer(SignedBinaryActPerTensorConst)
    decoded = quantizer.quantize(torch.tensor([1.0, -1.0, math.nan])).dequantize()
    assert decoded[:2].tolist() == [0.0, 0.0] and decoded[2].isnan()
    assert quantizer.quantize(torch.tensor([1.0, -1.0, 3.0])).dequantize().tolist() == [1.0, -1.0, 1.0]


def test_a_scale_of_either_sign_is_nan_beside_what_is_not_finite():
    quantizer = brevact.quantizer(Int8ActPerTensorFloat, scaling_stats_op="signed_max")
    x = activations()
    packed = quantizer.quantize(x)
    assert ((packed.dequantize() - x).abs() <= packed.scale.abs() / 2 * 1.001).all()
    assert quantizer.quantize(with_missing(x, (math.nan,))[0]).dequantize().isnan().all()


@pytest.mark.parametrize("bit_width", [2, 8, 16, 32])
def test_flagged_powers_of_two_are_the_next_ones_there_is_a_byte_for(bit_width):
    kind = brevact.quantizer(MXInt8Act, bit_width=bit_width).quantize(torch.ones(32)).quantizer.scale
    exponents = torch.arange(-80, 127).clamp_min(kind.lowest - 127)
    scales = torch.exp2(exponents.double()).float()
    above = kind.of_flagged(scales)
    read, flagged = kind.read_flagged(kind.write(above, torch.ones(len(scales), dtype=torch.bool)))
    assert flagged.all() and torch.equal(read, above)
    ratio = above.double() / scales.double()
    assert ((ratio >= 1) & (ratio <= 2 ** (kind.spacing - 1))).all()
    assert kind.spacing == {2: 2, 8: 2, 16: 3, 32: 4}[bit_width]
    read, flagged = kind.read_flagged(kind.write(scales))
    assert not flagged.any() and torch.equal(read, torch.where(scales <= kind.smallest, kind.smallest, scales))


@pytest.mark.parametrize("injector", [MXInt8Act, MXFloat8e4m3Act])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_that_are_powers_of_two_take_a_byte(injector, dtype):
    exponents = torch.arange(-24, 12).double().view(-1, 1)
    x = torch.cat((torch.exp2(exponents) * torch.linspace(-1.9, 1.9, 32), torch.zeros(4, 32))).to(dtype)
    packed = brevact.quantizer(injector).quantize(x)
    assert packed.nbytes == x.numel() + len(x) * (8 if dtype == torch.float64 else 1)
    decoded, expected = packed.dequantize(), fake_quantized(forward_proxy(injector, {}), x)
    defined = expected.isfinite()  # in float16 Brevitas divides a group of zeros by a scale of zero
    assert torch.equal(decoded[defined], expected[defined])
    assert not decoded[-4:].any()


def test_zeros_decode_to_zero_and_keep_their_sign_in_minifloats_with_a_code_for_nan():
    x = torch.tensor([0.0, -0.0, 1.0, -1.0])
    for injector, overrides, *_ in (SUBJECTS["int8"], SUBJECTS["e4m3"], SUBJECTS["shifted"], GROUPED["mx e2m1"]):
        assert brevact.quantizer(injector, **overrides).quantize(x).dequantize()[:2].tolist() == [0.0, 0.0]
    assert brevact.quantizer(Fp8e4m3OCPActPerTensorFloat).quantize(x).dequantize().signbit().tolist() == [
        False,
        True,
        False,
        True,
    ]


def test_statistics_are_collected_and_then_kept():
    quantizer = brevact.quantizer(Int8ActPerTensorFloat, bit_width=3, collect_stats_steps=3)
    proxy = forward_proxy(Int8ActPerTensorFloat, {"bit_width": 3, "collect_stats_steps": 3})
    scales = []
    for seed in range(6):
        x = activations(seed=seed) * (seed + 1)
        packed = quantizer.quantize(x)
        assert torch.equal(packed.dequantize(), fake_quantized(proxy, x))
        scales.append(packed.scale.item())
    assert scales[0] < scales[1] < scales[2]
    assert scales[3] == scales[4] == scales[5]
    assert not list(quantizer.parameters())


def test_statistics_do_not_change_in_evaluation():
    quantizer = brevact.quantizer(Int8ActPerTensorFloat)
    quantizer.quantize(activations())
    state = copy.deepcopy(quantizer.state_dict())
    scale = quantizer.eval().quantize(activations() * 100).scale
    assert scale.item() == quantizer.quantize(activations()).scale.item()
    assert all(torch.equal(state[name], value) for name, value in quantizer.state_dict().items())


def test_evaluation_before_any_statistics_uses_those_of_the_tensor():
    x = activations() * 100
    fresh = brevact.quantizer(Int8ActPerTensorFloat).eval()
    assert torch.equal(
        fresh.quantize(x).dequantize(), brevact.quantizer(Int8ActPerTensorFloat).quantize(x).dequantize()
    )
    assert not fresh.training and not fresh.state_dict()


def test_earlier_packs_keep_their_scale():
    quantizer = brevact.quantizer(Int8ActPerTensorFloatBatchQuant2d)
    packed = quantizer.quantize(activations())
    observed = quantizer.with_statistics_of(activations())
    before, decoded = packed.dequantize(), observed.quantize(activations()).dequantize()
    quantizer.quantize(activations() * 50)
    assert torch.equal(packed.dequantize(), before)
    assert torch.equal(observed.quantize(activations()).dequantize(), decoded)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q)), by_torch_save])
@pytest.mark.parametrize("name", ["thesis", "shifted", "mean square", "batch", "mx e2m1"])
def test_copies_carry_the_statistics_and_go_on_alone(copied, name):
    injector, overrides, *_ = (SUBJECTS | GROUPED)[name]
    original = brevact.quantizer(injector, **overrides)
    original.quantize(activations())
    twin = copied(original)
    twin.eval(), original.eval()
    x = activations(seed=1)
    expected = original.quantize(x).dequantize()
    assert torch.equal(twin.quantize(x).dequantize(), expected)
    twin.train().quantize(activations() * 100)
    assert torch.equal(original.quantize(x).dequantize(), expected)


def test_a_packed_activation_is_pickled_without_the_quantizer():
    packed = brevact.quantizer(MXFloat8e4m3Act, **MXFP4).quantize(activations())
    text = pickle.dumps(packed)
    assert torch.equal(pickle.loads(text).dequantize(), packed.dequantize())
    assert b"brevitas.core" not in text
    assert hash(packed.spec) == hash(pickle.loads(text).spec)


def test_stochastic_rounding_follows_the_seed():
    quantizer = brevact.quantizer(Int8ActPerTensorFloat, bit_width=4, float_to_int_impl_type="stochastic_round")
    assert quantizer.is_stochastic
    x = activations()
    quantizer.quantize(x, seed=0)
    quantizer.eval()
    a, b, c = (quantizer.quantize(x, seed).dequantize() for seed in (1, torch.tensor(1), 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_stochastic_rounding_is_unbiased():
    quantizer = brevact.quantizer(
        Int8ActPerTensorFloat, bit_width=3, float_to_int_impl_type="stochastic_round", scaling_stats_op="max"
    )
    values, draws = torch.linspace(-0.7, 0.7, 63), 2000
    x = torch.cat((values, torch.ones(1))).expand(draws, -1).contiguous()  # one keeps the others inside the range
    packed = quantizer.quantize(x, seed=0)
    mean = packed.dequantize().double().mean(0)[:-1]
    assert (mean - values).abs().max() < 5 * packed.scale.item() / 2 / math.sqrt(draws)


def test_autocast_around_it_changes_nothing():
    x = activations(torch.bfloat16)
    for injector in (Int8ActPerTensorFloat, MXFloat8e4m3Act):
        expected = brevact.quantizer(injector).quantize(x).dequantize()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(brevact.quantizer(injector).quantize(x).dequantize(), expected)


@pytest.mark.parametrize(
    ("source", "overrides", "message"),
    [
        (Int8ActPerTensorFloat, {"bit_widht": 2}, "bit_widht=2 is not a setting of Int8Act.*did you mean bit_width"),
        (MXInt8Act, {"grop_size": 64}, "did you mean group_size"),
        (Int8ActPerTensorFloat, {"group_size": 64}, "group_size=64 is not a setting"),
        (MXInt8Act, {"collect_stats_steps": 3}, "collect_stats_steps=3 is not a setting of MXInt8Act"),
        (SignedBinaryActPerTensorConst, {"bit_width": 2}, "bit_width=2 is not a setting"),
        (Fp8e4m3Act, {"bit_width": 4}, "bit_width=4 is not a setting"),
        (Int8ActPerTensorFloat, {"act_impl": nn.ReLU}, "act_impl=.* is not a setting"),
        (Int8ActPerTensorFloat, {"forward_quant": Int8ActPerTensorFloat}, "forward_quant=.* is not a setting"),
        (Uint8ActPerTensorFloatMaxInit, {}, "is incomplete: .*'max_val'.* State the missing setting"),
        (NoneActQuant, {}, "NoneActQuant quantizes nothing"),
        (Int8ActPerTensorFloat, {"bit_width_impl_type": "parameter"}, "bit_width_impl_type='const'"),
        (Int8ActPerTensorFloat, {"bit_width_impl_type": "stateful_const"}, "bit_width_impl_type='const'"),
    ],
)
def test_quantizer_refuses_settings_of_no_effect(source, overrides, message):
    with pytest.raises(TypeError, match=message):
        brevact.quantizer(source, **overrides)


@pytest.mark.parametrize(
    ("source", "overrides", "message"),
    [
        (Int8ActPerTensorFloat, {"bit_width": 33}, "bit_width=33 is out of range; accepted is an integer from 1 to 32"),
        (Int8ActPerTensorFloat, {"bit_width": 0}, "bit_width=0 is out of range"),
        (Int8ActPerTensorFloat, {"collect_stats_steps": 0}, "cannot be built: AssertionError"),
        (Int8ActPerTensorFloat, {"quant_delay_steps": 3}, "quant_delay_steps=3"),
        (MXFloat8e4m3Act, {"bit_width": 4}, "make codes of 8 bits; state all three"),
        (Fp8e4m3Act, {"exponent_bit_width": 8, "mantissa_bit_width": 10}, "at most 16 bits"),
        (Int8ActPerTensorFloat, {"save_mode": "later"}, "save_mode='later' is unknown"),
        (Int8ActPerTensorFloat, {"min_numel": -1}, "min_numel=-1"),
    ],
)
def test_quantizer_refuses_values_out_of_range(source, overrides, message):
    with pytest.raises(ValueError, match=message):
        brevact.quantizer(source, **overrides)


def test_settings_of_the_statistics_are_known():
    quantizer = brevact.quantizer(
        Int8ActPerTensorFloat, scaling_stats_op="max", collect_stats_steps=5, scaling_stats_momentum=0.5
    )
    assert quantizer.quantize(activations()).scale.item() == pytest.approx(activations().abs().max().item() / 128)
    assert brevact.quantizer(Int8ActPerTensorFloat, high_percentile_q=90.0).quantize(activations()).scale.item() < 0.03


def test_shapes_that_do_not_fit_raise():
    with pytest.raises(ValueError, match=r"group_dim=3 of MXInt8Act is no dimension .* \(4, 8\)"):
        brevact.quantizer(MXInt8Act, group_dim=3).quantize(torch.ones(4, 8))
    with pytest.raises(ValueError, match="per_channel_broadcastable_shape="):
        brevact.quantizer(Int8ActPerTensorFloat, **PER_CHANNEL).quantize(torch.ones(4, 8))


class Composed(ExtendedInjector):
    bit_width = 3


def test_subclasses_and_composition_keep_their_meaning():
    class Mine(Int8ActPerTensorFloat):
        bit_width = 5
        min_numel = 7

    settings = brevact.injectors.backward_settings_from(Mine, save_mode="quantize_on_backward")
    assert settings.quantizer.format.codes.bit_width == 5
    assert (settings.min_numel, settings.save_mode) == (7, brevact.SaveMode.QUANTIZE_ON_BACKWARD)
    assert brevact.quantizer(Composed & Int8ActPerTensorFloat).format.codes.bit_width == 3
    changed = brevact.injectors.backward_settings_from(settings, bit_width=2)
    assert changed.quantizer.format.codes.bit_width == 2
    assert (changed.min_numel, changed.save_mode) == (7, brevact.SaveMode.QUANTIZE_ON_BACKWARD)


def test_a_convolution_has_groups_of_channels():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        conv = bnn.QuantConv2d(64, 8, 3, act_quant=MXInt8Act)
    linear = bnn.QuantLinear(64, 8, act_quant=MXInt8Act)
    stated = bnn.QuantConv2d(64, 8, 3, act_quant=MXInt8Act, act_group_dim=2)
    dims = [layer.act_quant.quantizer.format.group for layer in (conv, linear, stated)]
    assert dims == [(1, 32), (-1, 32), (2, 32)]


def test_settings_do_not_keep_a_quantizer_alive():
    import gc
    import weakref

    settings = brevact.injectors.backward_settings_from(Int8ActPerTensorFloat)
    again = brevact.autograd.BackwardSettings(settings.quantizer)
    assert (settings, settings.key) == (again, again.key)
    assert settings.key != brevact.injectors.backward_settings_from(Int8ActPerTensorFloat).key
    alive = weakref.ref(settings.quantizer)
    settings.quantizer.quantize(activations())
    del settings, again
    gc.collect()
    assert alive() is None


def test_brevitas_quantizer_is_an_activation_quantizer():
    quantizer = brevact.quantizer(Int8ActPerTensorFloat, bit_width=2)
    assert isinstance(quantizer, BrevitasQuantizer)
    packed = quantizer.quantize(activations())
    assert packed.layout == Layout.of(activations())
    assert quantizer.extra_repr() == "Int8ActPerTensorFloat, bit_width=2"
