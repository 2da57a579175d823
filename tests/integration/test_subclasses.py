"""Batches that are subclasses of Tensor: with a storage they pack as tensors do, and their own rule runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import brevact
from brevact import LosslessBackward, StochBackward2bit
from brevact.autograd.call_arguments import tensors_of_call
from tests.autograd.measuring import watch_saved


class Plain(Tensor):
    """A subclass without a rule of its own."""


class Noted(Tensor):
    """Results have the note of the first argument, as the metadata of MONAI's and fastai's images."""

    note = ""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        notes = [x.note for x in tensors_of_call(args, {}) if isinstance(x, Noted)]
        for x in tensors_of_call((result,), {}):
            x.note = next(iter(notes), "")
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True))
        self.attend, self.norm, self.gate = nn.MultiheadAttention(32, 4), nn.LayerNorm(32), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Return (tokens, batch, 8)."""
        x = self.norm(self.stem(x).flatten(2).permute(2, 0, 1))
        x = x + F.dropout(self.attend(x, x, x)[0], 0.1)
        a, b = self.gate(x).chunk(2, -1)
        a = a * b.sigmoid()
        a += x
        return torch.cat([a.softmax(-1), F.gelu(a)], -1).unsqueeze_(0)[0].max(-1)[0]


def step(kind: type[Tensor], policy, in_checkpoint: bool):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(2, 3, 16, 16).as_subclass(kind)
    x.note = "of the batch"
    brevact.quantize_backward(model, policy)
    torch.manual_seed(1)
    with watch_saved() as saved:
        out = checkpoint(model, x, use_reentrant=False) if in_checkpoint else model(x)
        out.square().mean().backward()
    return out, [out.detach().as_subclass(Tensor), *(p.grad for p in model.parameters())], saved.nbytes


@pytest.mark.parametrize("in_checkpoint", [False, True])
@pytest.mark.parametrize(
    "policy", [brevact.DEFAULT, StochBackward2bit, LosslessBackward], ids=["default", "2bit", "exact"]
)
@pytest.mark.parametrize("kind", [Plain, Noted])
def test_subclasses_with_a_storage_pack_as_tensors(kind, policy, in_checkpoint):
    _, expected, nbytes = step(Tensor, policy, in_checkpoint)
    out, found, of_subclass = step(kind, policy, in_checkpoint)
    assert type(out) is kind and (kind is not Noted or out.note == "of the batch")
    assert of_subclass == nbytes and all(map(torch.equal, found, expected))
    assert {type(grad) for grad in found} == {Tensor}


def test_calls_that_change_a_subclass_change_it_in_a_region():
    layer = nn.Linear(64, 64)
    with brevact.backward_quant(StochBackward2bit):
        x = torch.randn(64, 64).as_subclass(Plain).requires_grad_()
        y, seen = layer(x), []
        assert F.relu(y, inplace=True) is y and y.contiguous() is y and y.unsqueeze_(0).shape == (1, 64, 64)
        y.register_hook(seen.append)
        loss = y.square().sum()
        (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        assert torch.equal(grad, x.grad) and len(seen) == 2
        with pytest.raises(TypeError, match="NotImplemented"):
            torch.cat([x, x.as_subclass(Noted)])
