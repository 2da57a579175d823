"""Interpreted kernels: the laws of all backends, and blocks far into a tensor; see `test_interpreted`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from brevact import triton_kernels
from brevact.geometry import Geometry, Place
from brevact.quantizers import Layout, Rounding, UniformQuantizer, reference, uneven
from brevact.quantizers.reference import column_bits
from brevact.triton_kernels import floats
from brevact.triton_kernels.groups import group_of
from brevact.triton_kernels.normalize import load_statistics_of_plane, values_of
from brevact.triton_kernels.uniform import dequantize_whole_blocks, quantize_whole_blocks
from tests.crosses import taking_turns
from tests.quantizers.kernel_laws import *  # noqa: F403
from tests.quantizers.kernel_laws import Backend, check_kernel_op
from tests.quantizers.same_values import assert_same_values

BLOCK = 512
EVERY_16_BITS = torch.arange(1 << 16).to(torch.int16)
_filled = Backend(triton_kernels).filled


@pytest.fixture
def backend() -> Backend:
    return Backend(triton_kernels, is_interpreted=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["map_levels", "look_up"])
def test_kernel_op_equals_its_reference_in_every_call(name: str):
    check_kernel_op(name, triton_kernels)


@triton.jit
def _groups_far_away_kernel(first_ptr, inner_ptr, groups_ptr, group_ptr):
    offset = tl.arange(0, 512)
    group = group_of(tl.load(first_ptr), offset, tl.load(inner_ptr), tl.load(groups_ptr))
    tl.store(group_ptr + offset, group)


@pytest.mark.parametrize("first", [2**31, 2**32 + 8, 2**45 - 512])
@pytest.mark.parametrize("inner, groups", [(512, 2**20 // 3), (7, 2**40), (1, 99), (2**33, 3)])
def test_groups_of_elements_far_into_a_tensor(first: int, inner: int, groups: int):
    found = torch.empty(512, dtype=torch.int64)
    _groups_far_away_kernel[(1,)](*(torch.tensor(each) for each in (first, inner, groups)), found)
    assert torch.equal(found, (first + torch.arange(512)) // inner % groups)


@triton.jit
def _stretch_kernel(x_ptr, y_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_ptr + at, floats.stretch(tl.load(x_ptr + at)))


def _fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x y + z, float32, rounded once: from a float64 sum whose last bit is set where it is not exact."""
    product = x.astype(np.float64) * y
    total = product + z
    back = total - product
    rest = (product - (total - back)) + (z - back)
    towards = np.nextafter(total, np.copysign(np.inf, rest))
    return np.where((rest != 0) & (total.view(np.int64) % 2 == 0), towards, total).astype(np.float32)


def _as_compiled(monkeypatch: pytest.MonkeyPatch) -> type:
    builder, of = interpreter.InterpreterBuilder, interpreter.TensorHandle
    monkeypatch.setattr(floats, "_INTERPRETED", False)
    monkeypatch.setattr(builder, "create_fma", lambda own, x, y, z: of(_fused(x.data, y.data, z.data), x.dtype))
    return builder


@triton.jit
def _divide_kernel(x_ptr, divisor_ptr, y_ptr, N: tl.constexpr, RECTIFIES: tl.constexpr):
    at = tl.arange(0, N)
    power, divisor, inverse = floats.parts_of(tl.load(divisor_ptr))
    tl.store(y_ptr + at, floats.quotient_to_clip(tl.load(x_ptr + at), power, divisor, inverse, RECTIFIES))


