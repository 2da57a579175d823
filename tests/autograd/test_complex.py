"""Complex activations, as of Fourier layers and state spaces: packed as pairs of real numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import brevact
from brevact import LosslessBackward, StochBackward2bit
from brevact.autograd import BackwardSettings, SaveMode, region
from brevact.autograd.saving.storage_report import NO_FLOATS, recording
from tests.autograd.measuring import Mirrored, settings, watch_saved


class Convolution(nn.Module):
    """A long convolution by a kernel of the signal's length, as products of spectra."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(6, 64))

    def forward(self, x: Tensor) -> Tensor:
        product = torch.fft.rfft(x, 128) * torch.fft.rfft(self.kernel, 128)
        return torch.fft.irfft(product, 128)[..., :64]


class Spectral(nn.Module):
    """A Fourier layer: the lowest frequencies of each channel meet complex matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, 20, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft(x)[..., :20]
        return torch.fft.irfft(torch.einsum("bix,iox->box", found, self.weight), 64)


class Correlation(nn.Module):
    """The correlation of two projections, as attention of Autoformer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.query(x)) * torch.conj(torch.fft.rfft(self.key(x))), 64)


class Rotary(nn.Module):
    """Pairs of elements turned by angles that train."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Parameter(torch.rand(32))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], 32, 2)) * torch.polar(
            torch.ones_like(self.angles), self.angles
        )
        return torch.view_as_real(turned).flatten(-2)


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.3 + 0.7j))

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.rate * torch.complex(0.5 * x, x)).real


class Magnitude(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x).abs()


class Matrices(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        z = torch.fft.fft(x)
        return (z @ z.mH).real


MODULES = (Convolution, Spectral, Correlation, Rotary, Wave, Magnitude, Matrices)
by_name = pytest.mark.parametrize("make", MODULES, ids=lambda make: make.__name__)


def run(module: nn.Module, x: Tensor, chosen: BackwardSettings | None, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    leaf = x.clone().requires_grad_()
    torch.manual_seed(seed)
    with region(chosen):
        out = module(leaf * 1)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin().view(out.shape).to(out.dtype)
    return out.detach(), list(torch.autograd.grad((out * weights).sum(), [leaf, *module.parameters()]))


@by_name
def test_forward_and_lossless_gradients_are_torchs_to_the_last_bit(make):
    module, x = make(), torch.randn(8, 6, 64)
    expected_out, expected = run(module, x, None)
    lossless = BackwardSettings(brevact.quantizer(LosslessBackward), min_numel=0)
    for chosen in (settings(), lossless):
        out, grads = run(module, x, chosen)
        assert torch.equal(out, expected_out)
    for grad, reference in zip(grads, expected, strict=True):
        assert torch.equal(grad, reference) and grad.stride() == reference.stride()


@by_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eight_bits_err_by_less_than_a_tenth(make, dtype):
    module, x = make(), torch.randn(8, 6, 64).to(dtype)
    if dtype is torch.float64:
        module = module.double() if make is not Spectral else module.to(torch.complex128)
    _, expected = run(module, x, None)
    _, grads = run(module, x, settings(bit_width=8, bucket_size=512))
    for grad, reference in zip(grads, expected, strict=True):
        assert grad.dtype is reference.dtype
        assert (grad - reference).abs().norm() < 0.1 * reference.abs().norm()


@by_name
def test_gradients_are_affine_in_what_is_stored(make):
    """Errors of both signs cancel, so that unbiased rounding gives an unbiased gradient."""
    module, x = make(), torch.randn(8, 6, 64)
    _, expected = run(module, x, None)
    plus, minus = (run(module, x, BackwardSettings(Mirrored(sign), min_numel=0))[1] for sign in (1, -1))
    # Of a parameter behind which there are two layers, it is a product of the errors of both.
    affine = slice(1) if make in (Correlation, Wave) else slice(None)
    for a, b, reference in zip(plus[affine], minus[affine], expected[affine], strict=True):
        top = reference.abs().max().item()
        torch.testing.assert_close((a + b) / 2, reference, rtol=0, atol=64 * torch.finfo(torch.float32).eps * top)
    assert max(float((a - reference).abs().max()) for a, reference in zip(plus, expected, strict=True)) > 0


@by_name
def test_quantize_on_backward_gives_the_same_gradients(make):
    module, x = make(), torch.randn(8, 6, 64)
    _, quantized = run(module, x, settings())
    _, deferred = run(module, x, settings(save_mode=SaveMode.QUANTIZE_ON_BACKWARD))
    assert all(torch.equal(a, b) for a, b in zip(quantized, deferred, strict=True))


@by_name
def test_no_complex_activation_is_kept(make):
    module, x = make(), torch.randn(8, 6, 64, requires_grad=True) * 1
    plain, stored = [], []
    for chosen, found in ((None, plain), (settings(), stored)):
        with watch_saved() as saved, region(chosen):
            module(x)
        found += [t for t in saved.tensors if t.numel() >= 8 * 6 * 20]
    assert any(t.is_complex() for t in plain)
    weights = {p.data_ptr() for p in module.parameters()}
    assert all(t.dtype is torch.uint8 or t.data_ptr() in weights for t in stored)


def test_a_spectrum_that_two_products_read_is_packed_once():
    x = torch.fft.rfft(torch.randn(8, 64, requires_grad=True) * 1)
    a, b = (torch.randn(33, dtype=torch.complex64, requires_grad=True) for _ in range(2))
    with watch_saved() as saved, region(settings()):
        x * (a * 1)
        x.conj() * (b * 1)
    codes = {t.data_ptr() for t in saved.tensors if t.dtype is torch.uint8}
    assert len(codes) == 3  # that of the spectrum, and those of a and b


@pytest.mark.parametrize("make", [lambda x: x.t(), lambda x: x[:, 3:40], lambda x: x[:1].expand(9, -1), Tensor.conj])
def test_views_keep_their_values_and_strides(make):
    z = make(torch.randn(8, 64, dtype=torch.complex64))
    weight = torch.randn(z.shape, dtype=torch.complex64, requires_grad=True)
    with region(settings(bit_width=8, rounding=brevact.Rounding.NEAREST)):
        out = weight * z
    (grad,) = torch.autograd.grad(torch.view_as_real(out.resolve_conj()).sum(), weight)
    expected = (1 + 1j) * z.conj()
    step = (torch.view_as_real(z.resolve_conj()).max() - torch.view_as_real(z.resolve_conj()).min()) / 255
    assert (grad - expected).abs().max() <= 2 * step


SQUARED: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: (torch.complex(x, x * x) * torch.complex(x + 1, 2 * x)).real,
    "squared magnitude": lambda x: (torch.complex(x, x + 1) * torch.complex(x, x + 1).conj()).real,
    "magnitude by itself": lambda x: (z := torch.complex(x, x.sin())).mul(z.conj()).real,
    "exp": lambda x: torch.complex(x, x).exp().imag,
    "matrix product": lambda x: (torch.complex(x, x) @ torch.complex(x, 1 - x).mH).imag,
    "correlation": lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(x.sin()).conj()),
}


@pytest.mark.parametrize("read", SQUARED.values(), ids=SQUARED)
def test_second_derivatives_tell_conjugates_apart(read):
    """The second graph saves decoded tensors, and conjugates of them in the same memory."""

    def gradient(chosen: BackwardSettings | None) -> Tensor:
        x = torch.randn(4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with region(chosen):
            (first,) = torch.autograd.grad(read(x * 1).square().sum(), x, create_graph=True)
            loss = first.square().sum()
        return torch.autograd.grad(loss, x)[0]

    found = gradient(settings(bit_width=32, double_backward=True))
    torch.testing.assert_close(found, gradient(None))


def test_division_by_complex_numbers_stays_exact():
    x, y = (torch.fft.rfft(torch.randn(8, 64, requires_grad=True) * 1) for _ in range(2))
    grads = []
    for chosen in (None, settings()):
        with region(chosen):
            out = x / y
        grads.append(torch.autograd.grad(torch.view_as_real(out).sum(), [x, y], retain_graph=True))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_product_of_complex_data_and_a_weight_is_an_activation():
    """Data without gradients, such as the spectrum of an image."""
    weight = nn.Parameter(torch.randn(6, 33, dtype=torch.complex64))
    with watch_saved() as saved, region(settings()):
        y = torch.fft.rfft(torch.randn(8, 6, 64)) * weight
        y * y
    assert all(t.dtype is torch.uint8 or t.numel() == weight.numel() for t in saved.tensors)


@pytest.mark.parametrize("min_numel", [0, 10**6])
def test_reports_say_why(min_numel):
    module, x = Convolution(), torch.randn(8, 6, 64, requires_grad=True) * 1
    found = []
    with recording() as recorder:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (found.append(recorder.stored(t)), t)[1], lambda t: t):
            with region(settings(min_numel=min_numel)):
                module(x)
    assert found and all(each.why != NO_FLOATS for each in found)
    assert any(each.how == "packed" for each in found) is (min_numel == 0)


def test_compiled_models_leave_complex_tensors_to_the_compiler():
    torch._dynamo.reset()
    module, x = Spectral(), torch.randn(8, 6, 64, requires_grad=True)
    expected = module(x)
    brevact.quantize_backward(module, StochBackward2bit)
    out = torch.compile(module, backend="aot_eager", fullgraph=True)(x * 1)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert x.grad.isfinite().all()
