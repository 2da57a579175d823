"""Seeds: fixed by torch's generator, without a change of any other random number, and unseen by modes of others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import brevact
import brevact.nn as bnn
from brevact import StochBackward2bit, StochBackward2bit4bitMix, StochBackward8bit
from brevact.autograd import region
from brevact.autograd.region.module_hooks import regions_disabled
from brevact.trainers.training_policy import kept_random_state
from tests.autograd.leaves import every_noisy_leaf, packs, wide
from tests.autograd.measuring import watch_saved

LEAF = StochBackward2bit.let(min_numel=0)


def code_bytes(model: nn.Module, x: Tensor) -> Tensor:
    with watch_saved() as saved:
        model(x.clone())  # which nothing else has packed
    return torch.cat([t.flatten() for t in saved.tensors if t.dtype is torch.uint8])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.1))


def layers_with_their_own() -> nn.Module:
    quant = {"weight_quant": None, "act_quant": LEAF, "bias": True}
    return nn.Sequential(bnn.QuantLinear(64, 64, **quant), nn.Dropout(0.5), bnn.QuantLinear(64, 64, **quant))


def checkpointed(use_reentrant: bool) -> nn.Module:
    model = net()
    body = model.forward
    model.forward = lambda x: checkpoint(body, x, use_reentrant=use_reentrant)  # type: ignore[method-assign]
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], object]] = {
    "stochastic": (net, LEAF),
    "dithered": (net, brevact.DitherBackward4bit.let(min_numel=0)),
    "sizes that are drawn": (net, StochBackward2bit4bitMix.let(min_numel=0)),
    "without dropout": (lambda: nn.Linear(64, 64), LEAF),
    "layers": (layers_with_their_own, None),
    "checkpoint": (functools.partial(checkpointed, False), LEAF),
    "reentrant checkpoint": (functools.partial(checkpointed, True), LEAF),
}


@pytest.mark.parametrize("name", MODELS)
def test_all_other_random_numbers_are_those_without_brevact(name):
    """Outputs of three steps, the order of a data set between them, and later draws."""
    make, policy = MODELS[name]
    runs = []
    for quantized in (False, True):
        torch.manual_seed(0)
        model = make()
        if quantized and policy is not None:
            brevact.quantize_backward(model, policy)
        drawn, found = [], 0
        for _ in range(3):
            x = torch.randn(32, 64, requires_grad=True)
            with nullcontext() if quantized else regions_disabled():
                with watch_saved() as saved:
                    out = model(x)
                out.square().sum().backward()
            found += sum(t.dtype is torch.uint8 for t in saved.tensors)
            drawn += [x, out, torch.randperm(100), torch.randn(1)]
        drawn.append(torch.rand(2000))
        assert bool(found) == quantized or "checkpoint" in name  # a checkpoint's saved tensors are inside
        runs.append(drawn)
    assert all(map(torch.equal, *runs))


def test_a_seed_fixes_every_code_also_where_nothing_is_drawn_meanwhile():
    model, x = brevact.quantize_backward(nn.Linear(64, 64), LEAF), torch.rand(32, 64)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append([code_bytes(model, x) for _ in range(4)])
    assert all(map(torch.equal, *runs))
    first = runs[0]
    assert not any(torch.equal(first[i], first[j]) for i in range(4) for j in range(i))


def test_a_run_that_resumes_from_the_state_of_the_generator_has_the_same_codes():
    """The number of regions is set before the state is restored, whose seed is another one."""
    model, x = brevact.quantize_backward(nn.Linear(64, 64), LEAF), torch.rand(32, 64)
    code_bytes(model, x)
    state, count = torch.get_rng_state(), brevact.noise_count()
    expected = [code_bytes(model, x) for _ in range(2)]
    torch.manual_seed(9)
    assert brevact.noise_count() == 0 and brevact.noise_count(count) == count
    torch.set_rng_state(state)
    assert all(map(torch.equal, expected, [code_bytes(model, x) for _ in range(2)]))


def restored(run: Callable[[], Tensor]) -> Tensor:
    state = torch.get_rng_state()
    out = run()
    torch.set_rng_state(state)
    return out


def forked(run: Callable[[], Tensor]) -> Tensor:
    with torch.random.fork_rng():
        return run()


def validated(run: Callable[[], Tensor]) -> Tensor:
    """With a validation before the step, which has a seed of its own and regions that pack."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        run()
    return forked(run)


def measured(run: Callable[[], Tensor]) -> Tensor:
    with kept_random_state():
        torch.manual_seed(0)
        run()
    return forked(run)


