"""The laws that every quantizer keeps, over every subject."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from brevact.quantizers import PackedActivation, Rounding, UniformQuantizer, draw_seed
from tests.crosses import some_of, taking_turns
from tests.quantizers.subjects import DTYPES, SUBJECTS, TENSORS, Subject, groups_of

every_subject = pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS.keys())


def _where(has: Callable[[Subject], bool]) -> pytest.MarkDecorator:
    chosen = {name: subject for name, subject in SUBJECTS.items() if has(subject)}
    return pytest.mark.parametrize("subject", chosen.values(), ids=chosen.keys())


constant_keeping_subject = _where(lambda subject: subject.constant_dtype is not None)


#: For each subject all of `TENSORS`, of types that take turns from tensor to tensor and from subject to subject.
IN_TURNS = [
    [(tensor, make, DTYPES[(first + place) % len(DTYPES)]) for place, (tensor, make) in enumerate(TENSORS.items())]
    for first in range(len(SUBJECTS))
]
subject_in_turns = pytest.mark.parametrize(
    "subject, tensors", list(zip(SUBJECTS.values(), IN_TURNS, strict=True)), ids=SUBJECTS.keys()
)


UNBIASED = [name for name, subject in SUBJECTS.items() if subject.is_unbiased]
#: Of each format one, and some ways to divide a tensor.
OF_EACH_KIND = (
    *("uniform-stochastic-2", "uniform-stochastic-12", "uniform-channel", "uniform-bucket-7", "uniform-bucket-None"),
    *("mixed-2-4", "mixed-tensor", "L4-stochastic", "weibull-2", "weibull-bucket-None"),
    *("dual-2", "sign-magnitude", "sign-magnitude-l2"),
)


def _same(packed: PackedActivation, other: PackedActivation) -> bool:
    return all(map(torch.equal, packed.tensors, other.tensors))


@every_subject
def test_dequantize_overlapping_windows_gives_a_dense_tensor(subject: Subject):
    x = torch.arange(30.0).unfold(0, 5, 2)
    packed = subject.quantizer.quantize(x, seed=1)
    y = packed.dequantize()
    assert y.shape == x.shape and y.is_contiguous()
    assert ((y - x).abs() <= subject.tolerance(x, packed)).all()


@every_subject
def test_tensors_of_every_layout_come_back_from_their_bytes(subject: Subject):
    """In shape, strides and type, also into given memory; the bytes are those of the parts."""
    torch.manual_seed(0)
    for name, make in TENSORS.items():
        x = make()
        before = x.detach().clone()
        packed = subject.quantizer.quantize(x, seed=3)
        y = packed.dequantize()
        assert (y.shape, y.stride(), y.dtype, y.device) == (x.shape, x.stride(), x.dtype, x.device), name
        assert not y.requires_grad, name
        assert torch.equal(x, before), name
        parts = packed.quantizer.parts(packed.layout)
        assert tuple((t.dtype, t.numel()) for t in packed.tensors) == tuple((p.dtype, p.numel) for p in parts), name
        needed = sum(part.numel * part.dtype.itemsize for part in parts)
        aligning = sum(part.dtype.itemsize - 1 for part in parts)
        assert needed <= packed.nbytes == packed.buffer.numel() <= needed + aligning
        assert packed.codes.dtype == packed.buffer.dtype == torch.uint8
        assert packed.layout.numel or packed.nbytes == 0
        rebuilt = torch.zeros_like(packed.buffer)
        for part, values in zip(packed.spec.split(rebuilt), packed.tensors, strict=True):
            part.copy_(values)
        assert torch.equal(rebuilt, packed.buffer), name  # zeros between parts
    column = torch.randn(96, 1)
    expanded, plain = (subject.quantizer.quantize(x, seed=0) for x in (column.expand(96, 50), column[:, 0]))
    assert expanded.nbytes == plain.nbytes


@subject_in_turns
def test_values_are_within_a_step_and_products_those_of_two_steps(subject: Subject, tensors: list[tuple]):
    torch.manual_seed(0)
    for place, (name, make, dtype) in enumerate(tensors):
        x = make().detach().to(dtype)
        packed = subject.quantizer.quantize(x, seed=5)
        error = (packed.dequantize().double() - x.double()).abs()
        assert (error <= subject.tolerance(x, packed)).all(), (name, dtype)
        same = torch.empty_like(x).copy_(torch.randn(x.shape))
        contiguous = torch.randn(x.shape, dtype=dtype)
        gaps = torch.randn((*x.shape, 2), dtype=dtype)[..., 1]
        for other in (same, contiguous, gaps, torch.randn(x.shape))[place % 2 :: 2]:
            expected = packed.dequantize() * other
            product = packed.dequantize_multiply(other)
            assert product.dtype == expected.dtype and torch.equal(product, expected), (name, dtype)


@every_subject
def test_quantize_repeats_with_the_seed_which_torchs_generator_draws(subject: Subject):
    x = torch.randn(4, 600)
    first = subject.quantizer.quantize(x, seed=12345)
    assert _same(first, subject.quantizer.quantize(x, seed=12345))
    assert _same(first, subject.quantizer.quantize(x, seed=torch.tensor(12345)))
    assert _same(first, subject.quantizer.quantize(x, seed=12345 + 2**64))
    noisy = subject.is_stochastic and subject.is_noisy
    assert torch.equal(first.buffer, subject.quantizer.quantize(x, seed=12346).buffer) != noisy
    torch.manual_seed(7)
    first, second = subject.quantizer.quantize(x), subject.quantizer.quantize(x)
    after = torch.rand(())
    torch.manual_seed(7)
    assert _same(first, subject.quantizer.quantize(x)) and _same(second, subject.quantizer.quantize(x))
    if subject.is_stochastic:
        torch.manual_seed(7)
        assert _same(first, subject.quantizer.quantize(x, seed=draw_seed()))
    else:
        torch.manual_seed(7)
        assert torch.equal(after, torch.rand(()))


@constant_keeping_subject
def test_dequantize_of_a_constant_is_exact(subject: Subject):
    for constant in (0.0, -0.0, 1.0, -3.14159, 1e-30, 65504.0):
        value = torch.tensor(constant, dtype=subject.constant_dtype).item()  # representable as minimum or scale
        for shape in ((1300,), (2, 3, 100)):
            x = torch.full(shape, value)
            assert torch.equal(subject.quantizer.quantize(x, seed=1).dequantize(), x), (value, shape)
    for constant in (0.0, 1.0, -3.0):  # beside what is not finite
        x, missing = _with_missing(torch.full((2, 3, 300), constant), NOT_FINITE, 9)
        y = subject.quantizer.quantize(x, seed=1).dequantize()
        assert (y[~missing] == constant).all() and (y[missing].isnan() | (y == x)[missing]).all()


def _with_zeros(subject: Subject) -> dict[str, Tensor]:
    """Tensors with elements that are exactly 0, few or many, at an end of the range of their group or inside."""
    x = torch.randn(2, 5, 640)
    few = torch.rand(x.shape) < 0.01
    tensors = {
        "a ReLU": x.relu(),
        "its negative": -x.relu(),
        "the end of an exponential": torch.where(few, 0.0, (x - 3).exp()),
        "a mask": torch.where(few, torch.finfo(torch.bfloat16).min, 0.0),
        "not finite": x.relu().masked_fill(torch.rand(x.shape) < 0.001, torch.nan),
    }
    if subject.two_signs:
        tensors |= {
            "few": x.masked_fill(few, 0.0),
            "many": torch.dropout(x, 0.5, True),
            "a padding": torch.nn.functional.pad(x[..., 2:-2], (2, 2)),
            "far": (x + 5).masked_fill(few, 0.0),
            "one far below": torch.where(torch.arange(640) == 5, -9.0, x.abs() + 3).masked_fill(few, -0.0),
            "both, not finite": x.masked_fill(few, 0.0).masked_fill(torch.rand(x.shape) < 0.001, torch.inf),
        }
    return tensors


@every_subject
def test_an_exact_zero_decodes_to_exact_zero(subject: Subject):
    torch.manual_seed(0)
    for place, (name, x) in enumerate(_with_zeros(subject).items()):
        x = x.to(DTYPES[place % len(DTYPES)])
        packed = subject.quantizer.quantize(x, seed=place)
        y = packed.dequantize()
        assert (y[x == 0] == 0).all(), (name, x.dtype)
        product = packed.dequantize_multiply(torch.where(x == 0, 1e4, 1.0).to(x.dtype))
        assert (product[x == 0] == 0).all(), (name, x.dtype)
        if name != "a mask" and (subject.two_signs or name != "not finite"):  # where all of a bucket is 0
            missing = ~x.isfinite()
            tolerance = subject.tolerance(x.masked_fill(missing, 0.0), packed)
            assert ((y.double() - x.double()).abs() <= tolerance)[~missing].all(), (name, x.dtype)


@pytest.mark.parametrize(
    "name", some_of([name for name in UNBIASED if SUBJECTS[name].two_signs], quick=OF_EACH_KIND[1::2])
)
def test_quantize_is_unbiased_beside_zeros(name: str):
    """At the ends of ranges as well, which the grid exceeds."""
    torch.manual_seed(0)
    x = _with_ends(torch.float32)
    _assert_unbiased(SUBJECTS[name], x.masked_fill(torch.rand(x.shape) < 0.05, 0.0), draws=400)


NOT_FINITE = (float("nan"), float("inf"), -float("inf"))


def _with_missing(x: Tensor, values: tuple[float, ...], count: int) -> tuple[Tensor, Tensor]:
    """A copy with these values at random positions, which are True in a mask."""
    places = torch.randperm(x.numel())[:count]
    x = x.clone()
    x.view(-1)[places] = torch.tensor(values).repeat(-(-count // len(values)))[:count].to(x.dtype)
    return x, ~x.isfinite()


@pytest.mark.parametrize(
    "subject, values",
    [
        *(pytest.param(subject, NOT_FINITE, id=name) for name, subject in SUBJECTS.items()),
        *(
            pytest.param(SUBJECTS[name], (value,), marks=() if place % 3 == turn else pytest.mark.exhaustive)
            for place, name in enumerate(OF_EACH_KIND)
            for turn, value in enumerate(NOT_FINITE)
        ),
    ],
)
def test_what_is_not_finite_decodes_to_nan_and_spares_the_rest(subject: Subject, values: tuple[float, ...]):
    """Finite elements of its group are off by a step at most, those of other groups keep their values."""
    torch.manual_seed(len(str(values)))
    for place, dtype in enumerate(DTYPES):
        clean = torch.randn(2, 4, 640).to(dtype)
        x, missing = _with_missing(clean, values, (1, 12)[place % 2])
        before, packed = subject.quantizer.quantize(clean, seed=1), subject.quantizer.quantize(x, seed=1)
        y = packed.dequantize()
        assert (y[missing].isnan() | (y[missing] == x[missing])).all()
        assert y[~missing].isfinite().all()
        error = (y.double() - x.double()).abs()[~missing]
        finite = x.masked_fill(missing, 0.0)
        assert (error <= subject.tolerance(finite, packed)[~missing]).all()
        group = groups_of(packed)
        touched = torch.isin(group, group[missing])
        assert torch.equal(y[~touched], before.dequantize()[~touched])
        factor = torch.randn(x.shape).to(dtype)
        product = packed.dequantize_multiply(factor)
        torch.testing.assert_close(product, y * factor, rtol=0, atol=0, equal_nan=True)


@every_subject
def test_what_is_not_finite_leaves_the_range_of_the_others(subject: Subject):
    """Where nothing but the marked elements differs, the scale is that of the others with a level less.

    A tensor of nothing finite decodes to NaN or itself.
    """
    for value in NOT_FINITE:
        x = torch.full((2, 3, 300), value)
        packed = subject.quantizer.quantize(x, seed=1)
        for y in (packed.dequantize(), packed.dequantize_multiply(torch.ones_like(x))):
            assert (y.isnan() | (y == x)).all(), value
    torch.manual_seed(0)
    if subject.largest_error is None and subject.keeps_range:
        x, missing = _with_missing(torch.rand(4, 4, 640), NOT_FINITE, 30)
        step = subject.step(subject.quantizer.quantize(x, seed=1), x)
        plain = subject.step(subject.quantizer.quantize(x.masked_fill(missing, 0.5), seed=1), x)
        assert (step[~missing] <= 2.02 * plain[~missing]).all()  # 2 bits: 3 gaps become 2, and bfloat16 rounds up


@pytest.mark.parametrize("subject, signs", taking_turns(list(SUBJECTS), [(-1,), (1,), (-1, 1)]), ids=str)
def test_the_largest_floats_decode_to_finite_values(subject: str, signs: tuple[int, ...]):
    """Masks leave the lowest float; the others of its group are then off by a huge step, but none becomes NaN."""
    torch.manual_seed(0)
    quantizer = SUBJECTS[subject].quantizer
    for dtype in DTYPES:
        x = torch.randn(4, 4, 640).to(dtype)
        for i, sign in enumerate(signs):
            x[0, 1, 2 + i] = sign * min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        packed = quantizer.quantize(x, seed=1)
        y = packed.dequantize()
        assert y.isfinite().all() and packed.dequantize_multiply(torch.full_like(x, 0.5)).isfinite().all()
        group = groups_of(packed)
        if len(group.unique()) > 1:
            untouched = ~torch.isin(group, group[0, 1, 2:4])
            assert (y[untouched].abs() < 1e4).all()


@every_subject
def test_packed_activation_survives_edits_of_the_input_pickle_copy_and_rebuilding(subject: Subject):
    x = torch.randn(5, 300)
    packed = subject.quantizer.quantize(x, seed=1)
    y = packed.dequantize()
    x.mul_(1000).add_(3)
    subject.quantizer.quantize(x, seed=1)
    assert torch.equal(packed.dequantize(), y)
    assert torch.equal(pickle.loads(pickle.dumps(packed)).dequantize(), y)
    assert torch.equal(copy.deepcopy(packed).dequantize(), y)
    spec = pickle.loads(pickle.dumps(packed.spec))
    assert spec == packed.spec and hash(spec) == hash(packed.spec)
    assert torch.equal(PackedActivation(spec, packed.buffer).dequantize(), y)


UNBIASED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("name", some_of(UNBIASED, quick=OF_EACH_KIND))
def test_quantize_is_unbiased(name: str):
    """Mean over draws within 5 standard errors; half a unit of the type and 2^-17 steps are the format's own bias."""
    dtype = UNBIASED_DTYPES[UNBIASED.index(name) % len(UNBIASED_DTYPES)]
    _assert_unbiased(SUBJECTS[name], _with_ends(dtype), draws=400)


