"""`torch.utils.checkpoint` inside and around regions: it recomputes from the inputs of the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import brevact
from brevact import NearestBackward4bit, Policy, StochBackward2bit
from brevact.autograd import current_region
from brevact.private_names.of_torch import top_hooks
from brevact.quantizers import UniformQuantizer
from tests.autograd.measuring import watch_saved

LEAF = StochBackward2bit.let(min_numel=0)
CHECKPOINTS = {"non-reentrant": False, "reentrant": True}


class Noted(nn.Module):
    """A block that takes note of its inputs: in the forward pass, and when it is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.seen = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        return x + self.body(x)


class Net(nn.Module):
    """A stem, whose output several layers read, and blocks that ``run`` checkpoints."""

    def __init__(self, run: Callable[[nn.Sequential, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.side = nn.Linear(64, 64), nn.Linear(64, 64)
        self.blocks, self.run = nn.Sequential(*(Noted() for _ in range(4))), run

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.stem(x))
        side = self.side(x)  # packs the input of the first checkpoint
        return self.run(self.blocks, x) + side


class Checkpointed(nn.Module):
    def __init__(self, body: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.body, self.use_reentrant = body, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=self.use_reentrant)


def each(use_reentrant: bool) -> Callable[[nn.Sequential, Tensor], Tensor]:
    def run(blocks: nn.Sequential, x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    return run


def nested(blocks: nn.Sequential, x: Tensor) -> Tensor:
    def pair(a: nn.Module, b: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda y: b(checkpoint(a, y, use_reentrant=False))

    x = checkpoint(pair(blocks[0], blocks[1]), x, use_reentrant=False)
    return checkpoint(pair(blocks[2], blocks[3]), x, use_reentrant=False)


RUNS: dict[str, Callable[[nn.Sequential, Tensor], Tensor]] = {
    "non-reentrant": each(False),
    "reentrant": each(True),
    "sequential": lambda blocks, x: checkpoint_sequential(blocks, 2, x, use_reentrant=False),
    "sequential, reentrant": lambda blocks, x: checkpoint_sequential(blocks, 2, x, use_reentrant=True),
    "nested": nested,
}
RULES: dict[str, object] = {
    "one quantizer": LEAF,
    "default": brevact.DEFAULT,
    "blocks": {"blocks.*": LEAF},
    "blocks alone": {"blocks.?": LEAF, "*": None},
    "outside": {"blocks": None, "*": LEAF},
    "dithered": {"*": brevact.DitherBackward2bit.let(min_numel=0)},
}


def batch() -> Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()


def with_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("run", RUNS)
def test_what_is_recomputed_has_the_input_of_the_forward_pass(run, rules):
    """Bit for bit, though the side branch, and layers of a region around, have packed the same tensor."""
    model = brevact.quantize_backward(Net(RUNS[run]), RULES[rules])
    with_gradients(model, batch())
    for block in model.blocks:
        first, *others = block.seen
        assert others or run.startswith("sequential")  # whose last part is no checkpoint
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("in_block", [False, True])
@pytest.mark.parametrize("run", RUNS)
def test_checkpoints_of_layers_in_eval_mode(run, in_block):
    """Whether they pack does not depend on the region around, which is gone when they are recomputed."""
    model, x = Net(RUNS[run]), batch()
    expected = with_gradients(model, x)
    brevact.quantize_backward(model, UniformQuantizer(bit_width=32), min_numel=0)
    model.blocks[1].eval()
    model.blocks[2].body.eval()
    with brevact.backward_quant(model) if in_block else nullcontext():
        out = model(x).square().mean()
    model.zero_grad()
    out.backward()
    for p, reference in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, reference)


@pytest.mark.parametrize("rule", [None, LEAF], ids=["full precision", "own quantizer"])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("use_reentrant", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_checkpointed_norm_is_rounded_by_its_own_rule_alone(use_reentrant, rule, trains):
    """The region around, whose norms go on with rounded values, is gone when the norm is recomputed."""
    torch.manual_seed(0)
    first, norm, x = nn.Linear(64, 64), nn.LayerNorm(64), torch.randn(32, 64)
    expected = norm(first(x))
    model = nn.Sequential(first, Checkpointed(norm, use_reentrant))
    rounded = brevact.L2Backward.let(quantize_forward=True, min_numel=0)
    brevact.quantize_backward(model, {"1.body": rule, "*": rounded})
    norm.train(trains)
    out = model(x)
    assert torch.equal(out, expected)
    out.sum().backward()


@pytest.mark.parametrize("backward", [Tensor.backward, torch.autograd.backward], ids=["method", "function"])
@pytest.mark.parametrize("block", ["model", "quantizer", "full precision"])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.filterwarnings("ignore:.*packed nothing")
def test_checkpoints_recompute_in_a_block_of_code(run, block, backward):
    """A backward pass in the block runs as after it: torch takes the region's mode away."""
    model, x, quantizer = Net(RUNS[run]), batch(), UniformQuantizer(bit_width=32)
    expected = with_gradients(model, x)
    model.zero_grad()
    brevact.quantize_backward(model, quantizer, min_numel=0)
    with brevact.backward_quant({"model": model, "quantizer": quantizer, "full precision": None}[block]):
        region = current_region()
        backward(model(x).square().mean())
        assert current_region() is region
    assert current_region() is None and top_hooks(True) is None
    for p, reference in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, reference)


@pytest.mark.parametrize("use_reentrant", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_checkpoints_in_a_block_of_code_recompute_at_full_precision(use_reentrant):
    """The region has ended by then: gradients of checkpointed blocks are exact for the gradient that they get."""
    model, x = Net(each(use_reentrant)), batch()
    expected = with_gradients(model, x)
    model.zero_grad()
    with brevact.backward_quant(LEAF):
        loss = model(x).square().sum() * 0 + model(x).mean()  # a linear loss: no gradient is rounded on its way
    loss.backward()
    packed = [p.grad for p in model.blocks.parameters()]
    model.zero_grad()
    (model(x).square().sum() * 0 + model(x).mean()).backward()
    assert all(map(torch.equal, packed, [p.grad for p in model.blocks.parameters()]))
    assert len(expected) > len(packed) > 0


@pytest.mark.parametrize("use_reentrant", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_rule_for_checkpoints_packs_their_inputs(use_reentrant):
    rules = {checkpoint: NearestBackward4bit.let(min_numel=0), "*": LEAF}
    nbytes = []
    for policy in (LEAF, rules):
        torch.manual_seed(0)
        model = brevact.quantize_backward(Net(each(use_reentrant)), policy)
        with watch_saved() as saved:
            out = model(batch())
        nbytes.append(saved.nbytes)
        out.square().mean().backward()
    x = batch()
    inputs = 4 * x.nbytes
    assert nbytes[0] - nbytes[1] > inputs * (1 - 5.5 / 32)  # 4 bits, and bounds
    for block in model.blocks:
        first, again = block.seen
        assert not torch.equal(first, again)
        step = (first.max() - first.min()) / 15
        assert (first - again).abs().max() <= step  # half a step of a bucket, at most of all


@pytest.mark.parametrize("source", [NearestBackward4bit.let(min_numel=0), None], ids=["packed", "as it is"])
@pytest.mark.parametrize("use_reentrant", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_rule_for_checkpoints_holds_in_a_block_of_code(use_reentrant, source):
    model, x = Net(each(use_reentrant)), batch()
    with brevact.backward_quant(Policy({checkpoint: source, "*": LEAF})):
        loss = model(x).sum()
    loss.backward()
    for block in model.blocks:
        first, again = block.seen
        assert torch.equal(first, again) == (source is None)


@pytest.mark.parametrize("policy", [None, LEAF], ids=["plain", "2 bits"])
@pytest.mark.parametrize("use_reentrant", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_inputs_of_checkpoints_that_change_in_place_raise_an_error(use_reentrant, policy):
    block = nn.Linear(64, 64)
    with brevact.backward_quant(policy):
        x = batch() * 1
        out = checkpoint(block, x, use_reentrant=use_reentrant)
        x.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class Experts(nn.Module):
    """Sparse routing: each token goes to the expert of its largest score, in a batch of a size of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(64, 4), nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        best, chosen = scores.max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            out = out.index_add(0, rows, F.gelu(expert(x[rows])) * best[rows, None])
        return x + out


class Routed(nn.Module):
    def __init__(self, kind: type[nn.Module], use_reentrant: bool | None) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(64, 64), nn.ModuleList(kind() for _ in range(2))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("policy", [brevact.DEFAULT, LEAF], ids=["default", "2 bits"])
@pytest.mark.parametrize("use_reentrant", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_experts_in_a_checkpoint_train(use_reentrant, policy):
    torch.manual_seed(0)
    model = brevact.quantize_backward(Routed(Experts, use_reentrant), policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(torch.randn(256, 64)).square().mean()
        loss.backward()
        optimizer.step()
    assert loss.isfinite()
