"""Tensors saved by other code than torch's: in full precision, packed if a rule or the table names the code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import brevitas.nn as qnn
import pytest
import torch
from brevitas.quant import Int8ActPerTensorFloatMinMaxInit
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from brevact import DEFAULT, LosslessBackward, NearestBackward4bit, Policy, StochBackward2bit, StochBackward4bit
from brevact.autograd.interop.other_code import label_of, name_of, watch_forward
from brevact.autograd.saving import storage_report
from brevact.private_names.of_torch import function_apply_code
from tests.autograd.measuring import watch_saved


class BinarySign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


class LearnedStep(torch.autograd.Function):
    """Fake quantization as in LSQ: the gradient of the step depends on the clipped elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(x, step)
        return (x / step).round().clamp(-4, 3) * step

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, step = ctx.saved_tensors
        q = x / step
        inside = (q >= -4) & (q <= 3)
        return grad * inside, (grad * torch.where(inside, q.round() - q, q.clamp(-4, 3))).sum()


class Cube(torch.autograd.Function):
    """A Function whose context is set up apart, which torch.func takes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad * ctx.saved_tensors[0] ** 2


class FlatCube(torch.autograd.Function):
    """A Function that saves a view of its input, made where gradients are off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.view(-1, 64))
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad * ctx.saved_tensors[0].view(grad.shape) ** 2


@torch.jit.script
def scripted_clamp(x: Tensor) -> Tensor:
    return torch.clamp(x, -0.5, 0.5)


@torch.library.custom_op("brevact_tests::hinge", mutates_args=())
def hinge(x: Tensor) -> Tensor:
    return x.clamp_min(0.25)


hinge.register_autograd(
    lambda ctx, grad: grad * (ctx.saved_tensors[0] > 0.25),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)
_library = torch.library.Library("brevact_tests", "FRAGMENT")
_library.define("ramp(Tensor x) -> Tensor")
_library.impl("ramp", lambda x: F.relu6(6 * x) / 6, "CompositeImplicitAutograd")


class Other(NamedTuple):
    """Code that saves an activation, and the key of a rule for it, None for code that no rule names."""

    call: Callable[[Tensor], Tensor]
    key: Any = None
    saves_input: bool = True


STEP = torch.tensor(0.4, requires_grad=True)
OTHERS = {
    "straight-through": Other(BinarySign.apply, BinarySign),
    "learned step": Other(lambda x: LearnedStep.apply(x, STEP), LearnedStep),
    "context apart": Other(Cube.apply, Cube),
    "view of its input": Other(FlatCube.apply, FlatCube),
    "scripted clamp": Other(scripted_clamp),
    "scripted module": Other(torch.jit.script(nn.ReLU())),
    "operator": Other(hinge, hinge),
    "operator made of torch's": Other(torch.ops.brevact_tests.ramp, torch.ops.brevact_tests.ramp, saves_input=False),
}
NAMED = {name: other for name, other in OTHERS.items() if other.key is not None}
every_other = pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
every_named = pytest.mark.parametrize("other", NAMED.values(), ids=NAMED)
#: The executor of scripted code runs twice to see what its tensors are, and then as it will.
CALLS = 4


