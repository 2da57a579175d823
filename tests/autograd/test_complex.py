"""Complex activations, as of Fourier layers, stay as in PyTorch; what is real around them is packed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import brevact
from brevact import LosslessBackward, StochBackward2bit
from brevact.autograd import BackwardSettings, region
from tests.autograd.measuring import settings, watch_saved


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
def test_complex_tensors_are_not_packed(make):
    module, x = make(), torch.randn(8, 6, 64, requires_grad=True) * 1
    plain, stored = [], []
    for chosen, found in ((None, plain), (settings(), stored)):
        with watch_saved() as saved, region(chosen):
            module(x)
        found += [t.shape for t in saved.tensors if t.is_complex()]
    assert stored == plain and plain


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


def test_compiled_models_leave_complex_tensors_to_the_compiler():
    torch._dynamo.reset()
    module, x = Spectral(), torch.randn(8, 6, 64, requires_grad=True)
    expected = module(x)
    brevact.quantize_backward(module, StochBackward2bit)
    out = torch.compile(module, backend="aot_eager", fullgraph=True)(x * 1)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert x.grad.isfinite().all()