def recomputed(run: Callable[[], Tensor]) -> Tensor:
    """In a reentrant checkpoint, which restores the state of its forward."""
    found: list[Tensor] = []

    def body(x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            found.append(run())
        return x * 2

    checkpoint(body, torch.ones(2, requires_grad=True), use_reentrant=True).sum().backward()
    return found[0]


AROUND = [restored, forked, validated, measured, recomputed]


@pytest.mark.parametrize("draws", [False, True], ids=["just seeded", "after draws"])
@pytest.mark.parametrize("around", AROUND, ids=lambda around: around.__name__)
def test_regions_share_no_noise_where_the_state_is_put_back_around_them(around, draws):
    model, x = brevact.quantize_backward(nn.Sequential(nn.Linear(64, 64), nn.Dropout()), LEAF), torch.rand(32, 64)
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        if draws:
            torch.rand(1)
        runs.append([around(lambda: code_bytes(model, x)) for _ in range(4)])
        runs[-1].append(code_bytes(model, x))
    assert all(map(torch.equal, *runs))  # each run begins with `manual_seed`
    assert not any(torch.equal(runs[0][i], runs[0][j]) for i in range(5) for j in range(i))


def test_the_mean_of_steps_whose_state_is_restored_tends_to_the_exact_gradient():
    """As cached losses rerun forwards: the mean of 16 draws has a quarter of one draw's error."""
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64), torch.randn(256, 64)
    target = torch.randn(256, 64)

    def gradient() -> Tensor:
        with torch.random.fork_rng():
            return torch.autograd.grad((model(x) * target).sum(), model.weight)[0]

    exact = gradient()
    brevact.quantize_backward(model, LEAF)
    errors = torch.stack([gradient() - exact for _ in range(16)])
    one, mean = errors.square().sum((1, 2)).mean(), errors.mean(0).square().sum()
    # The mean of 16 has 1 / 16 of the variance; of its 4096 elements at least those of a row are independent.
    assert mean < one / 16 * (1 + 5 * (2 / 64) ** 0.5)


def test_every_name_of_manual_seed_restarts_the_noise():
    model, x = brevact.quantize_backward(nn.Linear(64, 64), LEAF), torch.rand(32, 64)
    names = (torch.manual_seed, torch.random.manual_seed, torch._disable_dynamo(torch.random.manual_seed))
    found = []
    for seed in names * 2:
        seed(4)
        found.append(code_bytes(model, x))
    assert all(torch.equal(found[0], each) for each in found)
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        torch.manual_seed("four")
    assert brevact.noise_count() == 1


def test_a_checkpoint_inside_a_region_does_not_share_its_noise():
    """The recomputed block, whose region is a root in backward, starts from the generator's state of the forward."""
    block = brevact.quantize_backward(nn.Linear(64, 64), LEAF)
    x, codes = torch.rand(32, 64, requires_grad=True), []

    def body(y: Tensor) -> Tensor:
        codes.append(code_bytes(block, y.detach().requires_grad_()))
        return block(y)

    with watch_saved() as saved, brevact.backward_quant(LEAF):
        y = (
            F.linear(x * 1, torch.randn(8, 64, requires_grad=True)).sum()
            + checkpoint(body, x, use_reentrant=False).sum()
        )
    of_region = next(t for t in saved.tensors if t.dtype is torch.uint8)
    y.backward()
    assert len(codes) == 2 and of_region.numel() == codes[1].numel()
    assert not torch.equal(of_region, codes[1])


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("leaf", [StochBackward2bit, StochBackward2bit4bitMix], ids=lambda leaf: leaf.__name__)
def test_modes_of_others_see_no_draw_of_a_seed(leaf):
    model = brevact.quantize_backward(nn.Linear(64, 64), leaf, min_numel=0)
    torch.manual_seed(0)
    with Ops() as ops:
        model(torch.ones(32, 64)).sum().backward()
    assert not any(word in name for name in ops.names for word in ("rand", "bernoulli", "random_"))
    assert any("mm" in name for name in ops.names)


def test_flops_are_those_of_the_plain_model():
    plain = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    counts = []
    for quantized in (False, True):
        model = brevact.quantize_backward(plain, LEAF) if quantized else plain
        with FlopCounterMode(display=False) as counter:
            model(torch.randn(2, 16, 64)).sum()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


SAVED = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.convolution.default]