_LARGEST = torch.finfo(torch.float32).max
_ODD_DIVISORS = (0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 1.1e-38, _LARGEST, 1.9999999, 1.0000001, -0.3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("rectifies", [False, True])
def test_compiled_quotients_are_those_of_exact_division_until_they_are_clipped(
    rectifies, monkeypatch: pytest.MonkeyPatch
):
    _as_compiled(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    any_float = torch.randint(-(2**31), 2**31, (1 << 13,), generator=generator).int().view(torch.float32)
    usual = torch.randn(1 << 13, generator=generator)
    for divisor in (*_ODD_DIVISORS, *any_float[:40].tolist(), *usual[:40].tolist()):
        by = torch.tensor(divisor, dtype=torch.float32)
        near = usual * by  # quotients that are often close to a half
        x = torch.cat([any_float, usual, near, (usual * 4).round() * by / 2, any_float[: 1 << 13] * 0])
        x = torch.cat([x, x[: (1 << 16) - len(x)]])
        y = torch.empty(len(x))
        _divide_kernel[(1,)](x, by, y, len(x), rectifies)
        exact = (torch.where(x < 0, 0.0, x) if rectifies else x) / by
        is_far, is_tiny = exact.abs() > 2.0**90, exact.abs() < 2.0**-60
        assert (y.abs()[is_far] > 2.0**89).all() and torch.equal(y.sign()[is_far], exact.sign()[is_far]), divisor
        assert (y.abs()[is_tiny] < 2.0**-59).all(), divisor
        assert_same_values((y + 0.0)[~is_far & ~is_tiny], (exact + 0.0)[~is_far & ~is_tiny])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("error", [0.0, 2.0**-21, -(2.0**-21)])
@pytest.mark.parametrize(
    "x",
    [
        pytest.param(EVERY_16_BITS.view(torch.bfloat16), id="bfloat16"),
        pytest.param(EVERY_16_BITS.view(torch.float16), id="float16"),
        pytest.param(torch.linspace(-2e4, 2e4, 1 << 16), id="float32"),
    ],
)
def test_compiled_stretching_is_the_references_for_any_close_root(x, error, monkeypatch: pytest.MonkeyPatch):
    """GPUs' root has a relative error of 2^-22.9 or less, and their `fma` rounds once."""
    builder = _as_compiled(monkeypatch)
    root, of = builder.create_rsqrt, interpreter.TensorHandle
    monkeypatch.setattr(builder, "create_rsqrt", lambda own, x: of(root(own, x).data * np.float32(1 + error), x.dtype))
    y = torch.empty(len(x))
    _stretch_kernel[(1,)](x.float(), y, len(x))
    assert_same_values(y + 0.0, reference.stretched(x.float()) + 0.0)  # without the sign of zeros


@triton.jit
def _places_kernel(
    first_ptr, index_ptr, factor_ptr, outer, places, span, run, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PLACE: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK // 8)[None, :]
    norm, at = (None, factor_ptr, outer, places, span, run), (tl.load(first_ptr), row, column, BLOCK // 8, ROWS)
    for i in tl.static_range(8):
        _, factor = load_statistics_of_plane(norm, at, i, row < ROWS, BLOCK, PLACE, False, NEAR)
        tl.store(index_ptr + (row * BLOCK + i * (BLOCK // 8) + column), factor)


FAR = 2**40
PLACES = (
    *((Place(FAR, 64, 64 * run, run), 0) for run in (1, 8, 49, 196, 784, 4096)),  # a batch norm's channels
    *((Place(FAR, groups, groups, 1), 0) for groups in (8, 24, 1, 100)),
    *((Place(FAR, 5, 5 * run, run), 0) for run in (2**14, 40_000, 2**29)),
    *((Place(outer, 1, 1, 1), 9999) for outer in (7, 9, 64, 1000, 1024, 100_000)),  # a layer norm's rows
    *((Place(6 * run, 3, 6 * run, 2 * run), 512 * 999) for run in (8, 25, 64, 12_544)),  # a group norm's groups
    *((Place(64 * 16, 16, 16, 1), 0), (Place(320, 16, 32, 2), 0), (Place(100, 2, 10, 5), 0)),
)


@pytest.mark.parametrize("where, near", taking_turns(PLACES, [4, 8]), ids=str)
def test_statistics_of_planes_are_those_of_the_elements(where: tuple[Place, int], near: int):
    place, block = where
    geometry = Geometry(FAR, 4, 512, 512, FAR // 512, True)
    values = values_of(place, geometry)
    for number in {block, block + 1, block + 777}:
        first, numel = number * 512, 4 * 512
        index, element = torch.empty(numel), first + torch.arange(numel)
        expected = element // place.outer * place.row + element % place.inner // place.run
        table = torch.arange(int(expected.max()) + 2, dtype=torch.float32)
        arguments = (torch.tensor(first), index, table, *(values[name] for name in ("outer", "places", "span", "run")))
        _places_kernel[(1,)](*arguments, BLOCK=512, ROWS=4, PLACE=values["PLACE"], NEAR=near)
        assert torch.equal(index.long(), expected), (place, values["PLACE"], number)


@triton.jit
def _block_far_away_kernel(
    x_ptr, codes_ptr, scale_ptr, minimum_ptr, seed_ptr, target_ptr, first_ptr, BITS: tl.constexpr, UNEVEN: tl.constexpr
):
    """Quantize and decode the block at `first`, whose memory is the tensors'."""
    first = tl.load(first_ptr)
    codes_ptr, group = codes_ptr - first // 8 * BITS, first // 512
    scale_ptr, minimum_ptr = scale_ptr - group, minimum_ptr - group
    stored, norm = (codes_ptr, scale_ptr, minimum_ptr), (None, None, 1, 1, 1, 1)
    at = first, tl.zeros((1, 1), tl.int32), tl.arange(0, 64)[None, :], 64, 1
    quantize_whole_blocks(
        x_ptr - first, stored, seed_ptr, norm, at, BITS, True, DITHERED=False, INNER=512, BLOCK=512, ROWS=1, PLACE=0
    )
    dequantize_whole_blocks(
        stored, None, target_ptr - first, at, 3e38, norm,
        BITS, BLOCK=512, INNER=512, ALIGNED=True, PLACE=0, UNEVEN=UNEVEN, ROWS=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    "first_block, far", [(2**22, 0), (2**23 + 5, 1000), (2**36, 0), (2**36, 1000)]
)  # elements up to 2^45: columns beyond 2^32
def test_quantize_blocks_far_into_a_tensor(first_block: int, far: int):
    torch.manual_seed(0)
    bit_width, seed, first = 5, torch.tensor(99), first_block * BLOCK
    x = torch.randn(BLOCK)
    x[100:102] += far
    codes, scale = _filled(BLOCK * bit_width // 8, torch.uint8), _filled(1, torch.bfloat16)
    minimum, target = _filled(1, x.dtype), _filled(BLOCK, x.dtype)
    first_at = torch.tensor(first)
    _block_far_away_kernel[(1,)](x, codes, scale, minimum, seed, target, first_at, bit_width, UNEVEN=far > 0)

    random_bits = column_bits(torch.arange(first // 8, first // 8 + 64), seed).flatten()
    if far:
        own_minimum, s, is_far = uneven.fit(x[None], bit_width)
        steps, m = uneven.positions(x[None], own_minimum, s, is_far, bit_width)[0], own_minimum.view(torch.float32)
        q = reference.round_codes(steps, random_bits)
        values, s = uneven.values(q, own_minimum, s, bit_width, torch.inf), s.view(torch.bfloat16)
    else:
        geometry = UniformQuantizer(bit_width=bit_width, rounding=Rounding.NEAREST).geometry(Layout.of(x))
        m, s, _ = reference.calibrate(x, geometry, torch.bfloat16, torch.float32)
        s = s.float()
        steps = ((x - m) * (1 / s)).clamp(0, 2**bit_width - 1)
        q = reference.round_codes(steps, random_bits)
        values = m + s * q
    assert torch.equal(scale, s) and torch.equal(minimum, m)
    assert torch.equal(codes, reference.pack(q, bit_width, BLOCK))
    assert torch.equal(target, values)
