"""Programs of ATen's operators have the saved tensors and gradients of the torch functions."""

import copy

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import brevact
from brevact import DEFAULT, LosslessBackward
from brevact.autograd.mode import as_torch_function
from tests.autograd import ops
from tests.autograd.measuring import kept_bytes, run_function, settings, watch_saved
from tests.crosses import some_of

#: Programs of several operators, and of tensors that are no buffers of the module: a target of the last two is one of
#: the program, and stays as it is.
OTHERS = (
    *("softsign", "tanhshrink", "normalize", "kl_div", "batch_norm2d", "bce_with_logits weighted"),
    *("cross_entropy to distributions", "dice loss", "tversky loss"),
)


@pytest.mark.parametrize(
    "op", some_of([op for op in ops.ALL if op.name not in OTHERS], quick=4), ids=lambda op: op.name
)
def test_operators_store_what_functions_store(op):
    function, x = op.make(), torch.randn(op.shape)
    program = make_fx(copy.deepcopy(function), pre_dispatch=True)(x.clone().requires_grad_().clone())
    found = []
    for call in (function, program):
        parameters = sorted(call.parameters(), key=lambda p: p.shape) if isinstance(call, nn.Module) else ()
        with watch_saved() as saved:
            found.append((*run_function(call, x, settings(), parameters), saved.nbytes))
    (out, grads, nbytes), (expected, expected_grads, expected_bytes) = found
    assert torch.equal(out, expected) and nbytes == expected_bytes
    for grad, reference in zip(grads, expected_grads, strict=True):
        assert torch.equal(grad, reference)


@pytest.mark.parametrize(
    "call, expected",
    [
        (lambda: (torch.ops.aten.silu_.default, "x"), (F.silu, "x", True, {})),
        (lambda: (torch.ops.aten.mse_loss.default, "x", "y", 1), (F.mse_loss, "x", "y", {"reduction": "mean"})),
        (lambda: (torch.ops.aten.relu, "x"), (torch.relu, "x", {})),
        (lambda: (torch.ops.aten.einsum.default, "ij->j", ["x"]), (torch.einsum, "ij->j", "x", {})),
        (
            lambda: (torch.ops.aten.to.dtype, "x", torch.half, False, True, None),
            (torch.Tensor.to, "x", torch.half, False, True, {"memory_format": None}),
        ),
        (lambda: (torch.ops.aten.elu.default, "x", 1.0, 2.0), (torch.ops.aten.elu.default, "x", 1.0, 2.0, {})),
    ],
)
def test_operators_are_called_as_functions(call, expected):
    func, *args = call()
    function, found, kwargs = as_torch_function(func, tuple(args), {})
    assert (function, *found, kwargs) == expected


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.attended, self.out = nn.Linear(8, 24), nn.Linear(8, 10)
        self.register_buffer("target", torch.rand(16, 10))

    def forward(self, x):
        x = F.relu(x + F.dropout(F.silu(self.norm(self.conv(x)), inplace=True), 0.2))
        query, key, value = self.attended(x.flatten(2).transpose(1, 2)).chunk(3, -1)
        x = F.gelu(F.scaled_dot_product_attention(query, key, value))
        return F.cross_entropy(self.out(x.mean(1)), self.target.softmax(1))


@pytest.mark.parametrize("policy", [DEFAULT, brevact.RECOMPUTE, LosslessBackward])
def test_exported_programs_train_as_the_model_does(policy):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(16, 8, 16, 16)
    program, results = torch.export.export(model, (x,)).module(), []
    for each, chosen in ((model, policy), (program, policy), (program, None)):
        each = copy.deepcopy(each)
        if chosen is not None:
            brevact.quantize_backward(each, chosen)
        torch.manual_seed(1)
        kept = kept_bytes(each, lambda each=each: each(x))
        torch.manual_seed(1)
        loss = each(x)
        loss.backward()
        results.append((loss, kept, {name: p.grad for name, p in each.named_parameters()}))
    (loss, kept, grads), (found, kept_of_program, of_program), (plain, _, of_plain) = results
    assert torch.equal(loss, found) and torch.equal(found, plain) and kept == kept_of_program
    assert all(torch.equal(of_program[name], grad) for name, grad in grads.items())
    if policy is LosslessBackward:
        assert all(torch.equal(of_program[name], grad) for name, grad in of_plain.items())
    else:
        assert any(not torch.equal(of_program[name], grad) for name, grad in of_plain.items())


def test_buffers_of_a_program_in_a_block_are_weights():
    class Scaled(nn.Module):
        def forward(self, x):
            return x * self.scale

    scaled, x = Scaled(), torch.randn(64, 100, requires_grad=True)
    scaled.register_buffer("scale", torch.randn(64, 100))
    program = torch.export.export(nn.Sequential(scaled), (x,)).module()
    with watch_saved() as saved, brevact.backward_quant():
        program(x)
    assert saved.holds(program.get_buffer("0.scale"))
