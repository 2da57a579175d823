"""Weights made of weights are never packed, and usual ones are recomputed from the parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.weight_norm import weight_norm
from torch.utils.checkpoint import checkpoint

import brevact
from brevact import LosslessBackward, StochBackward2bit, StochBackward8bit
from tests.autograd.measuring import Saved, watch_saved

OUT, IN = 72, 64
NUMEL = OUT * IN
X = torch.randn(24, IN, generator=torch.Generator().manual_seed(5))
IMAGES = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(6))


class Standardized(nn.Conv2d):
    """Weight standardization as `timm.layers.ScaledStdConv2d` writes it."""

    def __init__(self, written_out: bool = False) -> None:
        super().__init__(8, 64, 3, bias=False)
        self.gain = nn.Parameter(torch.rand(64, 1, 1, 1) + 0.5)
        self.written_out = written_out

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.written_out:
            var, mean = torch.var_mean(weight, dim=(1, 2, 3), keepdim=True, unbiased=False)
            return F.conv2d(x, (weight - mean) / torch.sqrt(var + 1e-6) * self.gain)
        flat = F.batch_norm(
            weight.reshape(1, 64, -1), None, None, weight=(self.gain * 0.1).view(-1), training=True, momentum=0.0
        )
        return F.conv2d(x, flat.reshape_as(weight))


class Lora(nn.Linear):
    """A frozen weight and a low-rank product, merged in each forward pass."""

    def __init__(self) -> None:
        super().__init__(IN, OUT)
        self.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, IN)), nn.Parameter(torch.randn(OUT, 4))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.scale * (self.b @ self.a), self.bias)


class Made(nn.Linear):
    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__(IN, OUT)
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.make(self.weight), self.bias)


def straight_through(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 7
    return weight + (torch.round(weight / scale) * scale - weight).detach()


def newton_schulz(weight: Tensor) -> Tensor:
    """A step towards an orthogonal matrix, which reads the last one three times."""
    x = weight / weight.norm()
    return 1.5 * x - 0.5 * (x @ x.mT) @ x


class Tanh(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return torch.tanh(weight) * 2.0


def linear() -> nn.Linear:
    return nn.Linear(IN, OUT)


def parametrized() -> nn.Module:
    layer = linear()
    parametrize.register_parametrization(layer, "weight", Tanh())
    return layer


CHAINS: dict[str, Callable[[], nn.Module]] = {
    "weight standardization": Standardized,
    "weight standardization, written out": lambda: Standardized(written_out=True),
    "weight_norm": lambda: parametrizations.weight_norm(linear()),
    "weight_norm of all": lambda: parametrizations.weight_norm(linear(), dim=None),
    "old weight_norm": lambda: nn.Sequential(weight_norm(linear())),
    "spectral_norm": lambda: parametrizations.spectral_norm(linear()),
    "old spectral_norm": lambda: nn.Sequential(nn.utils.spectral_norm(linear())),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(IN, IN), orthogonal_map="matrix_exp"),
    "cayley": lambda: parametrizations.orthogonal(nn.Linear(IN, IN), orthogonal_map="cayley"),
    "householder": lambda: parametrizations.orthogonal(linear(), orthogonal_map="householder"),
    "pruned": lambda: nn.Sequential(prune.l1_unstructured(linear(), "weight", 0.5)),
    "parametrized": parametrized,
    "merged lora": Lora,
    "straight-through": lambda: Made(straight_through),
    "normalized": lambda: Made(lambda weight: F.normalize(weight, dim=1)),
    "layer norm": lambda: Made(lambda weight: F.layer_norm(weight, (IN,))),
    "softmax": lambda: Made(lambda weight: weight.softmax(1)),
    "newton-schulz": lambda: Made(newton_schulz),
    "transposed": lambda: Made(lambda weight: weight.view(IN, OUT).t().mul(2.0).contiguous()),
    "cat": lambda: Made(lambda weight: torch.cat([weight[:40].exp(), weight[40:].sigmoid()])),
}
every_chain = pytest.mark.parametrize("name", CHAINS)
#: Chains that are recomputed whole, by calls of the table alone.
RECOMPUTED = (
    *("weight standardization", "weight standardization, written out", "merged lora", "normalized", "newton-schulz"),
    *("weight_norm", "weight_norm of all", "old weight_norm", "spectral_norm", "old spectral_norm", "transposed"),
)


def input_of(layer: nn.Module) -> Tensor:
    return IMAGES if isinstance(layer, Standardized) else X


def run(layer: nn.Module, autocast: bool = False) -> tuple[Tensor, list[Tensor], Saved]:
    layer.zero_grad()
    torch.manual_seed(4)
    x = input_of(layer).clone().requires_grad_()
    with watch_saved() as saved, torch.autocast("cpu", enabled=autocast):
        out = layer(x * 1)
    out.backward(torch.linspace(-1, 1, out.numel()).sin().view(out.shape).to(out.dtype))
    return out.detach(), [x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)], saved


def made_again(layer: nn.Module, saved: Saved) -> list[tuple[int, ...]]:
    """Shapes of stored floats as large as the largest weight that are no weights themselves."""
    held = {x.untyped_storage().data_ptr() for x in (*layer.parameters(), *layer.buffers())}
    least = max(x.numel() for x in layer.parameters())
    found = {x.untyped_storage().data_ptr(): x for x in saved.tensors if x.is_floating_point()}
    return [tuple(x.shape) for key, x in found.items() if key not in held and x.untyped_storage().nbytes() >= 4 * least]


def pair(make: Callable[[], nn.Module], policy: object = LosslessBackward) -> tuple[nn.Module, nn.Module]:
    """A layer, and one with the same weights that is quantized for backward."""
    torch.manual_seed(1)
    plain = make().train()
    torch.manual_seed(1)
    return plain, brevact.quantize_backward(make().train(), policy)


def twins(name: str, policy: object = LosslessBackward) -> tuple[nn.Module, nn.Module]:
    return pair(CHAINS[name], policy)


@every_chain
@pytest.mark.parametrize("autocast", [False, True])
def test_lossless_gradients_are_those_of_torch(name, autocast):
    plain, quantized = twins(name)
    for _ in range(2):
        (out, expected, plainly), (found_out, found, saved) = run(plain, autocast), run(quantized, autocast)
        assert torch.equal(found_out, out) and len(found) == len(expected) >= 3
        assert all(map(torch.equal, found, expected))
    if name in RECOMPUTED and not autocast:  # which has copies of its own
        assert made_again(plain, plainly) and not made_again(quantized, saved)


@pytest.mark.parametrize("name", ["weight standardization", "weight_norm", "spectral_norm"])
def test_parameters_that_change_before_backward_raise_and_buffers_may_change(name):
    """As in torch, which saves parameters as they are and copies of buffers."""
    plain, quantized = twins(name)
    found = []
    for layer in (plain, quantized):
        torch.manual_seed(0)
        outs = [layer(input_of(layer) * (i + 1.0)) for i in range(2)]  # the second moves the vectors of spectral norm
        for buffer in layer.buffers():
            buffer.mul_(2.0)
        sum(out.sin().sum() for out in outs).backward()
        found.append([p.grad.clone() for p in layer.parameters() if p.grad is not None])
        out = layer(input_of(layer).clone().requires_grad_() * 1)
        with torch.no_grad():
            max(layer.parameters(), key=Tensor.numel).add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    assert len(found[0]) >= 2 and all(map(torch.equal, *found))


def test_functions_with_a_state_run_once():
    mean, var = torch.zeros(OUT), torch.ones(OUT)
    layer = Made(lambda weight: F.batch_norm(weight.T, mean, var, training=True).T)
    brevact.quantize_backward(layer, LosslessBackward)
    layer(X).sum().backward()
    expected = torch.zeros(OUT), torch.ones(OUT)
    F.batch_norm(layer.weight.detach().T, *expected, training=True)
    assert torch.equal(mean, expected[0]) and torch.equal(var, expected[1])


@pytest.mark.parametrize("name", ["weight standardization", "weight_norm", "merged lora"])
def test_graphs_are_kept_and_checkpointed(name):
    plain, quantized = twins(name)
    _, expected, _ = run(plain)
    x = input_of(quantized).clone().requires_grad_()
    leaves = [x, *(p for p in quantized.parameters() if p.requires_grad)]
    for use_checkpoint in (False, True):
        torch.manual_seed(4)
        out = checkpoint(quantized, x * 1, use_reentrant=False) if use_checkpoint else quantized(x * 1)
        direction = torch.linspace(-1, 1, out.numel()).sin().view(out.shape)
        for retain_graph in (False,) if use_checkpoint else (True, False):
            found = torch.autograd.grad(out, leaves, direction, retain_graph=retain_graph)
            assert all(map(torch.equal, found, expected))


@every_chain
def test_lossy_policies_store_no_noise_in_weights(name):
    """The gradient of the input reads the weight alone; of the input that is packed there is one tensor of codes."""
    plain, quantized = twins(name, StochBackward2bit.let(min_numel=512))
    (_, expected, _), (_, found, saved) = run(plain), run(quantized)
    assert torch.equal(found[0], expected[0])
    codes = [x for x in saved.tensors if x.dtype is torch.uint8]
    assert len({x.untyped_storage().data_ptr() for x in codes}) == 1
    assert not any(torch.equal(a, b) for a, b in zip(found[1:], expected[1:], strict=True) if a.dim() > 1)


@pytest.mark.parametrize("name", ["weight standardization", "weight_norm", "merged lora", "transposed"])
def test_gradients_of_the_parameters_are_unbiased(name):
    plain, quantized = twins(name, StochBackward2bit.let(min_numel=512))
    _, expected, _ = run(plain)
    draws = []
    for seed in range(64):
        quantized.zero_grad()
        torch.manual_seed(seed)
        out = quantized(input_of(quantized) * 1)
        out.backward(torch.linspace(-1, 1, out.numel()).sin().view(out.shape))
        draws.append(torch.cat([p.grad.flatten() for p in quantized.parameters() if p.grad is not None]))
    truth = torch.cat([grad.flatten() for grad in expected[1:]])
    along = torch.stack(draws) @ truth / (truth @ truth)
    assert along.std() > 0 and abs(along.mean() - 1) < 5 * along.std() / 8


@pytest.mark.parametrize(
    "make",
    [
        lambda weight: F.dropout(weight, 0.5),
        lambda weight: weight + weight.detach().abs().exp() * torch.randn_like(weight),
        lambda weight: torch.where(torch.rand_like(weight) > 0.5, weight, weight.tanh()),
        lambda weight: F.rrelu(weight, training=True),
        lambda weight: weight.sigmoid().bernoulli() * weight,
        lambda weight: torch.zeros_like(weight).copy_(weight.exp()).mul_(2.0),
        lambda weight: torch.empty_like(weight).normal_().mul(weight),
        lambda weight: weight.sin().add_(1.0).square(),
        lambda weight: weight.abs().copysign(0.0).exp() * (weight.abs().copysign(-0.0).exp() + weight),
        lambda weight: weight.exp(out=torch.empty_like(weight)) if not torch.is_grad_enabled() else weight.exp(),
        lambda weight: F.batch_norm(weight.T, torch.zeros(OUT), torch.ones(OUT), training=True).T,
    ],
)
def test_what_is_random_or_changed_in_place_has_the_gradients_of_torch(make):
    found = []
    for layer in pair(lambda: Made(make)):
        out, grads, _ = run(layer)
        found.append([out, *grads])
    assert all(map(torch.equal, *found))


def test_a_norm_of_an_activation_and_one_of_a_weight_in_one_model():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = Standardized(), nn.BatchNorm2d(64)

        def forward(self, x: Tensor) -> Tensor:
            return F.silu(self.norm(self.conv(x)))

    torch.manual_seed(0)
    model = brevact.quantize_backward(Both(), StochBackward2bit, min_numel=256)
    rows = brevact.memory_report(model, IMAGES).ops
    packed = [row.op for row in rows if row.how == "packed"]
    assert len(packed) == 3, packed  # inputs of convolution and norm, derivative of SiLU


def test_second_derivatives_of_weights_are_those_of_torch():
    found = []
    for layer in twins("weight standardization, written out"):
        out = layer(IMAGES * 1)
        (first,) = torch.autograd.grad(out.sin().sum(), layer.weight, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), layer.gain)[0])
    torch.testing.assert_close(found[1], found[0])


class Propagated(nn.Module):
    """Embeddings propagated by a sparse adjacency matrix, a buffer: a weight that depends on a sparse one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(OUT, IN))
        self.register_buffer("adjacency", torch.eye(OUT).roll(1, 0).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        nodes = self.embedding.tanh()
        for multiply in (torch.sparse.mm, torch.mm, torch.matmul):
            nodes = multiply(self.adjacency.data, nodes).sin()
        return x @ nodes.t()


def test_weights_of_sparse_weights_have_the_gradients_of_torch():
    found = [run(layer) for layer in pair(Propagated)]
    assert torch.equal(found[0][0], found[1][0]) and len(found[0][1]) == 2
    assert all(map(torch.equal, found[0][1], found[1][1]))


def test_learned_queries_are_not_packed():
    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.layer = nn.Parameter(torch.randn(1, 64, IN)), linear()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.queries.expand(4, -1, -1)).sum() * x.sum()

    model = brevact.quantize_backward(Queries(), StochBackward8bit, min_numel=64)
    with watch_saved() as saved:
        model(X)
    assert not any(x.dtype is torch.uint8 for x in saved.tensors)
    assert saved.holds(model.queries)


def test_graphs_pack_no_weight():
    plain, quantized = twins("weight standardization", StochBackward2bit.let(min_numel=512))
    torch._dynamo.reset()
    compiled = torch.compile(quantized, backend="aot_eager", fullgraph=True)
    x = IMAGES.clone().requires_grad_()
    out, (expected, *_), _ = run(plain)
    with watch_saved() as saved:
        found = compiled(x * 1)
    found.backward(torch.linspace(-1, 1, out.numel()).sin().view(out.shape))
    torch.testing.assert_close((found, x.grad), (out, expected))  # ops that the compiler decomposes
    assert len([x for x in saved.tensors if x.dtype is torch.uint8]) == 1