class Net(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.calls = [lambda x: call(x)]  # scripted functions cannot be copied

    def forward(self, x: Tensor) -> Tensor:
        return self.calls[0](x * 1.0)


def activation() -> Tensor:
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).requires_grad_()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Gradients of the input, and of the step where it has one, call after call."""
    found = []
    for _ in range(CALLS):
        out = model(x)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        grads = torch.autograd.grad((out * weights).sum(), (x, STEP), allow_unused=True)
        found += [grad for grad in grads if grad is not None]
    return found


@pytest.mark.parametrize(
    "policy", [DEFAULT, StochBackward2bit, LosslessBackward], ids=["default", "2 bits", "lossless"]
)
@every_other
def test_other_code_has_exact_gradients(other, policy):
    x = activation()
    expected = gradients(Net(other.call), x)
    found = gradients(brevact.quantize_backward(Net(other.call), policy), x)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


@every_other
def test_memory_report_says_what_other_code_keeps_and_how_to_change_that(other):
    report = brevact.memory_report(brevact.quantize_backward(Net(other.call)), activation())
    (row,) = (row for row in report.ops if row.why.startswith(storage_report.OTHER_CODE))
    assert (row.how, row.saved_bytes) == ("full precision", 64 * 128 * 4)
    if other.key is not None:
        assert row.op and row.why.endswith(f"; a rule packs it: {{{label_of(other.key)}: StochBackward4bit}}")


@pytest.mark.parametrize("rest", [{}, {"*": StochBackward2bit}, {"*": None}], ids=["alone", "packing", "exact"])
@every_named
def test_rules_pack_what_other_code_saves(other, rest):
    x, quantizer = activation(), brevact.quantizer(NearestBackward4bit)
    model = brevact.quantize_backward(Net(other.call), {other.key: NearestBackward4bit, **rest})
    for _ in range(CALLS):
        with watch_saved() as saved:
            out = model(x)
        packed = [t for t in saved.tensors if t.dtype is torch.uint8]
        assert [len(t) for t in packed] == [quantizer.quantize(x.detach()).nbytes]
        (expected,) = torch.autograd.grad(Net(other.call)(x).sum(), x)
        (found,) = torch.autograd.grad(out.sum(), x)
        assert not torch.equal(found, expected)
        decoded = quantizer.quantize(x.detach()).dequantize().requires_grad_()
        (of_decoded,) = torch.autograd.grad(Net(other.call)(decoded).sum(), decoded)
        if other.saves_input:
            torch.testing.assert_close(found, of_decoded)


@every_named
def test_the_first_rule_decides_what_other_code_keeps(other):
    x = activation()
    for rules in ({other.key: None, "*": StochBackward2bit}, {"calls": None, other.key: None}):
        model = brevact.quantize_backward(Net(other.call), Policy(rules))
        assert all(map(torch.equal, gradients(model, x), gradients(Net(other.call), x)))
    inner = nn.Sequential(Net(other.call), Net(other.call))
    brevact.quantize_backward(inner, {"0": None, other.key: StochBackward4bit, "*": StochBackward2bit})
    y = activation()
    with watch_saved() as saved:
        inner(y)
    assert sum(t.dtype is torch.uint8 for t in saved.tensors) == 1


@every_named
def test_rules_for_other_code_hold_in_blocks(other):
    x = activation()
    with watch_saved() as saved, brevact.backward_quant(Policy({other.key: StochBackward2bit})):
        other.call(x * 1.0)
    assert any(t.dtype is torch.uint8 for t in saved.tensors)


@pytest.mark.parametrize("changes", [False, True], ids=["stays", "changes"])
def test_a_view_that_a_function_saves_shares_the_codes_of_its_base(changes):
    """They are those of its values then, whatever becomes of it in place."""
    x, weight = activation(), torch.ones(8, 128, requires_grad=True)
    rules = {FlatCube: NearestBackward4bit, "*": NearestBackward4bit}
    with watch_saved() as saved, brevact.backward_quant(Policy(rules)):
        y = x * 1.0
        of_layer, out = F.linear(y, weight), FlatCube.apply(y)
        if changes:
            y.mul_(2)
    assert len({t.untyped_storage()._cdata for t in saved.tensors if t.dtype is torch.uint8}) == 1
    decoded = brevact.quantizer(NearestBackward4bit).quantize(x.detach()).dequantize()
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], 3 * decoded**2)
    assert torch.equal(torch.autograd.grad(of_layer.sum(), weight)[0], torch.ones(8, 64) @ decoded)


@pytest.mark.parametrize("make", [lambda p: p, lambda p: p.view(128, 64), lambda p: p.view(128, 64) * 2])
@pytest.mark.parametrize("kind", [nn.Parameter, Tensor.requires_grad_], ids=["weight", "variable"])
def test_a_view_of_what_stays_in_memory_is_kept_as_it_is(kind, make):
    p = kind(torch.randn(64, 128))
    with watch_saved() as saved, brevact.backward_quant(Policy({FlatCube: StochBackward2bit, "*": StochBackward2bit})):
        FlatCube.apply(make(p))
    is_activation = kind is not nn.Parameter and make(p).grad_fn is not None and make(p)._base is None
    assert [t.dtype for t in saved.tensors] == [torch.uint8 if is_activation else torch.float32]


def test_rules_take_a_functions_apply_and_tuples_for_it():
    assert name_of(BinarySign.apply) == name_of(BinarySign) == f"{__name__}.BinarySign"
    rules = {(BinarySign.apply, F.gelu): StochBackward2bit}
    policy = brevact.backward_policy(brevact.quantize_backward(nn.Linear(4, 4), rules))
    assert [op.op for op in policy.rows[0].ops] == [f"{__name__}.BinarySign", "gelu"]
    assert policy.rows[0].ops[0].rule == "BinarySign | gelu"


def test_a_function_without_a_frame_of_its_own_is_known_by_its_forward():
    """From torch 2.14 on ``Function.apply`` is compiled."""

    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad * ctx.saved_tensors[0]

    class Fourth(Cube):
        pass

    for function in (Squared, Fourth, Squared):
        watch_forward(function)
    squared, fourth, cube = (super(torch.autograd.Function, each).apply for each in (Squared, Fourth, Cube))
    x = activation()
    y = x * 1.0
    with (
        watch_saved() as saved,
        brevact.backward_quant(Policy(dict.fromkeys((Squared, Fourth, Cube), StochBackward2bit))),
    ):
        kept = []
        for call in (squared, cube, fourth, cube, Squared.apply):
            call(y)
            kept.append(saved.tensors[-1].dtype)
    unwatched = torch.float32 if function_apply_code else torch.uint8  # a rule watches where no function has a frame
    assert kept == [torch.uint8, unwatched, torch.uint8, unwatched, torch.uint8]
    for call in (Squared.apply, Fourth.apply):
        assert torch.equal(torch.compile(lambda x, call=call: call(x), backend="eager", fullgraph=True)(x), call(x))


def test_a_forward_of_the_class_may_compile_a_transform():
    """As in Liger's losses: Dynamo, too, suspends hooks for `torch.func.grad`, and a subclass has its own formula."""

    class Loss(torch.autograd.Function):
        power = 2

        @classmethod
        def forward(cls, ctx, x):
            made = torch.compile(torch.func.grad_and_value(lambda x: (x**cls.power).sum()), backend="eager")
            grad, value = made(x)
            ctx.save_for_backward(grad)
            return value

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    class Cubic(Loss):
        power = 3

    watch_forward(Loss)
    for function in (Loss, Cubic):
        x = torch.randn(64, 128, requires_grad=True)
        with brevact.backward_quant(Policy({function: brevact.StochBackward8bit})):
            value = function.apply(x * 1.0)
        torch.testing.assert_close(value, (x**function.power).sum())
        (found,), expected = torch.autograd.grad(value, x), function.power * x.detach() ** (function.power - 1)
        assert 0 < float((found - expected).norm()) < 0.02 * float(expected.norm())