@pytest.mark.parametrize("name", some_of(OF_EACH_KIND, quick=4))
def test_quantize_is_unbiased_beside_what_is_not_finite(name: str):
    _assert_unbiased(SUBJECTS[name], _with_gaps(), draws=400)


UNEVEN_SUBJECTS = (
    *("uniform-stochastic-2", "uniform-stochastic-4", "uniform-dithered-4", "uniform-dithered-8"),
    *("mixed-2-4", "sample-4"),
)


@pytest.mark.parametrize(
    "name, kind", taking_turns(UNEVEN_SUBJECTS, ["tails", "columns", "offset", "lognormal", "outlier"])
)
def test_quantize_is_unbiased_in_uneven_buckets(name: str, kind: str):
    torch.manual_seed(1)
    x = torch.randn(4, 512).bfloat16().float()
    others = {
        "tails": torch.distributions.StudentT(2.0).sample(x.shape).bfloat16().float(),  # exact where far
        "columns": x * 8.0 ** (torch.arange(512) % 4),
        "offset": torch.where(torch.rand(x.shape) < 0.1, -9999.0, 1013 + 10 * x),
        "lognormal": (2 * x).exp().bfloat16().float(),
        "outlier": x.index_fill(1, torch.tensor(7), 200.0),
    }
    _assert_unbiased(SUBJECTS[name], others[kind], draws=400)