class Selective(nn.Module):
    """A stem, and a body that a selective checkpoint recomputes in part; a linear layer reads the body's input, too."""

    def __init__(self, body: nn.Module, saved: list[object] | None) -> None:
        super().__init__()
        self.stem, self.side, self.body, self.saved = nn.Linear(64, 64), nn.Linear(64, 64), body, saved

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.stem(x))
        side = self.side(x).square().mean()
        if self.saved is None:
            return self.body(x).square().mean() + side
        contexts = functools.partial(create_selective_checkpoint_contexts, self.saved)
        return checkpoint(self.body, x, use_reentrant=False, context_fn=contexts).square().mean() + side


BODIES: dict[str, Callable[[], nn.Module]] = {
    "perceptron": lambda: nn.Sequential(
        *(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.ReLU()),
        *(nn.Linear(64, 64), nn.Softmax(-1), nn.Linear(64, 64)),
    ),
    "transformer": lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True),
    "convolutions": lambda: nn.Sequential(
        *(nn.Unflatten(1, (8, 4)), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Flatten(1, 2)),
    ),
}
RULES: dict[str, object] = {
    "one quantizer": StochBackward8bit.let(min_numel=0),
    "outside and inside": {"": StochBackward8bit.let(min_numel=0), "body": LEAF},
    "inside": {"body.*": StochBackward8bit.let(min_numel=0)},
    "sizes that are drawn": {"*": StochBackward2bit4bitMix.let(min_numel=0)},
    "default": brevact.DEFAULT,
}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", BODIES)
def test_selective_checkpoints_train(name, rules):
    torch.manual_seed(0)
    model = brevact.quantize_backward(Selective(BODIES[name](), SAVED), RULES[rules])
    x = torch.randn(8, 32, 64)
    for _ in range(2):
        model.zero_grad()
        model(x).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_selective_checkpoints_do_not_count_the_ops_of_packing():
    """Packing makes views: more of them when the block is recomputed than in the forward pass."""
    torch.manual_seed(0)
    model = Selective(BODIES["perceptron"](), [torch.ops.aten.view.default])
    brevact.quantize_backward(model, StochBackward2bit4bitMix.let(min_numel=0))
    for _ in range(2):
        model(torch.randn(8, 32, 64, requires_grad=True)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", BODIES)
def test_selective_checkpoints_have_the_gradients_of_full_ones(name):
    """At 24 bits, whose error is below that of sums, cached results fit recomputed ones."""
    torch.manual_seed(0)
    plain, x = Selective(BODIES[name](), None), torch.randn(8, 32, 64)
    selective = Selective(plain.body, SAVED)
    selective.stem, selective.side = plain.stem, plain.side
    grads = []
    for model in (plain, selective):
        if model is selective:
            brevact.quantize_backward(model, StochBackward8bit.let(bit_width=24, min_numel=0))
        torch.manual_seed(1)
        model.zero_grad()
        model(x).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for found, expected in zip(*reversed(grads), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("nested", [False, True])
def test_recomputed_layers_draw_what_they_drew_before(nested):
    """Three forwards wait for backward, also twice, with no random number between them."""
    quant = {"weight_quant": None, "act_quant": LEAF, "bias": True}
    layers = nn.Sequential(*(bnn.QuantLinear(64, 64, **quant) for _ in range(3)))
    again = functools.partial(checkpoint, use_reentrant=False)

    def inside(x: Tensor) -> Tensor:
        return layers[2](again(layers[1], layers[0](x))) if nested else layers(x)

    runs = []
    for forward in (layers, functools.partial(again, inside)):
        torch.manual_seed(0)
        x = torch.rand(32, 64, requires_grad=True)
        outs = [forward(x * 1) for _ in range(3)]
        wrt = [x, *layers.parameters()]
        for out in (*reversed(outs), outs[0]):
            runs.append(torch.autograd.grad(out.square().sum(), wrt, retain_graph=True))
        assert brevact.noise_count() == 9
    for plain, found in zip(runs[:4], runs[4:], strict=True):
        assert all(map(torch.equal, plain, found))
    assert not torch.equal(runs[0][1], runs[1][1])


@every_noisy_leaf
def test_no_kind_shares_noise_between_tensors_or_steps(leaf):
    model, x = wide(), torch.randn(64, 256)
    with watch_saved() as saved, region(packs(leaf)):
        for _ in range(2):
            model(x.clone())
    codes = [t for t in saved.tensors if t.dtype is torch.uint8]
    noise = [t for i, t in enumerate(codes) if all(not torch.equal(t, other) for other in codes[:i])]
    assert len(codes) == len(noise) == 12
