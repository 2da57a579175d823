"""The kernel of batch norm's forward pass gives PyTorch's bits, or leaves the work to PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from brevact.autograd import region
from brevact.autograd.ops import norm_formulas as formulas
from brevact.cpu_kernels import batch_norm as kernels
from tests.autograd.measuring import settings

needs_same_bits = pytest.mark.skipif(not kernels.gives_bits_of_torch(), reason="PyTorch adds in another way here")
#: x86-64 and a release whose sums are known: there the kernel must run.
IS_KNOWN = torch.__version__.startswith("2.13") and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
SHAPES = [
    (16, 96, 4, 4),
    (4, 300, 2, 2),
    (3, 5, 40, 33),
    (5, 9, 1, 2),
    (2, 3, 2, 3, 5),
    (1, 4, 6, 6),
    (3, 2, 9),
]
VALUES = {
    "normal": lambda shape: torch.randn(shape) * 3 + 1,
    "far from zero": lambda shape: torch.randn(shape) + 1e5,
    "constant": lambda shape: torch.full(shape, 0.1),
    "zeros": torch.zeros,
    "of all magnitudes": lambda shape: torch.randn(shape) * 10 ** (torch.rand(shape) * 60 - 30),
    "that cancel": lambda shape: torch.randn(shape).sign() * 1e20 + torch.randn(shape),
    "subnormal": lambda shape: torch.randn(shape) * 1e-40,
    "large": lambda shape: torch.randn(shape) * 1e38,
}


def arguments(x: Tensor, present: int) -> tuple[Tensor | None, ...]:
    """Weight, bias, running mean and variance, those whose bits are set."""
    channels = x.shape[1]
    made = torch.randn(channels), torch.randn(channels), torch.randn(channels), torch.rand(channels)
    return tuple(y if present >> place & 1 else None for place, y in enumerate(made))


def check_bits(x: Tensor, given: tuple[Tensor | None, ...], momentum: float = 0.3, eps: float = 1e-3) -> None:
    other = [None if y is None else y.clone() for y in given]
    versions = [y._version for y in given if y is not None]
    numbers = momentum, eps, True
    found, wanted = kernels.batch_norm(x, *given, *numbers), formulas.batch_norm.reference(x, *other, *numbers)
    assert found is not NotImplemented
    pairs = zip((*found, *given), (*wanted, *other), strict=True)
    for got, want in pairs:
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(got.signbit() | want.isnan(), want.signbit() | want.isnan())
            assert got.stride() == want.stride()
    assert [y._version for y in given if y is not None] == versions


@needs_same_bits
@pytest.mark.parametrize("values", VALUES)
def test_bits_are_those_of_torch(values: str):
    torch.manual_seed(0)
    for index, shape in enumerate(SHAPES):
        x = VALUES[values](shape)
        check_bits(x, arguments(x, (15, 0, 3, 12, 13, 1)[index % 6]), (0.3, 0.0, 1.0, -2.0)[index % 4])


def _with(bad: float) -> Tensor:
    x = torch.randn(4, 6, 5, 5)
    x[1, 2, 3, 3] = bad
    return x


@needs_same_bits
@pytest.mark.parametrize(
    "make",
    [
        *(lambda bad=bad: _with(bad) for bad in (torch.nan, torch.inf, -torch.inf)),
        lambda: torch.randn(6 * 25).as_strided((1, 6, 5, 5), (7, 25, 5, 1)),
        lambda: torch.randn(4 * 35).as_strided((4, 5, 7, 1), (35, 7, 1, 5)),
    ],
    ids=["nan", "inf", "-inf", "strides of a single sample", "strides of single elements"],
)
def test_bits_of_unusual_tensors(make):
    x = make()
    check_bits(x, arguments(x, 15))


@needs_same_bits
def test_by_any_number_of_threads():
    threads = torch.get_num_threads()
    x = torch.randn(8, 130, 16, 16)
    given = arguments(x, 3)
    try:
        found = []
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(kernels.batch_norm(x, *given, 0.1, 1e-5, True)[0])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], y) for y in found)


@needs_same_bits
def test_sums_that_may_round_in_another_way_are_added_one_by_one():
    """So much cancels that the order of the sum decides on the mean."""
    x = torch.randn(2, 3, 40, 40)
    large = torch.randn(1200) * 2.0**40
    x[:, 1] = torch.cat([large, -large.flip(0), torch.randn(800)])[torch.randperm(3200)].view(2, 40, 40)
    given = arguments(x, 3)
    values = x[:, 1].double().flatten()
    orders = {values[torch.randperm(len(values))].cumsum(0)[-1].div(len(values)).float().item() for _ in range(20)}
    assert len(orders) > 1
    check_bits(x, given)
    for exponent in (-60, -100, -120, -126):  # at the end, squares in float32 are 0
        check_bits(x * 2.0**exponent, given, eps=1e-30)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 6, 5, 5).double(),
        torch.randn(4, 6, 5, 5).bfloat16(),
        torch.randn(4, 6, 5, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6),
        torch.randn(4, 6, 1, 1),
        torch.randn(4, 1, 5, 5),
        torch.randn(4, 6, 5, 7)[..., 1:],
        torch.randn(0, 6, 5, 5),
        torch.randn(4, 0, 5, 5),
        torch.randn(4, 6, 0, 5),
    ],
    ids=lambda x: f"{x.dtype}-{tuple(x.shape)}-{x.stride()}",
)
def test_other_tensors_are_left_to_torch(x: Tensor):
    assert kernels.batch_norm(x, None, None, None, None, 0.1, 1e-5, True) is NotImplemented


@pytest.mark.parametrize("place", range(4))
def test_other_parameters_are_left_to_torch(place: int):
    x = torch.randn(4, 6, 5, 5)
    for bad in (torch.ones(6).double(), torch.ones(12)[::2]):
        given = list(arguments(x, 15))
        given[place] = bad
        assert kernels.batch_norm(x, *given, 0.1, 1e-5, True) is NotImplemented


@pytest.mark.parametrize(
    ("momentum", "eps"), [(torch.tensor(0.1), 1e-5), (1, 1e-5), (None, 1e-5), (0.1, 0.0), (0.1, 0)]
)
def test_other_numbers_are_left_to_torch(momentum, eps):
    assert kernels.batch_norm(torch.randn(4, 6, 5, 5), *[None] * 4, momentum, eps, True) is NotImplemented


def test_the_kernel_runs_where_the_sums_of_torch_are_known():
    if not IS_KNOWN:
        pytest.skip("another release or processor")
    assert kernels.gives_bits_of_torch()


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_the_norm():
    model = nn.Sequential(nn.Conv2d(3, 40, 3), nn.BatchNorm2d(40), nn.SiLU())
    with region(settings(bit_width=4, min_numel=256)), Seen() as seen:
        model(torch.randn(8, 3, 12, 12))
    assert "native_batch_norm" in seen.names


@needs_same_bits
def test_subnormal_numbers_that_count_as_zero_on_one_thread_alone():
    if not torch.set_flush_denormal(True):
        pytest.skip("the processor cannot")
    try:
        assert kernels.batch_norm(torch.randn(4, 6, 5, 5), *[None] * 4, 0.1, 1e-5, True) is NotImplemented
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("momentum", [0.3, None])
def test_a_network_in_training_goes_forward_as_without_a_region(momentum):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(40, momentum=momentum)
    model = nn.Sequential(nn.Conv2d(3, 40, 3), norm, nn.SiLU(), nn.Conv2d(40, 4, 1))
    images, found = torch.randn(8, 3, 12, 12), []
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for each in (None, settings(bit_width=4, min_numel=256)):
        model.load_state_dict(start)
        with region(each):
            out = model(images)
        out.sum().backward()
        found.append((out.detach(), *(value.clone() for value in model.state_dict().values())))
    for plain, packed in zip(*found, strict=True):
        assert torch.equal(plain, packed)