def _with_ends(dtype: torch.dtype) -> Tensor:
    """Random values, with the ends of their range at those of the tensor."""
    torch.manual_seed(0)
    x = torch.rand(2, 2, 96).mul(3).sub(1).to(dtype)
    x[0, 0, 0], x[1, 1, 95] = -1.0, 2.0
    return x


def _with_gaps() -> Tensor:
    torch.manual_seed(0)
    return _with_missing(torch.rand(2, 2, 96).mul(3).sub(1), NOT_FINITE, 9)[0]


def _assert_unbiased(subject: Subject, x: Tensor, draws: int) -> None:
    """5 standard errors, as draws estimate them, and 12.5 steps over the draws: Bernstein's bound for rare steps."""
    exact, finite = x.double(), x.isfinite()
    total, squares = torch.zeros(2, *x.shape, dtype=torch.float64)
    for seed in range(draws):
        y = subject.quantizer.quantize(x, seed=seed).dequantize().double()
        total += y
        squares += (y - exact) ** 2
    # A mixture draws its steps, too: the widest are those of some of these draws.
    steps = [subject.step(subject.quantizer.quantize(x, seed=seed), x) for seed in range(20)]
    step = torch.stack(steps).amax(0).double()
    mean = total / draws
    error = 5 * (squares / draws / draws).sqrt() + 12.5 * step / draws
    slack = (2.0 * torch.finfo(x.dtype).eps + 2**-21) * exact.abs().clamp(min=1) + step * 2**-17
    assert ((mean - exact).abs() <= error + slack)[finite].all()


@pytest.mark.parametrize("rounding", Rounding)
def test_one_bit_beside_what_is_not_finite_is_the_middle(rounding: Rounding):
    """One code marks, and one is left: half of the range is the least that the others can be off by."""
    x = torch.tensor([-1.0, 3.0, float("nan"), 0.5, float("inf")])
    packed = UniformQuantizer(bit_width=1, rounding=rounding, bucket_size=5).quantize(x, seed=0)
    assert packed.dequantize()[[0, 1, 3]].tolist() == [1.0, 1.0, 1.0]
    assert packed.dequantize()[[2, 4]].isnan().all()
