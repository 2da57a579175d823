"""Seeds: fixed by torch's generator, without a change of any other random number, and unseen by modes of others."""

from __future__ import annotations

import functools
import threading
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
from brevact.autograd import region, seeds
from brevact.autograd.hooks import regions_disabled
from brevact.autograd.seeds import SeedStream
from brevact.private_names.generator_state import count_on, fingerprint, has_unused_bits
from tests.autograd.leaves import every_leaf, every_noisy_leaf, packs, wide
from tests.autograd.measuring import watch_saved

LEAF = StochBackward2bit.let(min_numel=0)
HOST = torch.device("cpu")


def code_bytes(model: nn.Module, x: Tensor) -> Tensor:
    """Run a forward pass and return all codes that it stores."""
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
    """Outputs of three steps, the order of a data set between them, and what comes after."""
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
        assert bool(found) == quantized or "checkpoint" in name  # what those store is inside
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
    model, x = brevact.quantize_backward(nn.Linear(64, 64), LEAF), torch.rand(32, 64)
    code_bytes(model, x)
    state = torch.get_rng_state()
    expected = [code_bytes(model, x) for _ in range(2)]
    torch.manual_seed(9)
    torch.set_rng_state(state)
    assert all(map(torch.equal, expected, [code_bytes(model, x) for _ in range(2)]))
    torch.set_rng_state(state)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        code_bytes(model, x)
    assert torch.equal(code_bytes(model, x), expected[0])


def test_two_models_and_two_seeds_do_not_share_noise():
    models, x = [brevact.quantize_backward(nn.Linear(64, 64), LEAF) for _ in range(2)], torch.rand(32, 64)
    found = []
    for seed in (0, 1, 2**32, -1):
        torch.manual_seed(seed)
        found += [code_bytes(model, x) for model in models]
    assert not any(torch.equal(found[i], found[j]) for i in range(len(found)) for j in range(i))


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


def test_regions_of_threads_that_overlap_let_the_generator_draw():
    torch.manual_seed(0)
    streams, started, ends = [SeedStream()], threading.Event(), threading.Event()
    streams[0].next(HOST)

    def other() -> None:
        streams.append(SeedStream())
        streams[1].next(HOST)
        started.set()
        ends.wait()

    thread = threading.Thread(target=other)
    thread.start()
    started.wait()
    streams[0].close()  # while the other one is open: its thread may draw
    ends.set()
    thread.join()
    drawn = torch.rand(4)
    streams[1].close()
    torch.manual_seed(0)
    torch.randint(2**63 - 1, ())
    assert torch.equal(drawn, torch.rand(4))
    following = torch.rand(4)
    assert not torch.equal(drawn, following)


# the state of the generator


@pytest.mark.parametrize("drawn", [0, 1, 2, 623, 624, 625, 1247, 1248, 3000])
def test_count_on_changes_no_random_number_and_tells_states_apart(drawn):
    assert has_unused_bits()
    plain, counted = (torch.Generator().manual_seed(11) for _ in range(2))
    for each in (plain, counted):
        torch.randint(2, (drawn,), generator=each)
        torch.randn(1, generator=each, dtype=torch.float64)  # keeps the second one of a pair
    found = {fingerprint(counted)}
    for _ in range(50):
        assert count_on(counted)
        found.add(fingerprint(counted))
    assert len(found) == 51 and counted.initial_seed() == plain.initial_seed()
    for draw in (
        lambda g: torch.randn(1, generator=g, dtype=torch.float64),
        lambda g: torch.randint(2**31, (1500,), generator=g),
        lambda g: torch.randn(40, generator=g),
    ):
        assert torch.equal(draw(plain), draw(counted))


def test_count_on_leaves_a_state_alone_whose_first_word_is_still_to_come():
    generator = torch.Generator().manual_seed(0)
    torch.randint(2, (1,), generator=generator)
    state = generator.get_state()
    state[16:24] = 0  # the place of the next word
    generator.set_state(state)
    assert not count_on(generator)
    assert torch.equal(generator.get_state(), state)


# modes of others


class Ops(TorchDispatchMode):
    """Counts the ops that it sees."""

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


# selective checkpoints

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
    """Views, of which packing makes some: more of them when the block is recomputed than in the forward pass."""
    torch.manual_seed(0)
    model = Selective(BODIES["perceptron"](), [torch.ops.aten.view.default])
    brevact.quantize_backward(model, StochBackward2bit4bitMix.let(min_numel=0))
    for _ in range(2):
        model(torch.randn(8, 32, 64, requires_grad=True)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", BODIES)
def test_selective_checkpoints_have_the_gradients_of_full_ones(name):
    """At 24 bits, whose error is below that of sums: what is taken from the cache fits what is recomputed."""
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


@every_noisy_leaf
def test_no_kind_shares_noise_between_tensors_or_steps(leaf):
    model, x = wide(), torch.randn(64, 256)
    with watch_saved() as saved, region(packs(leaf)):
        for _ in range(2):
            model(x.clone())
    codes = [t for t in saved.tensors if t.dtype is torch.uint8]
    noise = [t for i, t in enumerate(codes) if all(not torch.equal(t, other) for other in codes[:i])]
    assert len(codes) == len(noise) == 12
