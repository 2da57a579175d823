"""What broke once, here or in other systems: each case stays a test."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import brevact
import brevact.nn as bnn
from brevact import (
    DualPrecisionBackward2bit,
    L4Backward,
    L4ForwardBackward,
    SignMagnitudeBackward,
    StochBackward2bit,
    StochBackward2bit4bitMix,
    StochBackward8bit,
    StochL4Backward,
    WeibullBackward2bit,
)
from brevact.autograd import attach_region, current_region, region, seeds
from brevact.autograd.seeds import SeedStream
from brevact.private_names.of_torch import top_hooks
from brevact.quantizers import Rounding
from tests.autograd.measuring import settings, watch_saved

LEAVES = (
    StochBackward2bit,
    StochBackward2bit4bitMix,
    SignMagnitudeBackward,
    WeibullBackward2bit,
    L4Backward,
    StochL4Backward,
    L4ForwardBackward,
    DualPrecisionBackward2bit,
)
every_leaf = pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)


def wide(count: int = 3) -> nn.Sequential:
    """Layers whose weights are larger than their activations."""
    return nn.Sequential(*[layer for _ in range(count) for layer in (nn.Linear(256, 256), nn.GELU())])


def stored_bits(model: nn.Module, x: Tensor) -> float:
    return 32 / brevact.memory_report(model, x).ratio


# weights and activations


@every_leaf
def test_a_full_precision_first_layer_does_not_stop_packing(leaf):
    model = brevact.quantize_backward(wide(), {"0": None, "*": leaf})
    assert stored_bits(model, torch.randn(64, 256)) < 10  # one of six tensors is the input at 32 bits


@every_leaf
def test_a_stem_outside_the_region_does_not_stop_packing(leaf):
    net, x = wide(), torch.randn(64, 256)
    stem = net[0](x)
    with watch_saved() as saved, brevact.backward_quant(leaf):
        net[1:](stem)
    assert sum(t.dtype is torch.uint8 for t in saved.tensors) == 5
    assert not [t for t in saved.tensors if t.is_floating_point() and t.shape == (64, 256)]


@pytest.mark.parametrize("rules", [{"*": StochBackward2bit}, {"embed": None, "*": StochBackward2bit}])
def test_embeddings_are_activations(rules):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(1000, 256), wide()

        def forward(self, ids: Tensor) -> Tensor:
            return self.body(self.embed(ids) + 1)

    model = brevact.quantize_backward(Model(), rules)
    assert stored_bits(model, torch.randint(0, 1000, (4, 32))) < 3


@pytest.mark.parametrize(
    "make", [lambda t, ids: t[ids], lambda t, ids: t[ids] + t[:64], lambda t, ids: t.index_select(0, ids)]
)
def test_rows_of_a_table_that_trains_are_activations(make):
    table, ids = nn.Parameter(torch.randn(1000, 64)), torch.randint(0, 1000, (64,))
    with watch_saved() as saved, region(settings()):
        F.gelu(F.silu(make(table, ids)))
    assert [t.dtype for t in saved.tensors if t.is_floating_point() and t.numel() == 64 * 64] == []


BACKWARDS = list(range(63, -1, -1))


@pytest.mark.parametrize(
    ("index", "grad"),
    [
        *((index, grad) for index in (slice(None), BACKWARDS, torch.ones(64, dtype=torch.bool)) for grad in (0, 1)),
        (torch.tensor(BACKWARDS), 0),
    ],
)
def test_weights_that_are_indexed_stay_weights(index, grad):
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(64, 64), requires_grad=bool(grad))
    model.forward = lambda x: x * model.weight[index]
    brevact.quantize_backward(model, settings(bit_width=1))
    x = torch.randn(64, 64, requires_grad=True)
    model(x * 1).sum().backward()
    assert torch.equal(x.grad, model.weight[index])


def test_notes_of_derived_weights_do_not_pile_up():
    layer = nn.Linear(64, 64)
    with brevact.backward_quant(StochBackward2bit):
        state = current_region().state
        for _ in range(500):
            layer.weight.detach().sign()
    assert len(state._derived) <= 64


@every_leaf
def test_what_layers_make_of_learned_inputs_is_an_activation(leaf):
    class Model(nn.Module):
        def __init__(self, make: object) -> None:
            super().__init__()
            self.latent, self.body, self.make = nn.Parameter(torch.randn(64, 256)), wide(), make

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.make(self.latent)) + x

    ids = torch.arange(64)
    makes = (
        lambda p: p,
        lambda p: p[:1].expand(128, 256),
        lambda p: p + p.new_zeros(64, 256).index_add_(0, ids, p),
    )
    for make in makes:
        model = brevact.quantize_backward(Model(make), leaf)
        with watch_saved() as saved:
            model(torch.zeros(1))
        assert sum(t.dtype is torch.uint8 for t in saved.tensors) >= 5


def test_generators_that_begin_with_a_transposed_convolution_pack():
    model = nn.Sequential(nn.ConvTranspose2d(64, 64, 4), nn.BatchNorm2d(64), nn.ReLU(), nn.ConvTranspose2d(64, 8, 4, 2))
    brevact.quantize_backward(model, StochBackward2bit)
    report = {row.layer: row for row in brevact.memory_report(model, torch.randn(4, 64, 1, 1)).rows}
    assert report["1"].plain_bytes > 8 * report["1"].saved_bytes
    assert "3" not in report  # its input derives from what the norm stores, and its plain bytes count with ReLU's


@pytest.mark.parametrize(
    "make",
    [
        lambda w, mask: w.sign() * w.abs().mean(),
        lambda w, mask: w + (w.round() - w).detach(),
        lambda w, mask: torch.where(mask, w, 0.0),
        lambda w, mask: w.clamp(-1, 1).mul(torch.where(w >= 0, 1.0, -1.0)),
        lambda w, mask: torch.tanh(w) / torch.tanh(w).abs().max(),
    ],
)
@pytest.mark.parametrize("grad", [True, False])
@every_leaf
def test_weights_computed_from_weights_are_not_packed(make, grad, leaf):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.mask = nn.Parameter(torch.randn(64, 96)), torch.rand(64, 96) > 0.5

        def forward(self, x: Tensor) -> Tensor:
            with torch.set_grad_enabled(grad):
                weight = make(self.weight, self.mask)
            return x @ weight

    model, x = Model(), torch.randn(32, 64, requires_grad=True)
    expected = torch.autograd.grad(model(x * 1).sum(), x)[0]
    brevact.quantize_backward(model, leaf, min_numel=0)
    assert torch.equal(torch.autograd.grad(model(x * 1).sum(), x)[0], expected)


@every_leaf
def test_frozen_weights_of_einsum_stay_exact_under_autocast(leaf):
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(96, 64), requires_grad=False)
    model.forward = lambda x: torch.einsum("bi,oi->bo", x, model.weight)
    x = torch.randn(32, 64, requires_grad=True)
    with torch.autocast("cpu"):
        expected = torch.autograd.grad(model(x * 1).float().sum(), x)[0]
        brevact.quantize_backward(model, leaf, min_numel=0)
        assert torch.equal(torch.autograd.grad(model(x * 1).float().sum(), x)[0], expected)


@every_leaf
def test_two_brevitas_models_do_not_share_regions(leaf):
    import brevitas.nn as qnn
    from brevitas.quant import Int8ActPerTensorFloat

    a, b = (nn.Sequential(qnn.QuantConv2d(3, 8, 3, input_quant=Int8ActPerTensorFloat)) for _ in range(2))
    brevact.quantize_backward(a, leaf)
    with pytest.raises(ValueError, match="no backward policy"):
        brevact.restore_backward(b)
    brevact.quantize_backward(b, leaf)
    brevact.restore_backward(b)
    rows = brevact.memory_report(a, torch.randn(8, 3, 16, 16)).rows
    assert [row.layer for row in rows] == ["0"]


# seeds


class Block(nn.Module):
    """Linear layers and dropout, recomputed by checkpoint."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.a, self.b, self.d, self.e = nn.Linear(64, 64), nn.Linear(64, 64), nn.Dropout(0.5), nn.Dropout(0.5)
        self.reentrant = reentrant

    def body(self, x: Tensor) -> Tensor:
        return self.e(self.b(self.d(self.a(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_is_recomputed_as_it_was(reentrant):
    torch.manual_seed(0)
    plain, packed = Block(None), Block(reentrant)
    packed.load_state_dict(plain.state_dict())
    brevact.quantize_backward(packed, StochBackward8bit.let(bit_width=24, min_numel=0))
    x = torch.randn(32, 64, requires_grad=True)
    grads = []
    for model in (plain, packed):
        torch.manual_seed(1)
        model(x).square().sum().backward()
        grads.append([x.grad.clone(), *(p.grad for p in model.parameters())])
        x.grad = None
    for grad, reference in zip(*grads, strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-4)


def test_concurrent_regions_do_not_share_noise():
    first = SeedStream()
    seeds = [first.next(torch.device("cpu"))]
    thread = threading.Thread(target=lambda: seeds.append(SeedStream().next(torch.device("cpu"))))
    thread.start()
    thread.join()
    assert seeds[0] != seeds[1]
    first.close()


def test_seeds_are_those_of_split_mix_one_by_one():
    stream = SeedStream()
    found = [stream.next(torch.device("cpu")) for _ in range(300)]
    stream.close()
    assert len(set(found)) == 300
    for state in (0, 1, 2**63, 2**64 - 1, 2**64 + 5):
        expected = [seeds._split_mix(state + place * seeds._GOLDEN) for place in range(2 * seeds._AT_ONCE)]
        stream = SeedStream()
        stream._base, stream._moves = state, False
        seeds._in_use[state] += 1
        assert [stream.next(torch.device("cpu")) for _ in expected] == expected
        stream.close()


def test_regions_of_one_recomputation_do_not_share_noise():
    layers = [nn.Linear(64, 64) for _ in range(3)]
    for layer in layers:
        brevact.quantize_backward(layer, StochBackward2bit, min_numel=0)
    codes: list[Tensor] = []

    def body(x: Tensor) -> Tensor:
        with watch_saved() as saved:
            out = sum(layer(x.clone()) for layer in layers)
        codes.extend(t for t in saved.tensors if t.dtype is torch.uint8)
        return out

    x = torch.rand(32, 64, requires_grad=True)
    checkpoint(body, x, use_reentrant=True).sum().backward()
    assert len(codes) == 3
    assert not any(torch.equal(codes[i], codes[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


# regions that end badly


@every_leaf
def test_a_region_ends_when_a_forward_is_interrupted(leaf):
    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    model = brevact.quantize_backward(nn.Sequential(nn.Linear(64, 64), Interrupted()), leaf)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(4, 64))
    other = brevact.quantize_backward(nn.Linear(64, 64), leaf)
    with watch_saved() as saved:
        other.eval()(torch.randn(64, 64, requires_grad=True) * 1)
    assert current_region() is None
    assert all(t.dtype is not torch.uint8 for t in saved.tensors)


class Interrupted(nn.Module):
    """A layer during which the user presses Ctrl-C, once."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = True

    def forward(self, x: Tensor) -> Tensor:
        if self.waits:
            self.waits = False
            raise KeyboardInterrupt
        return x


def interrupt(model: nn.Module) -> None:
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(64, 64))


def quantized_layers() -> nn.ModuleList:
    models = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), Interrupted()), nn.Sequential(nn.Linear(64, 64))])
    return brevact.quantize_backward(models, StochBackward2bit, min_numel=0)


@pytest.mark.parametrize("call", [lambda a, b, x: a(x), lambda a, b, x: a[0](x), lambda a, b, x: b(x)])
def test_the_next_forward_with_the_same_settings_ends_an_interrupted_one(call):
    interrupted, other = quantized_layers()
    interrupt(interrupted)
    call(interrupted, other, torch.randn(64, 64)).sum().backward()
    assert current_region() is None


def test_nothing_is_packed_in_what_an_interrupt_leaves_behind():
    interrupt(quantized_layers()[0])
    plain = nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1), nn.LayerNorm(64))
    with watch_saved() as saved:
        plain(torch.randn(64, 64))
    assert saved.tensors and all(t.dtype is not torch.uint8 for t in saved.tensors)
    quantized_layers()[1](torch.randn(64, 64))  # clears it away
    assert current_region() is None


def test_hooks_around_the_forward_after_an_interrupt_stay():
    models, seen = quantized_layers(), []
    interrupt(models[0])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.dtype) or t, lambda t: t):
        models[1](torch.randn(64, 64))
        assert torch.uint8 in seen
        seen.clear()
        nn.Linear(64, 64)(torch.randn(64, 64))
        assert seen == [torch.float32]
    assert top_hooks(True) is None


def test_modes_around_the_forward_after_an_interrupt_stay():
    models = quantized_layers()
    interrupt(models[0])
    with torch.device("meta"):
        models[1](torch.randn(64, 64, device="cpu"))
        assert torch.empty(1).device.type == "meta"
    assert torch.empty(1).device.type == "cpu" and torch._C._len_torch_function_stack() == 0
    interrupted, other = quantized_layers()
    interrupt(interrupted)
    with CountingMode() as counter:
        other(torch.randn(64, 64))
        before = counter.calls
        torch.relu(torch.randn(4))
    assert counter.calls == before + 2
    assert torch._C._len_torch_function_stack() == 0


class CountingMode(TorchFunctionMode):
    """Counts calls of torch functions."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def hooks_around():
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        yield


@pytest.mark.parametrize(
    "around",
    [hooks_around, torch.autograd.graph.save_on_cpu, CountingMode, lambda: brevact.backward_quant(StochBackward8bit)],
)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_contexts_around_an_interrupted_forward_end(around, count, checkpointed):
    """Their end takes away what is innermost: the hooks, or the mode, of the region that the interrupt has left."""
    interrupted, other = quantized_layers()
    x = torch.randn(64, 64, requires_grad=True)
    with pytest.raises(KeyboardInterrupt), contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(around())
        checkpoint(interrupted, x, use_reentrant=False) if checkpointed else interrupted(x)
    other(x).sum().backward()
    assert current_region() is None and top_hooks(True) is None and torch._C._len_torch_function_stack() == 0
    with watch_saved() as saved:
        other(torch.randn(64, 64))
    assert torch.uint8 in {t.dtype for t in saved.tensors}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_interrupted_recomputation_leaves_nothing_behind(use_reentrant):
    interrupted, other = quantized_layers()
    interrupted.append(nn.Linear(64, 64))
    interrupted[1].waits = False
    x = torch.randn(64, 64, requires_grad=True)
    loss = checkpoint(interrupted, x, use_reentrant=use_reentrant).sum()
    interrupted[1].waits = True
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    other(x).sum().backward()
    assert current_region() is None and top_hooks(True) is None and torch._C._len_torch_function_stack() == 0


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


def test_a_with_block_ends_the_regions_that_an_interrupt_left_inside():
    interrupted, _ = quantized_layers()
    with pytest.raises(KeyboardInterrupt), brevact.backward_quant(StochBackward8bit):
        interrupted(torch.randn(64, 64))
    assert current_region() is None and torch._C._len_torch_function_stack() == 0
    with watch_saved() as saved:
        interrupted(torch.randn(64, 64))
    assert current_region() is None
    assert sum(t.dtype is torch.uint8 for t in saved.tensors) == 1


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


# gradients that are singular in what is stored


@pytest.mark.parametrize(
    "op",
    [
        lambda x: 1.0 / x,
        lambda x: x**-1,
        lambda x: x**0.5,
        lambda x: torch.ones_like(x).div_(x),
        lambda x: (x * 1).log_(),
        lambda x: (x * 1).rsqrt_(),
        lambda x: torch.special.log1p(x),
        lambda x: x.prod(1),
        lambda x: x.view(-1, 2).std(1),
        lambda x: F.normalize(x.view(-1, 2)),
        lambda x: F.cosine_similarity(x[:, ::2], x[:, 1::2]),
        lambda x: torch.logsumexp(x, -1),
    ],
)
def test_singular_gradients_are_exact(op):
    x = (torch.rand(1, 64, 8) * 10 + 0.01).squeeze(0).requires_grad_()
    weights = None
    grads = []
    for chosen in (None, settings(bit_width=2)):
        with region(chosen):
            out = op(x * 1 if chosen is None else x + 0)
        weights = torch.randn_like(out) if weights is None else weights
        grads.append(torch.autograd.grad((out * weights).sum(), x)[0])
    torch.testing.assert_close(grads[1], grads[0])


def test_vectors_whose_norm_overflows_have_the_gradients_of_torch():
    """Their cosine is 0 to torch, and so are the gradients."""
    x = (torch.randn(64, 64) * 1e30).requires_grad_()
    grads = []
    for chosen in (None, settings(bit_width=2)):
        with region(chosen):
            out = F.cosine_similarity(x * 1, x.roll(1, 0), dim=-1)
        grads.append(torch.autograd.grad(out.sum(), x)[0])
    assert grads[0].isfinite().all() and torch.equal(grads[1], grads[0])


@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(64), lambda: nn.GroupNorm(4, 64), lambda: nn.RMSNorm(64)])
def test_statistics_of_norms_stay_exact(norm):
    torch.manual_seed(0)
    x = (torch.randn(2048, 64) * torch.rand(2048, 1) * 5).requires_grad_()
    norm = norm()
    weights = torch.randn(2048, 64)
    grads = []
    for chosen in (None, settings(bit_width=2)):
        with watch_saved() as saved, region(chosen):
            out = norm(x * 1)
        grads.append(torch.autograd.grad((out * weights).sum(), x)[0])
    assert any(t.dtype is torch.uint8 for t in saved.tensors)
    assert grads[1].norm() < 2 * grads[0].norm()
    assert F.cosine_similarity(grads[0].flatten(), grads[1].flatten(), dim=0) > 0.9


# sharing and arguments


def test_conjugate_views_are_not_taken_for_each_other():
    z = torch.randn(64, 64, dtype=torch.cfloat)
    a, b = z.imag, z.conj().imag
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(2)]
    with region(settings(bit_width=8, rounding=Rounding.NEAREST)):
        out = F.linear(a, weights[0]).sum() + F.linear(b, weights[1]).sum()
    first, second = torch.autograd.grad(out, weights)
    step = (a.max() - a.min()) / 255
    assert (first + second).abs().max() <= 64 * step


def test_arguments_of_no_counterpart_reach_torch():
    buffer, x = torch.empty(64, 64), torch.randn(64, 64)
    with region(settings()):
        torch.mul(x, x, out=buffer)
        nested = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], requires_grad=True)
        F.gelu(nested)
    assert torch.equal(buffer, x * x)


def test_meta_tensors_run_in_a_region():
    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU()).to("meta")
    with torch.device("meta"), region(settings(min_numel=10**9)):
        assert model(torch.randn(8, 64)).shape == (8, 64)


