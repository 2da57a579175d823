"""Grouped matrix products, the layers of mixtures of experts: rows are packed, weights never."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import brevact
from brevact import LosslessBackward, StochBackward2bit, StochBackward4bit
from brevact.autograd import BackwardSettings, region
from tests.autograd.measuring import settings, watch_saved

grouped_mm = torch._grouped_mm
OFFSETS = torch.tensor([100, 100, 300, 384], dtype=torch.int32)


def experts(dtype: torch.dtype = torch.float32, columns: bool = True) -> Tensor:
    """Weights (4, 32, 48), by columns, as a transposed view of a parameter, or by rows."""
    weight = torch.nn.Parameter(torch.randn(4, 48, 32) if columns else torch.randn(4, 32, 48))
    return weight.to(dtype).transpose(-2, -1) if columns else weight.to(dtype)


def gradients(x: Tensor, weight: Tensor, chosen: BackwardSettings | None, seed: int = 0) -> tuple[Tensor, ...]:
    leaf = x.clone().requires_grad_()
    torch.manual_seed(seed)
    with region(chosen):
        out = grouped_mm(leaf * 1, weight, offs=OFFSETS)
    grad = torch.linspace(-1, 1, out.numel()).sin().view(out.shape).to(out.dtype)
    wanted = [leaf, weight] if weight.requires_grad else [leaf]
    return out.detach(), *torch.autograd.grad(out, wanted, grad)


@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_columns", [True, False])
def test_lossless_gradients_are_torchs_to_the_last_bit(dtype, columns, by_columns):
    x, weight = torch.randn(384, 32).to(dtype), experts(dtype, columns)
    x = x.t().contiguous().t() if by_columns else x
    plain = gradients(x, weight, None)
    lossless = gradients(x, weight, BackwardSettings(brevact.quantizer(LosslessBackward)))
    for a, b in zip(plain, lossless, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.parametrize("function", [grouped_mm, getattr(F, "grouped_mm", grouped_mm)])
def test_rows_are_packed_and_weights_never(function):
    weight = experts()
    x = torch.randn(384, 32, requires_grad=True)
    with watch_saved() as saved, region(settings()):
        function(x * 1, weight, offs=OFFSETS)
    codes = [t for t in saved.tensors if t.dtype is torch.uint8]
    assert sum(t.numel() for t in codes) <= x.numel() * (2 + 64 / 64) / 8  # 2 bits, and two bfloat16 a bucket of 64
    assert saved.holds(weight) and saved.holds(OFFSETS)
    assert sum(t.numel() for t in saved.tensors if t.is_floating_point()) == weight.numel()


def test_a_frozen_weight_keeps_no_rows():
    weight = torch.nn.Parameter(torch.randn(4, 48, 32), requires_grad=False).transpose(-2, -1)
    x = torch.randn(384, 32, requires_grad=True)
    with watch_saved() as saved, region(settings()):
        grouped_mm(x * 1, weight, offs=OFFSETS)
    assert all(t.dtype is not torch.uint8 for t in saved.tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_behind_the_last_offset_leave_the_others_scales_as_they_are(dtype):
    """Torch leaves these rows uninitialized; here they hold huge numbers beside small ones."""
    torch.full((400, 48), 1e30, dtype=dtype)  # memory that is used again
    x, weight = torch.randn(400, 32).to(dtype), experts(dtype)
    leaf = x.requires_grad_()
    with region(settings(bit_width=8, bucket_size=512)):
        out = grouped_mm(leaf * 1, weight, offs=OFFSETS)
        assert not out[384:].any()
        (grad,) = torch.autograd.grad(out.square()[:384].sum(), weight)
    plain = x.detach()[:384].clone().requires_grad_()
    (expected,) = torch.autograd.grad(grouped_mm(plain * 1, weight, offs=OFFSETS).square().sum(), weight)
    assert (grad - expected).norm() / expected.norm() < 0.1


def test_policies_name_the_op():
    rules = {torch._grouped_mm: None, "*": StochBackward2bit}
    model = MixtureOfExperts()
    brevact.quantize_backward(model, rules)
    x = torch.randn(384, 32, requires_grad=True)
    with watch_saved() as saved:
        model(x * 1)
    assert any(t.shape == x.shape for t in saved.tensors)
    brevact.restore_backward(model)
    brevact.quantize_backward(model, {torch._grouped_mm: StochBackward4bit, "*": None})
    with watch_saved() as saved:
        model(x * 1)
    assert not any(t.shape == x.shape for t in saved.tensors)


class MixtureOfExperts(torch.nn.Module):
    """The rows of each expert, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 48, 32))

    def forward(self, x: Tensor) -> Tensor:
        return grouped_mm(x, self.weight.transpose(-2, -1), offs=OFFSETS)


def test_a_compiled_model_keeps_codes():
    torch._dynamo.reset()
    model = MixtureOfExperts().to(torch.bfloat16)
    brevact.quantize_backward(model, StochBackward2bit)
    x = torch.randn(384, 32, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with watch_saved() as saved:
        out = compiled(x * 1)
    assert torch.equal(out, grouped_mm(x, model.weight.transpose(-2, -1), offs=OFFSETS))
    assert not any(t.shape == x.shape for t in saved.tensors)
    out.sum().backward()
