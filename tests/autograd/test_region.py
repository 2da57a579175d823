"""Regions around whole pieces of code: nesting, sharing, freeing, and the rest of PyTorch."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from brevact import StochBackward2bit
from brevact.autograd import (
    BackwardSettings,
    SaveMode,
    attach_region,
    current_region,
    detach_region,
    has_region,
    region,
)
from brevact.autograd.region.running import active
from brevact.private_names.of_torch import top_hooks
from brevact.quantizers import Rounding
from tests.autograd.leaves import every_leaf
from tests.autograd.measuring import settings, watch_saved


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 5),
    )


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 16, 16)


def packs(saved) -> int:
    return len({t.untyped_storage().data_ptr() for t in saved.tensors if t.dtype is torch.uint8})


def test_a_tensor_that_several_ops_save_is_packed_once():
    q, k, v = (nn.Linear(32, 32) for _ in range(3))
    x = torch.randn(4, 10, 32, requires_grad=True) * 1
    with watch_saved() as saved, region(settings()):
        q(x), k(x), v(x)
        x.exp() * x  # the fallback and a product
    assert packs(saved) == 2  # x, and the result of exp


def test_sharing_ends_when_the_tensor_changes():
    layer = nn.Linear(32, 32)
    x = torch.randn(40, 32)
    with watch_saved() as saved, region(settings()):
        first = layer(x)
        x.copy_(torch.randn(40, 32))
        second = layer(x)
    assert packs(saved) == 2
    (first.sum() + second.sum()).backward()


def test_views_are_not_taken_for_each_other():
    layer = nn.Linear(32, 32, bias=False)
    x = torch.randn(64, 32)
    grads = []
    for chosen in (None, settings(bit_width=32)):  # exact, so that a wrong view shows
        with region(chosen):
            out = layer(x[:32]), layer(x[32:]), layer(x[:32].t())
        grads.append(torch.autograd.grad(out[0].sum() + out[1].sum() + (out[2] ** 2).sum(), layer.weight)[0])
    torch.testing.assert_close(*grads)


def test_an_address_used_again_is_another_tensor():
    layer = nn.Linear(64, 8, bias=False)
    chosen = settings(bit_width=8, rounding=Rounding.NEAREST)
    for value in range(50):  # each input is freed before the next one takes its address
        layer.zero_grad()
        x = torch.full((64, 64), float(value))
        with region(chosen):
            out = layer(x)
        del x
        out.sum().backward()
        assert torch.equal(layer.weight.grad, torch.full((8, 64), 64.0 * value))


def test_different_quantizers_do_not_share():
    layer, x = nn.Linear(32, 32), torch.randn(40, 32)
    with watch_saved() as saved:
        for bit_width in (2, 4):
            with region(settings(bit_width=bit_width)):
                layer(x)
    assert packs(saved) == 2


@pytest.mark.parametrize("mode", list(SaveMode))
def test_shared_tensors_keep_one_noise(mode):
    a, b = nn.Linear(32, 8, bias=False), nn.Linear(32, 8, bias=False)
    b.weight = a.weight
    x = torch.randn(40, 32)
    with region(settings(save_mode=mode)):
        first, second = a(x), b(x)
    (grad_a,) = torch.autograd.grad(first.sum(), a.weight)
    (grad_b,) = torch.autograd.grad(second.sum(), a.weight)
    assert torch.equal(grad_a, grad_b)


def live_bytes() -> int:
    while gc.collect():  # graphs go in several turns: node by node
        pass
    return sum(o.untyped_storage().nbytes() for o in gc.get_objects() if type(o) is Tensor and o.dtype is torch.uint8)


def test_each_node_frees_its_codes_as_soon_as_it_has_run():
    before = live_bytes()
    x = torch.randn(64, 256, requires_grad=True)
    alive: list[int] = []
    with region(settings()):
        y = x * 1
        for _ in range(4):
            y = F.silu(y)
            y.register_hook(lambda grad: alive.append(live_bytes() - before))
        loss = y.sum()
    loss.backward()  # loss itself stays alive
    assert alive == sorted(alive, reverse=True) and alive[0] > alive[-1] > 0
    assert live_bytes() == before


def test_nothing_stays_when_the_loss_is_dropped():
    model, x = network(), images()
    before = live_bytes()
    with region(settings()):
        loss = model(x).sum()
    assert live_bytes() > before
    del loss
    assert live_bytes() == before


@pytest.mark.parametrize("min_numel", [0, 2**20], ids=["packed", "as it is"])
def test_fallback_outputs_make_no_cycle(min_numel):
    import weakref

    gc.collect()
    gc.disable()
    try:
        with region(settings(min_numel=min_numel)):
            y = torch.randn(100, 100, requires_grad=True).exp()
        node = weakref.ref(y)
        del y
        assert node() is None
    finally:
        gc.enable()


def test_a_second_backward_without_retain_graph_raises_torchs_error():
    with region(settings()):
        loss = network()(images()).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("op", [lambda x: F.avg_pool2d(x, 2), lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect")])
def test_ops_that_store_nothing_have_a_second_derivative(op):
    x = torch.randn(2, 3, 8, 8, requires_grad=True)

    def penalty(chosen):
        with region(chosen):
            out = op(x * 1)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    assert torch.equal(penalty(settings()), penalty(None))


@pytest.mark.parametrize("save_mode", SaveMode)
def test_packed_copies_are_immune_to_in_place_edits(save_mode):
    layer, x = nn.Linear(32, 32), torch.randn(40, 32)
    chosen = settings(bit_width=8, rounding=Rounding.NEAREST, save_mode=save_mode)
    with region(chosen):
        out = layer(x)
    expected = torch.ones(32, 40) @ chosen.quantizer.quantize(x).dequantize()
    x.zero_()
    out.sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected)


@pytest.mark.parametrize("op", [torch.exp, lambda y: y * torch.ones(8, requires_grad=True)])
def test_in_place_edits_of_unpacked_tensors_raise_as_usual(op):
    x = torch.randn(8, requires_grad=True)
    with region(settings(min_numel=100)):
        y = x * 1
        out = op(y)
        (out if op is torch.exp else y).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_weights_changed_between_forward_and_backward_raise_as_usual():
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    with region(settings()):
        out = layer(x * 1)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_innermost_region_decides():
    layer, x = nn.Linear(32, 32), torch.randn(64, 32)
    sizes = []
    for inner in (None, settings(bit_width=4), settings(bit_width=2)):
        with watch_saved() as saved, region(settings(bit_width=2)), region(inner):
            layer(x.clone())
        sizes.append(saved.nbytes - 0)
    plain, four, two = sizes
    assert plain > four > two
    assert current_region() is None


def test_full_precision_inside_a_region_is_plain_torch():
    x = torch.randn(64, 64, requires_grad=True)
    with watch_saved() as saved, region(settings()), region(None):
        y = (x * 1).exp()
        F.silu(y)
    assert all(t.dtype is torch.float32 for t in saved.tensors)


def test_no_grad_packs_nothing():
    with watch_saved() as saved, region(settings()), torch.no_grad():
        network()(images())
    assert saved.tensors == []


@pytest.mark.parametrize("make", [lambda x: x * 1, lambda x: x], ids=["activation", "leaf"])
def test_a_region_lets_parts_change_without_gradients(make):
    """Torch refuses to say which node made a view without gradients, once its base has changed."""
    x = torch.randn(8, 64, requires_grad=True)
    expected = x.detach() * torch.tensor([2.0] + [1.0] * 7)[:, None]
    with region(settings()):
        y = make(x)
        with torch.no_grad():
            y[0] *= 2
            part = y[1]
            part.mul_(4).div_(4)
            assert torch.equal(part * 2, 2 * expected[1])
        assert torch.equal(part > 0, expected[1] > 0) and part.argmax() == expected[1].argmax()
        out = y.sin()
    assert torch.equal(y, expected) and torch.equal(out, expected.sin())


def test_a_region_is_left_when_code_raises():
    with pytest.raises(ZeroDivisionError), region(settings()):
        raise ZeroDivisionError
    assert current_region() is None
    model = network()
    attach_region(model, settings())
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 7, 16, 16))
    assert current_region() is None


def test_a_region_that_is_left_before_one_inside_of_it_says_so_and_leaves_nothing_behind():
    def block(chosen):
        with region(chosen):
            yield

    def bytes_of_a_block():
        with watch_saved() as saved, region(settings(bit_width=2)):
            F.linear(torch.ones(64, 64), weight)
        return [x.nbytes for x in saved.tensors]

    weight = torch.randn(8, 64, requires_grad=True)
    expected = bytes_of_a_block()
    outer, inner = block(settings(bit_width=2)), block(settings(bit_width=8))
    next(outer), next(inner)
    with pytest.raises(RuntimeError, match="a block of backward quantization ends before one that began inside of it"):
        outer.close()
    inner.close()
    assert not active.regions and bytes_of_a_block() == expected


def test_a_region_belongs_to_its_thread():
    seen = []
    with region(settings()):
        thread = threading.Thread(target=lambda: seen.append(current_region()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_attached_regions_run_while_the_module_trains():
    model, x = network(), images()
    attach_region(model, settings())
    for training, packed in ((True, True), (False, False)):
        model.train(training)
        with watch_saved() as saved:
            model(x)
        assert any(t.dtype is torch.uint8 for t in saved.tensors) is packed
    assert has_region(model)
    assert detach_region(model) and not detach_region(model)
    assert not model._forward_hooks and not model._forward_pre_hooks and not model._forward_hooks_always_called


def test_attached_regions_survive_copy_and_pickle():
    model = network()
    attach_region(model, settings())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with watch_saved() as saved:
            twin(images())
        assert packs(saved) > 0
        detach_region(twin)
        with watch_saved() as saved:
            twin(images())
        assert packs(saved) == 0
    assert has_region(model)


def test_frozen_norms_inside_a_training_model_are_packed_too():
    model = network()
    attach_region(model, settings())
    model[1].eval()
    with watch_saved() as saved:
        model(images())
    big = [t for t in saved.tensors if t.is_floating_point() and t.numel() >= 8 * 16 * 16]
    assert not big


def test_recursive_modules_leave_every_region():
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor, depth: int = 3) -> Tensor:
            return self(self.layer(x).relu(), depth - 1) if depth else x

    model = Recursive()
    attach_region(model, settings())
    attach_region(model.layer, settings(bit_width=4))
    model(torch.randn(8, 16)).sum().backward()
    assert current_region() is None


def test_a_module_that_calls_itself_without_gradients_stays_in_its_region():
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor, student: bool = True) -> Tensor:
            if student:
                with torch.no_grad():
                    self(x, student=False)
                assert current_region() is not None
            return self.layer(x)

    model = Teacher()
    attach_region(model, settings())
    with watch_saved() as saved:
        model(torch.randn(64, 64))
    assert packs(saved) == 1 and current_region() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_forward_is_bit_equal_and_packs_the_input_once(dtype):
    a, b = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
    head = nn.Linear(8, 4)
    x = images()

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return head((F.silu(a(x)) * b(x)).mean((2, 3)))

    expected = forward()
    with watch_saved() as saved, region(settings(bit_width=8)):
        out = forward()
    assert torch.equal(out, expected) and out.dtype is dtype
    nbytes = settings(bit_width=8).quantizer.quantize(x).nbytes
    packed = [t for t in saved.tensors if t.dtype is torch.uint8 and t.numel() == nbytes]
    assert len({t.data_ptr() for t in packed}) == 1
    parameters = [*a.parameters(), *b.parameters(), *head.parameters()]
    grads = torch.autograd.grad(out.float().square().sum(), parameters)
    exact = torch.autograd.grad(expected.float().square().sum(), parameters)
    for grad, reference in zip(grads, exact, strict=True):
        assert grad.dtype is torch.float32
        # 8 bits: half a step of noise an element, 1/510 of a bucket's range (about 6 deviations), and roundings to the
        # low precision (2^-8); the derivative of SiLU and the product carry them on a few times
        assert (grad - reference).norm() <= 4 * (6 / 510 + 2**-8) * reference.norm()


def test_autocast_weights_get_gradients_from_every_use():
    # A weight copy cached without gradients would cut the second use off.
    conv = nn.Conv2d(3, 3, 3, padding=1)
    x = images().requires_grad_()
    grads = []
    for chosen in (None, settings(bit_width=32)):
        conv.zero_grad()
        with torch.autocast("cpu"):
            with region(chosen):
                y = conv(x)
            y = conv(y)
        y.float().sum().backward()
        grads.append(conv.weight.grad.clone())
    # two bfloat16 roundings of 2^-8 each; a use that is cut off would take away half of the gradient
    torch.testing.assert_close(grads[1], grads[0], rtol=2**-7, atol=2**-7 * grads[0].abs().max().item())


def test_module_and_tensor_hooks_run():
    model, x = network(), images()
    seen: list[str] = []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    model[3].weight.register_hook(lambda grad: seen.append("weight"))
    attach_region(model, settings())
    model(x).sum().backward()
    assert sorted(seen) == ["backward", "forward", "weight"]


def test_small_tensors_stay_as_they_are():
    layer, x = nn.Linear(10, 3), torch.randn(9, 10)
    with watch_saved() as saved, region(settings(min_numel=91)):
        layer(x)
    assert saved.holds(x)
    with watch_saved() as saved, region(settings(min_numel=90)):
        layer(x)
    assert not saved.holds(x)


def test_expanded_and_sliced_inputs():
    layer = nn.Linear(16, 16, bias=False)
    base = torch.randn(8, 1, 16)
    chosen = settings(bit_width=8, rounding=Rounding.NEAREST)
    for x in (base.expand(8, 50, 16), torch.randn(8, 100, 32)[:, ::2, 16:], torch.randn(16, 50, 8).transpose(0, 2)):
        layer.zero_grad()
        with watch_saved() as saved, region(chosen):
            out = layer(x)
        distinct = base.numel() if x.stride(1) == 0 else x.numel()
        nbytes = chosen.quantizer.quantize(torch.randn(distinct)).nbytes
        assert sum(t.nbytes for t in saved.tensors if t.dtype is torch.uint8) == nbytes
        out.sum().backward()
        expected = torch.ones(16, 1) * x.sum((0, 1))
        step = (x.max() - x.min()) / 255
        assert (layer.weight.grad - expected).abs().max() <= 0.51 * step * x.shape[0] * x.shape[1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"quantizer": 3}, TypeError, "quantizer=3"),
        ({"save_mode": "later"}, ValueError, "save_mode: got 'later'"),
        ({"min_numel": -1}, ValueError, "min_numel: got -1"),
        ({"min_numel": 1.5}, TypeError, r"min_numel: got 1\.5"),
        ({"recompute": -1}, ValueError, "recompute: got -1"),
        *(({"recompute": each}, TypeError, "recompute: got") for each in (1.5, True, "64", None)),
    ],
)
def test_settings_refuse_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        BackwardSettings(**{"quantizer": settings().quantizer, **arguments})


def test_a_region_may_end_inside_hooks_that_its_module_entered():
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    layer = nn.Sequential(nn.Linear(64, 64))
    layer.register_forward_pre_hook(lambda module, args: hooks.__enter__())
    layer.register_forward_hook(lambda module, args, output: hooks.__exit__())
    brevact.quantize_backward(layer, StochBackward2bit, min_numel=0)
    layer(torch.randn(64, 64)).sum().backward()
    assert current_region() is None and top_hooks(True) is None


def test_a_region_inside_a_torch_function_leaves_the_mode_where_it_was():
    @torch.overrides.wrap_torch_function(lambda layer, x: (x,))
    def call(layer, x):
        return layer(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return call(self.inner, x * 1)

    outer = Outer()
    attach_region(outer, settings(bit_width=2))
    attach_region(outer.inner, settings(bit_width=8))
    outer(torch.randn(64, 64, requires_grad=True)).sum().backward()
    assert current_region() is None and torch._C._len_torch_function_stack() == 0


def test_an_op_that_raises_leaves_no_trace_in_the_region():
    x = torch.randn(64, 64, requires_grad=True) * 1
    with watch_saved() as saved, region(settings()):
        with pytest.raises(RuntimeError):
            F.layer_norm(x[:4], (63,))
        torch.addcmul(x, x, x)
    assert saved.tensors[-1].dtype is torch.uint8


@every_leaf
def test_a_region_that_cannot_be_entered_leaves_nothing_behind(leaf):
    model, x = brevact.quantize_backward(nn.Linear(8, 8), leaf), torch.randn(4, 8)
    parameters = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(parameters)
    assert current_region() is None
    model(x).sum().backward()


def test_a_region_object_can_be_entered_again():
    context = brevact.backward_quant(StochBackward2bit)
    for _ in range(2):
        with context:
            assert current_region() is not None
            with context:
                pass
        assert current_region() is None


def test_arguments_of_no_counterpart_reach_torch():
    buffer, x = torch.empty(64, 64), torch.randn(64, 64)
    with region(settings()):
        torch.mul(x, x, out=buffer)
        nested = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], requires_grad=True)
        F.gelu(nested)
    assert torch.equal(buffer, x * x)