# what other systems got wrong about what they keep between forward and backward


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))


def gradients(model: nn.Module, loss: Tensor, **options: bool) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), **options))


def loss_of(model: nn.Module, x: Tensor, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return model(x).square().sum()


@every_leaf
def test_forwards_before_one_backward_do_not_overwrite_each_other(leaf):
    model, x = brevact.quantize_backward(convolutions(), leaf, min_numel=0), torch.randn(4, 3, 9, 9)
    expected = gradients(model, loss_of(model, x, 1))
    first = loss_of(model, x, 1)
    for scale in (100.0, 0.01):
        loss_of(model, scale * x, 2)
    assert all(map(torch.equal, gradients(model, first), expected))


@every_leaf
def test_a_second_backward_of_a_kept_graph_is_the_first(leaf):
    model, x = brevact.quantize_backward(convolutions(), leaf, min_numel=0), torch.randn(4, 3, 9, 9)
    loss = loss_of(model, x)
    first = gradients(model, loss, retain_graph=True)
    assert all(map(torch.equal, gradients(model, loss), first))


@every_leaf
def test_models_with_different_quantizers_do_not_mix(leaf):
    model, x = brevact.quantize_backward(convolutions(), leaf, min_numel=0), torch.randn(4, 3, 9, 9)
    other = brevact.quantize_backward(convolutions(), StochBackward8bit, min_numel=0)
    expected = gradients(model, loss_of(model, x, 1))
    loss = loss_of(model, x, 1)
    gradients(other, loss_of(other, x, 2))
    assert all(map(torch.equal, gradients(model, loss), expected))


@every_leaf
def test_noise_is_drawn_anew_for_every_layer_and_step(leaf):
    layers = [nn.Linear(64, 64) for _ in range(2)]
    x, codes = torch.randn(64, 64), []
    for _ in range(2):
        for layer in layers:
            with watch_saved() as saved, brevact.backward_quant(leaf, min_numel=0):
                layer(x.clone())
            codes.extend(t for t in saved.tensors if t.dtype is torch.uint8)
    assert len(codes) == 4
    differ = [not torch.equal(a, b) for i, a in enumerate(codes) for b in codes[:i]]
    assert differ == [brevact.quantizer(leaf).is_stochastic] * 6


@every_leaf
def test_linear_layers_take_any_number_of_axes_and_memory_order(leaf):
    layer = brevact.quantize_backward(nn.Linear(8, 5), leaf, min_numel=0)
    for x in (torch.randn(8), torch.randn(2, 3, 8), torch.randn(2, 8, 4, 6).to(memory_format=torch.channels_last)):
        x = (x if x.dim() < 4 else x.permute(0, 2, 3, 1)).requires_grad_()
        grad = torch.autograd.grad(layer(x).sum(), x)[0]
        torch.testing.assert_close(grad, layer.weight.sum(0).expand(x.shape))


@every_leaf
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_seen_in_the_gradient(leaf, value):
    layer, x = brevact.quantize_backward(nn.Linear(64, 8), leaf, min_numel=0), torch.randn(64, 64)
    x[5, 7] = value
    layer(x)[:5].sum().backward()
    assert not torch.isfinite(layer.weight.grad[:, 7]).any()


@every_leaf
def test_both_save_modes_give_the_same_gradients(leaf):
    x, grads = torch.randn(4, 3, 9, 9), []
    for mode in brevact.SaveMode:
        model = brevact.quantize_backward(convolutions(), leaf, min_numel=0, save_mode=mode)
        grads.append(gradients(model, loss_of(model, x)))
    assert all(map(torch.equal, *grads))


# what quantizers store, and draw

every_noisy_leaf = pytest.mark.parametrize("leaf", LEAVES[:4], ids=lambda leaf: leaf.__name__)


def packs(leaf: object) -> object:
    """Settings that pack every tensor, however small."""
    return brevact.injectors.backward_settings_from(leaf, min_numel=0)


@every_noisy_leaf
def test_no_kind_shares_noise_between_tensors_or_steps(leaf):
    model, x = wide(), torch.randn(64, 256)
    with watch_saved() as saved, region(packs(leaf)):
        for _ in range(2):
            model(x.clone())
    codes = [t for t in saved.tensors if t.dtype is torch.uint8]
    noise = [t for i, t in enumerate(codes) if all(not torch.equal(t, other) for other in codes[:i])]
    assert len(codes) == len(noise) == 12


@every_noisy_leaf
def test_graphs_of_each_kind_run_twice(leaf):
    model = brevact.quantize_backward(wide(), leaf)
    loss = model(torch.randn(64, 256)).square().mean()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    for parameter, grad in zip(model.parameters(), once, strict=True):
        assert torch.equal(parameter.grad, 2 * grad)


@every_noisy_leaf
def test_forwards_before_a_backward_keep_what_each_kind_stored(leaf):
    model = brevact.quantize_backward(wide(), leaf)
    batches, grads = [torch.randn(64, 256) * size for size in (1, 100)], []
    for split in (True, False):
        torch.manual_seed(0)
        model.zero_grad()
        losses = []
        for batch in batches:  # ranges of the second are not those of the first
            losses.append(model(batch).square().mean())
            if split:
                losses[-1].backward()
        if not split:
            sum(losses).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@every_noisy_leaf
def test_edits_in_place_do_not_reach_what_each_kind_stored(leaf):
    grads = []
    for edit in (False, True):
        torch.manual_seed(0)
        x = torch.randn(64, 64, requires_grad=True)
        with region(packs(leaf)):
            hidden = x * 1
            out = F.silu(hidden)
            if edit:
                hidden.add_(1)
        grads.append(torch.autograd.grad(out.sum(), x)[0])
    assert torch.equal(*grads)


@every_noisy_leaf
def test_dropout_is_recomputed_as_it_was_with_each_kind(leaf):
    plain, packed = Block(None), Block(True)
    packed.load_state_dict(plain.state_dict())
    brevact.quantize_backward(packed, leaf, min_numel=0)
    x, grads = torch.randn(64, 64, requires_grad=True), []
    for model in (plain, packed):
        torch.manual_seed(1)
        model(x).square().sum().backward()  # of linear layers: x.grad depends on nothing that is rounded
        grads.append(x.grad)
        x.grad = None
    assert torch.equal(*grads)


@every_noisy_leaf
def test_a_nan_stays_one_in_gradients_of_each_kind(leaf):
    x = torch.randn(4, 4096)
    x[1, 7] = float("nan")
    weight = torch.randn(8, 4096, requires_grad=True)
    with region(packs(leaf)):
        out = F.linear(x, weight)[1]
    assert torch.autograd.grad(out.sum(), weight)[0][:, 7].isnan().all()


@every_noisy_leaf
@pytest.mark.parametrize("op", [lambda x: 1.0 / x, lambda x: x**0.5, lambda x: torch.logsumexp(x, -1)])
def test_singular_gradients_of_each_kind_are_exact(leaf, op):
    x = (torch.rand(64, 64) * 10 + 0.01).requires_grad_()
    weights, grads = torch.randn(64, 64), []
    for chosen in (None, packs(leaf)):
        with region(chosen):
            out = op(x + 0)
        grads.append(torch.autograd.grad((out * weights).sum(), x)[0])
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("leaf", [StochBackward2bit, StochBackward2bit4bitMix], ids=lambda leaf: leaf.__name__)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_with_regions_of_their_own_recompute_the_same_dropout(leaf, use_reentrant):
    masks = []

    class Noted(nn.Module):
        def forward(self, x):
            masks.append(nn.functional.dropout(torch.ones_like(x)))
            return x * masks[-1]

    torch.manual_seed(0)
    quant = {"weight_quant": None, "act_quant": leaf.let(min_numel=0)}
    blocks = [nn.Sequential(bnn.QuantLinear(64, 64, bias=True, **quant), Noted()) for _ in range(3)]
    x = torch.randn(64, 64, requires_grad=True)
    for _ in range(2):
        masks.clear()
        y = x
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=use_reentrant)
        forward = list(masks)
        y.square().sum().backward()
        assert len(masks) == 6 and all(map(torch.equal, masks[3:], reversed(forward)))