def test_masks_and_codes_that_other_code_saves_are_stored_without_a_loss():
    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, mask):
            ctx.save_for_backward(x, mask)
            return x * mask

        @staticmethod
        def backward(ctx, grad):
            x, mask = ctx.saved_tensors
            return grad * mask * x, None

    x = activation()
    with watch_saved() as saved, brevact.backward_quant(StochBackward2bit):
        Masked.apply(x * 1.0, x > 0)
    assert sorted(t.nbytes for t in saved.tensors) == [x.numel() // 8, 4 * x.numel()]
    quantized = qnn.QuantIdentity(act_quant=Int8ActPerTensorFloatMinMaxInit, min_val=-4.0, max_val=4.0, bit_width=4)
    found = []
    for settings in (None, StochBackward2bit):
        with watch_saved() as saved, brevact.backward_quant(settings):
            out = Masked.apply(quantized(x), x > 0)
        found.append(torch.autograd.grad(out.sum(), x)[0])
    assert torch.equal(*found)
    assert saved.nbytes < x.numel()  # codes of 4 bits and two masks


def test_rules_for_scripted_functions_are_refused():
    with pytest.raises(TypeError, match="rule ScriptFunction: no quantizer changes what this function stores"):
        Policy({scripted_clamp: StochBackward2bit})