POOLINGS = {
    F.max_pool1d: (2, 4, 1024),
    F.max_pool2d: (2, 4, 32, 32),
    F.max_pool3d: (2, 4, 8, 16, 16),
    F.avg_pool1d: (2, 4, 1024),
    F.avg_pool2d: (2, 4, 32, 32),
    F.avg_pool3d: (2, 4, 8, 16, 16),
}
WINDOWS = [
    *({"kernel_size": size} for size in (0, 5000, True, 3.0, None, [], (3, 2), (2,), torch.tensor(3))),
    *({"kernel_size": 3, "stride": stride} for stride in (0, [], (1, 1), torch.tensor(2), 2)),
    *({"kernel_size": 3, "padding": padding} for padding in (-1, 1, 2, (), (1, 1), True)),
]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("pool", POOLINGS, ids=lambda pool: pool.__name__)
def test_pooling_takes_and_refuses_what_torch_does(pool, window):
    leaf = torch.randn(POOLINGS[pool], requires_grad=True)
    outcomes = []
    for chosen in (None, settings(bit_width=2)):
        try:
            with region(chosen):
                y = pool(leaf * 1, **window)
        except Exception as error:
            outcomes.append((type(error), str(error).split("\n")[0]))
        else:
            outcomes.append((y.detach().tolist(), torch.autograd.grad(y, leaf, torch.ones_like(y))[0].tolist()))
    assert outcomes[0] == outcomes[1]


class ScaledOutOfSight(torch.autograd.Function):
    """A Function that no region sees: a batch times a parameter."""

    @staticmethod
    def forward(ctx, scale: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * scale

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return (grad * ctx.saved_tensors[0]).sum(0), None


def test_what_is_larger_than_all_the_weights_it_came_from_is_packed():
    """The batch has no gradient: by its graph, the product comes from a parameter alone."""
    scale, x = nn.Parameter(torch.rand(64)), torch.randn(256, 64)
    with watch_saved() as saved, region(settings()):
        y = ScaledOutOfSight.apply(scale, x)
        y.sin()
    assert saved.tensors and not saved.holds(y)
