"""Layers that are recomputed in backward: nothing is stored of their outputs, and the gradients are right."""

import copy
import dataclasses
import gc
from contextlib import nullcontext

import brevitas.nn as qnn
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import brevact
from brevact.autograd import BackwardSettings, region
from brevact.autograd.deriving import cache as held_outputs
from brevact.autograd.deriving import layers
from brevact.autograd.deriving.layers import MOST_NESTED
from brevact.autograd.deriving.norms import ChannelsAgain
from brevact.autograd.saving import storage_report
from brevact.autograd.saving.saved import EXACT
from recipes.models.efficientnetv2 import efficientnetv2
from recipes.models.resnet import ResNet20
from tests.autograd.measuring import Mirrored, settings, watch_saved

#: Stores tensors as doubles, so that gradients are exact, and has the bits from which curved functions derive.
EXACTLY = BackwardSettings(Mirrored(sign=0, bit_width=8), min_numel=0, recompute=10_000)
WITHOUT = BackwardSettings(Mirrored(sign=0, bit_width=8), min_numel=0)
#: The same by a quantizer of users: elements in their own type.
LOSSLESS = brevact.LosslessBackward.let(min_numel=0, recompute=10_000).backward_settings


def block(norm: nn.Module, act: nn.Module, *, bias: bool = False) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(8, 8, 1, bias=bias),
        *(copy.deepcopy(norm), copy.deepcopy(act)),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=bias),
        *(copy.deepcopy(norm), copy.deepcopy(act)),
        nn.Conv2d(8, 4, 1, bias=bias),
    )


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate, self.out = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 8, 1)

    def forward(self, x):
        x = F.silu(self.inner(x))
        return x + self.out(x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))).repeat(1, 2, 1, 1)


class Inverted(nn.Module):
    def __init__(self, blocks: int, channels: int = 4, width: int = 16) -> None:
        super().__init__()
        self.expand = nn.ModuleList(nn.Conv2d(channels, width, 1, bias=False) for _ in range(blocks))
        self.inner = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, groups=width) for _ in range(blocks))
        self.squeeze = nn.ModuleList(nn.Conv2d(width, 4, 1) for _ in range(blocks))
        self.gate = nn.ModuleList(nn.Conv2d(4, width, 1) for _ in range(blocks))
        self.project = nn.ModuleList(nn.Conv2d(width, channels, 1, bias=False) for _ in range(blocks))
        self.norms = nn.ModuleList(
            nn.ModuleList(nn.BatchNorm2d(size) for size in (width, width, channels)) for _ in range(blocks)
        )

    def forward(self, x):
        for i, (first, second, third) in enumerate(self.norms):
            y = F.silu(first(self.expand[i](x)))
            y = F.silu(second(self.inner[i](y)))
            y = y * torch.sigmoid(self.gate[i](F.silu(self.squeeze[i](F.adaptive_avg_pool2d(y, 1)))))
            x = x + third(self.project[i](y))
        return x


class Attention(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (y.view(*y.shape[:2], 4, 4).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        options = {name: y.to(q) if name == "attn_mask" else y for name, y in self.options.items()}
        return x + self.out(F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).reshape(x.shape))


class Addmm(nn.Module):
    """A linear layer as GPT-2's, with a GELU that is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.weight, self.bias = nn.Parameter(torch.randn(16, 32) / 4), nn.Parameter(torch.randn(32))

    def forward(self, x):
        y = torch.addmm(self.bias, self.norm(x).view(-1, 16), self.weight).view(*x.shape[:-1], 32)
        return 0.5 * y * (1 + torch.tanh(0.8 * (y + 0.044715 * torch.pow(y, 3.0))))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 64, bias=False)

    def forward(self, x):
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.reshape(-1, 64), torch.arange(logits[..., 0].numel()) % 64, ignore_index=3)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        y = F.silu(self.layer(self.norm(x)))
        return F.linear(F.silu(self.layer(self.norm(y))), self.layer.weight.t())


NETS = {
    "batch norm, SiLU": (lambda: block(nn.BatchNorm2d(8), nn.SiLU()), (4, 8, 6, 5)),
    "batch norm without weights, GELU": (lambda: block(nn.BatchNorm2d(8, affine=False), nn.GELU()), (4, 8, 6, 5)),
    "frozen batch norm": (lambda: block(nn.BatchNorm2d(8).eval(), nn.SiLU()), (4, 8, 6, 5)),
    "batch norm, ReLU, biases": (lambda: block(nn.BatchNorm2d(8), nn.ReLU(), bias=True), (4, 8, 6, 5)),
    "group norm": (lambda: block(nn.GroupNorm(2, 8), nn.SiLU()), (4, 8, 6, 5)),
    "instance norm": (lambda: block(nn.InstanceNorm2d(8, affine=True), nn.Hardswish()), (4, 8, 6, 5)),
    "no norm": (lambda: block(nn.Identity(), nn.Sigmoid(), bias=True), (4, 8, 6, 5)),
    "transposed": (
        lambda: nn.Sequential(
            nn.SiLU(),
            nn.ConvTranspose2d(4, 8, 3, 2, padding=1, output_padding=1, groups=2),
            *(nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 2, padding="same")),
            nn.BatchNorm2d(8),
        ),
        (4, 4, 6, 5),
    ),
    "volumes": (
        lambda: nn.Sequential(nn.SiLU(), nn.Conv3d(2, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.LeakyReLU()),
        (2, 2, 5, 5, 5),
    ),
    "sequences": (
        lambda: nn.Sequential(nn.SiLU(), nn.Conv1d(4, 8, 3, dilation=2), nn.BatchNorm1d(8), nn.Tanh()),
        (4, 4, 20),
    ),
    "perceptron": (lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)), (4, 7, 16)),
    "rms norm": (lambda: nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 32), nn.RMSNorm(32), nn.SiLU()), (4, 7, 16)),
    "attention": (Attention, (2, 7, 16)),
    "causal attention": (lambda: Attention(is_causal=True, scale=0.7), (2, 7, 16)),
    "attention with a mask": (lambda: Attention(attn_mask=torch.randn(7, 7)), (2, 7, 16)),
    "addmm": (Addmm, (4, 7, 16)),
    "shared weight": (Twice, (4, 7, 16)),
    "dropout": (lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.Dropout(0.5), nn.GELU()), (4, 7, 16)),
    "gated": (Gated, (2, 8, 6, 5)),
    "chain of residual blocks": (lambda: Inverted(5), (4, 4, 6, 5)),
    "logits": (Language, (4, 7, 16)),
    "nested deeper than is allowed": (
        lambda: nn.Sequential(
            *(y for _ in range(6) for y in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU()))
        ),
        (4, 4, 6, 5),
    ),
}


def gradients(net: nn.Module, x: torch.Tensor, used: BackwardSettings | None, autocast=False) -> list[torch.Tensor]:
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    torch.manual_seed(1)
    with region(used) if used is not None else torch.enable_grad():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = net(x)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).cos() if out.dim() else 1
    (out.double() * weights).sum().backward()
    return [x.grad, *(p.grad for p in net.parameters())]


def saved_bytes(net: nn.Module, x: torch.Tensor, used: BackwardSettings) -> int:
    with watch_saved() as saved, region(used):
        loss = net(x.clone().requires_grad_()).sum()
    del loss
    weights = {p.untyped_storage()._cdata for p in net.parameters()}
    found = {y.untyped_storage()._cdata: y.untyped_storage().nbytes() for y in saved.tensors}
    return sum(size for address, size in found.items() if address not in weights)


@pytest.mark.parametrize(("used", "dtype"), [(EXACTLY, torch.float32), (LOSSLESS, torch.float64)])
@pytest.mark.parametrize("name", NETS)
def test_gradients_are_those_of_plain_torch_where_nothing_is_lost(name, dtype, used):
    make, shape = NETS[name]
    torch.manual_seed(0)
    net = make().to(dtype)
    x = torch.randn(shape, dtype=dtype)
    if len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    expected = gradients(copy.deepcopy(net), x, None)
    found = gradients(copy.deepcopy(net), x, used)
    assert saved_bytes(net, x, used) < saved_bytes(net, x, dataclasses.replace(used, recompute=0))
    layers = sum(any(True for _ in each.parameters(recurse=False)) for each in net.modules())
    eps = 64 * max(layers, 4) * torch.finfo(dtype).eps  # of sums of some hundred products, which add over layers
    for grad, reference in zip(found, expected, strict=True):
        top = max(reference.abs().max().item(), 1.0)  # those that cancel, of biases before norms, are noise of the sums
        torch.testing.assert_close(grad, reference, rtol=0, atol=eps * top)


@pytest.mark.parametrize("name", [name for name in NETS if name != "frozen batch norm"])
def test_layers_run_again_in_the_type_in_which_they_ran(name):
    make, shape = NETS[name]
    torch.manual_seed(0)
    net, x = make(), torch.randn(shape)
    without = gradients(copy.deepcopy(net), x, WITHOUT, autocast=True)
    found = gradients(copy.deepcopy(net), x, EXACTLY, autocast=True)
    plain = gradients(copy.deepcopy(net), x, None, autocast=True)
    exact = gradients(copy.deepcopy(net), x, None)
    for grad, other, half, full in zip(found, without, plain, exact, strict=True):
        assert grad.dtype is other.dtype
        # Recomputed values may differ from the forward's as much as autocast's do from full precision.
        allowed = 2 * ((half - full).norm() + (other - half).norm()) + 1e-5 * full.norm() + 1e-5
        assert (grad - half).norm() <= allowed


def test_what_is_held_is_given_back_with_its_last_reader():
    net = block(nn.BatchNorm2d(8), nn.SiLU())
    x = torch.randn(4, 8, 6, 5, requires_grad=True)
    seen = []
    with region(EXACTLY):
        hidden = net[0](x)
        hidden.register_hook(lambda grad: seen.append(_held()))
        loss = net[1:](hidden).sum()
    del hidden
    loss.backward()
    assert seen == [0]  # all readers of the first layer's output have run
    assert _held() == 0


def test_a_layer_runs_once_for_readers_of_its_output_and_of_the_small_norm_behind(monkeypatch):
    runs, run = [], layers.LayerOutput._run
    monkeypatch.setattr(layers.LayerOutput, "_run", lambda *args: runs.append(1) or run(*args))
    gradients(block(nn.BatchNorm2d(8), nn.SiLU()), torch.randn(4, 8, 6, 5), EXACTLY)
    assert len(runs) == 2  # the layers before the two norms


@pytest.mark.parametrize(
    ("name", "recompute"), [("batch norm, SiLU", 100), ("attention", 100), ("chain of residual blocks", 1024)]
)
def test_a_graph_that_is_kept_holds_nothing_after_its_backward_pass(name, recompute):
    make, shape = NETS[name]
    net, x = make(), torch.randn(shape, requires_grad=True)
    with region(settings(bit_width=8, recompute=recompute)):
        loss = net(x).sum()
    first = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    assert _held() == 0
    second = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    assert all(map(torch.equal, first, second))


def _held() -> int:
    """Number of outputs that somebody holds for other readers."""
    gc.collect()
    return sum(isinstance(each, held_outputs._Held) and each.task >= 0 for each in gc.get_objects())


@pytest.mark.parametrize("name", ["batch norm, SiLU", "chain of residual blocks"])
def test_hooks_around_the_region_that_copy_change_nothing(name):
    make, shape = NETS[name]
    net, x = make(), torch.randn(shape)
    expected = gradients(copy.deepcopy(net), x, EXACTLY)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        found = gradients(copy.deepcopy(net), x, EXACTLY)
    for grad, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-4)


def test_a_weight_that_changes_before_backward_is_refused():
    net, x = block(nn.BatchNorm2d(8), nn.SiLU()), torch.randn(4, 8, 6, 5, requires_grad=True)
    with region(EXACTLY):
        loss = net(x).sum()
    with torch.no_grad():
        net[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_reader_that_is_detached_does_not_depend_on_the_weight():
    """Such as a discriminator, whose backward pass may follow the generator's step."""
    generator = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU())
    critic, x = nn.Linear(32, 1), torch.randn(8, 7, 16)
    with region(EXACTLY):
        out = generator(x)
        loss, own = critic(out.detach()).sum(), out.sum()
    own.backward()
    with torch.no_grad():
        generator[1].weight.mul_(2)
    loss.backward()
    torch.testing.assert_close(critic.weight.grad, out.detach().flatten(0, 1).sum(0, keepdim=True))


@pytest.mark.parametrize("rows", [4, 6])
def test_logits_of_a_slice_are_computed_for_it_alone(rows, recwarn):
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 20))
    x, target = torch.randn(6, 8), torch.arange(rows)
    expected = torch.autograd.grad(F.cross_entropy(net(x)[:rows], target), list(net.parameters()))
    with region(EXACTLY):
        loss = F.cross_entropy(net(x)[:rows], target)
    for grad, reference in zip(torch.autograd.grad(loss, list(net.parameters())), expected, strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-5)
    assert not recwarn.list


def test_a_bias_may_change_before_backward_as_in_torch():
    make, shape = NETS["perceptron"]
    net, x = make(), torch.randn(shape)
    other = copy.deepcopy(net)
    expected = gradients(copy.deepcopy(net), x, EXACTLY)
    inputs = x.clone().requires_grad_()
    with region(EXACTLY):
        out = other(inputs)
    with torch.no_grad():
        other[1].bias.add_(1)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).cos()
    (out.double() * weights).sum().backward()
    assert torch.equal(inputs.grad, expected[0])


def test_an_output_that_is_changed_in_place_is_stored():
    net, x = nn.Sequential(nn.SiLU(), nn.Conv2d(4, 8, 1)), torch.randn(2, 4, 5, 5, requires_grad=True)
    last = nn.Conv2d(8, 8, 1)

    def run(used):
        x.grad = None
        with region(used) if used else torch.enable_grad():
            hidden = net(x)
            hidden.mul_(2)
            hidden[:, 0] = 1
            loss = last(hidden).square().sum()
        loss.backward()
        return x.grad.clone(), last.weight.grad.clone()

    plain = run(None)
    last.zero_grad()
    for grad, reference in zip(run(EXACTLY), plain, strict=True):
        torch.testing.assert_close(grad, reference)


def test_a_hook_that_changes_the_output_of_a_layer_is_followed():
    net = nn.Sequential(nn.SiLU(), nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.SiLU())
    net[1].register_forward_hook(lambda module, args, out: out.exp())
    x = torch.randn(2, 4, 5, 5)
    for grad, reference in zip(
        gradients(copy.deepcopy(net), x, EXACTLY), gradients(copy.deepcopy(net), x, None), strict=True
    ):
        torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-4)


def test_nan_reaches_the_gradients():
    net, x = block(nn.GroupNorm(2, 8), nn.SiLU()), torch.randn(4, 8, 6, 5)
    x[1, 2, 3, 4] = torch.nan
    plain = gradients(copy.deepcopy(net), x, None)
    for used in (EXACTLY, settings(bit_width=8, recompute=100)):
        for grad, reference in zip(gradients(copy.deepcopy(net), x, used), plain, strict=True):
            assert (grad.isnan() | ~reference.isnan()).all()


@pytest.mark.parametrize("cost, stored", [(0, 2), (8, 2), (9, 1), (10, 1)])
def test_layers_that_cost_more_than_the_setting_are_stored(cost, stored):
    net = nn.Sequential(nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.SiLU())
    with watch_saved() as saved, region(settings(bit_width=8, recompute=cost)):
        loss = net(torch.randn(4, 8, 16, 16, requires_grad=True)).sum()
    packed = {y.untyped_storage()._cdata for y in saved.tensors if y.dtype is torch.uint8}
    assert len(packed) == stored
    del loss


def test_the_reader_says_how_much_a_layer_may_cost():
    conv = nn.Sequential(nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.SiLU())
    fine = brevact.DitherBackward8bit.let(min_numel=0)

    def packed(rules):
        net = brevact.quantize_backward(copy.deepcopy(conv), rules)
        return brevact.memory_report(net, torch.randn(4, 8, 16, 16)).saved_bytes

    everywhere, nowhere = packed({"": fine.let(recompute=9)}), packed({"": fine})
    assert packed({"2": fine.let(recompute=9), "": fine}) == everywhere < nowhere
    assert packed({"2": fine, "": fine.let(recompute=9)}) == nowhere


def test_few_bits_are_no_source_of_layers():
    net, x = nn.Sequential(nn.SiLU(), nn.Conv2d(4, 8, 1), nn.SiLU()), torch.randn(2, 4, 16, 16)
    for bits in (2, 3):
        assert saved_bytes(net, x, settings(bits, recompute=64)) == saved_bytes(net, x, settings(bits))
    assert saved_bytes(net, x, settings(4, recompute=64)) < saved_bytes(net, x, settings(4))


def test_chains_of_layers_end():
    net = nn.Sequential(*(y for _ in range(8) for y in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU())))
    with watch_saved() as saved, region(settings(8, recompute=64)):
        loss = net(torch.randn(4, 4, 16, 16, requires_grad=True)).sum()
    packed = {y.untyped_storage()._cdata for y in saved.tensors if y.dtype is torch.uint8}
    assert len(packed) == -(-8 // MOST_NESTED) + 1  # the input, and the input of a norm each few layers
    del loss


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_a_chain_are_the_same_by_every_route(deterministic):
    net, x = Inverted(5), torch.randn(4, 4, 8, 8)
    used, found = settings(8, recompute=1024), []

    def run(call, hooks):
        net.zero_grad()
        inputs = x.clone().requires_grad_()
        torch.manual_seed(3)
        with hooks, region(used):
            loss = call(inputs).square().mean()
        loss.backward()
        found.append([inputs.grad, *(p.grad.clone() for p in net.parameters())])

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        for hooks in (nullcontext(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)):
            run(net, hooks)
        run(lambda x: net.forward(x=x), nullcontext())
        with storage_report.recording():
            run(net, nullcontext())
    finally:
        torch.use_deterministic_algorithms(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize(("name", "recompute"), [("batch norm, SiLU", 100), ("chain of residual blocks", 1024)])
def test_a_checkpoint_of_the_user_is_left_alone(name, recompute):
    make, shape = NETS[name]
    net, x = make(), torch.randn(shape)
    inside = settings(bit_width=8, recompute=recompute)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    found = gradients(copy.deepcopy(Checkpointed()), x, inside)
    for grad, reference in zip(found, gradients(copy.deepcopy(Checkpointed()), x, None), strict=True):
        assert (grad - reference).norm() <= 0.05 * reference.norm() + 1e-5


def test_compiled_graphs_recompute_no_layer():
    net, x = nn.Sequential(nn.SiLU(), nn.Conv2d(4, 8, 1), nn.SiLU()), torch.randn(2, 4, 16, 16)
    expected = gradients(copy.deepcopy(net), x, settings(8))
    compiled = torch.compile(copy.deepcopy(net), fullgraph=True, backend="aot_eager")
    for grad, reference in zip(gradients(compiled, x, settings(8, recompute=64)), expected, strict=True):
        assert (grad - reference).norm() <= 0.05 * reference.norm()


def on_a_grid(*shape: int) -> torch.Tensor:
    """Values that 8-bit codes give back as they are: 256 of them at equal distances, with the ends in each bucket."""
    x = torch.randint(256, shape).float()
    flat = x.view(-1, 64)
    flat[:, 0], flat[:, 1] = 0.0, 255.0
    return x / 64 - 2


ON_GRID = brevact.NearestBackward8bit.let(min_numel=0, bucket_size=64, recompute=10_000)


@pytest.mark.parametrize("act", [nn.SiLU, nn.ReLU, nn.Sigmoid])
@pytest.mark.parametrize("size", [8, 80], ids=["small", "large"])  # the second in pieces
def test_gradients_through_batch_norms_by_kernels_are_those_of_plain_torch(act, size):
    make = nn.Sequential(
        *(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), act()),
        *(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), act()),
    )
    x = on_a_grid(8, 4, size, size)
    plain, ours = copy.deepcopy(make), brevact.quantize_backward(copy.deepcopy(make), ON_GRID)
    weights = torch.randn(8, 8, size, size)
    found = []
    for net in (plain, ours):
        inputs = x.clone().requires_grad_()
        out = net(inputs)
        (out * weights).sum().backward()
        found.append([out.detach(), inputs.grad, *(p.grad for p in net.parameters())])
    assert torch.equal(found[0][0], found[1][0])
    for grad, reference in zip(found[1], found[0], strict=True):
        terms = x.numel()
        top = max(reference.abs().max().item(), weights.abs().sum().item() / terms)
        torch.testing.assert_close(grad, reference, rtol=0, atol=64 * terms**0.5 * torch.finfo().eps * top)


def test_a_norm_that_takes_the_memory_of_its_input_leaves_it_to_readers_that_come_later():
    """The norm runs last in forward, and first in backward: the other reader recomputes the layer."""
    layer, norm, weights = nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), torch.randn(8, 8, 16, 16)
    inputs = on_a_grid(8, 4, 16, 16)

    def gradients_of(context):
        for module in (layer, norm):
            module.zero_grad()
        x = inputs.clone().requires_grad_()
        with context:
            hidden = layer(x)
            other = F.silu(hidden)
            out = norm(hidden)
        ((out + other) * weights).sum().backward()
        return [x.grad, layer.weight.grad.clone(), norm.weight.grad.clone()]

    plain, found = gradients_of(torch.enable_grad()), gradients_of(brevact.backward_quant(ON_GRID))
    for grad, reference in zip(found, plain, strict=True):
        torch.testing.assert_close(grad, reference, rtol=0, atol=1e-4 * reference.abs().max().item())


def _inverted_residuals() -> tuple[nn.Module, torch.Tensor]:
    blocks = [
        nn.Sequential(
            *(nn.Conv2d(8, 32, 3, padding=1), nn.BatchNorm2d(32), nn.SiLU()),
            *(nn.Conv2d(32, 8, 1), nn.BatchNorm2d(8)),
        )
        for _ in range(3)
    ]
    return nn.Sequential(*blocks), torch.randn(16, 8, 32, 32)


def _perceptrons() -> tuple[nn.Module, torch.Tensor]:
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
    return nn.Sequential(*blocks), torch.randn(128, 64, 64)


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [_inverted_residuals, _perceptrons])
def test_outputs_that_are_recomputed_add_nothing_to_the_peak_of_a_step(make):
    model, x = make()

    def peak(policy: object) -> int:
        net = brevact.quantize_backward(copy.deepcopy(model), policy)
        return brevact.step_report(net, x, lambda net, x: net(x).square().mean(), rounds=2).packed_peak

    assert peak(brevact.RECOMPUTE) <= peak(brevact.DEFAULT)


class Residuals(nn.Module):
    """Bottlenecks whose sums are functions of all blocks before."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.Conv2d(16, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
                *(nn.Conv2d(4, 16, 1, bias=False), nn.BatchNorm2d(16)),
            )
            for _ in range(blocks)
        )

    def forward(self, x):
        for block in self.blocks:
            x = F.relu(x + block(x))
        return x


@pytest.mark.parametrize("size", [6, 80], ids=["small", "large"])
def test_sums_of_residual_blocks_derive(size):
    net, x = Residuals(4), torch.randn(8, 16, size, size)
    expected, found = (gradients(copy.deepcopy(net), x, used) for used in (None, EXACTLY))
    for grad, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(grad, reference, rtol=0, atol=1e-3 * max(reference.abs().max().item(), 1.0))
    few, many = (saved_bytes(Residuals(n), x, settings(8, recompute=100)) for n in (1, 4))
    with_sums = 3 * x.numel()  # of 8 bits each, were they stored
    assert many - few < with_sums


@pytest.mark.exhaustive
def test_gradients_of_weights_in_16_bits_are_summed_in_float32():
    """Behind recomputed layers samples come one after the other: sums of their gradients in bfloat16 stand still."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 16, 1), nn.SiLU(), nn.Conv2d(16, 16, 1))
    x, target = torch.randn(96, 8, 128, 128), torch.randn(96, 16, 1, 1)

    def weight_gradient(used: BackwardSettings | None, dtype: torch.dtype) -> torch.Tensor:
        net.zero_grad()
        with region(used) if used is not None else torch.enable_grad():
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
                out = net(x)
            ((out.float() - 1) * target).square().mean().backward()
        return net[2].weight.grad.clone()

    exact = weight_gradient(None, torch.float32)
    plain, found = (
        (weight_gradient(used, torch.bfloat16) - exact).norm() / exact.norm()
        for used in (None, settings(8, recompute=1024))
    )
    # bfloat16 rounds the sum once (2^-9), and its terms; 8 bits add a 255th of half a range to each element
    assert found <= plain + 2**-9 + 1 / 255


def test_a_backward_pass_that_raises_leaves_no_outputs_to_the_next_ones():
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.SiLU())
    second = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 1))
    x = torch.randn(4, 8, 6, 6, requires_grad=True)
    raises = [True]

    def hook(grad: torch.Tensor) -> None:
        if raises[0]:
            raise ValueError("as asked")

    with region(EXACTLY):
        y = first(x)
        y.register_hook(hook)
        loss = second(y).square().sum()
    with pytest.raises(ValueError, match="as asked"):
        loss.backward(retain_graph=True)
    raises[0] = False
    loss.backward(retain_graph=True)
    assert _held() == 0
    plain = second(first(x)).square().sum()
    torch.testing.assert_close(x.grad, torch.autograd.grad(plain, x)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "make",
    [lambda: ResNet20(classes=10), lambda: efficientnetv2("nano", image_size=32, classes=10)],
    ids=["ResNet", "EfficientNet"],
)
def test_exact_gradients_in_a_fourth_of_the_bytes(make):
    torch.manual_seed(0)
    model = make().train()
    ours = brevact.quantize_backward(copy.deepcopy(model), brevact.LosslessBackward, recompute=1024)
    batch = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    found = []
    for net, use in ((model, torch.enable_grad()), (ours, brevact.backward_quant(ours))):
        torch.manual_seed(1)
        with use:
            loss = F.cross_entropy(net(batch[0]), batch[1])
        loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    # as above: roundings of sums of some hundred products, relative to the gradient of all weights
    assert (found[1] - found[0]).norm() <= 256 * torch.finfo(torch.float32).eps * found[0].norm()
    assert brevact.memory_report(ours, batch, lambda net, batch: F.cross_entropy(net(batch[0]), batch[1])).ratio >= 4


def test_a_quantized_model_that_is_recomputed_has_exact_gradients():
    torch.manual_seed(0)
    layers = [qnn.QuantConv2d(3, 8, 3, padding=1, weight_bit_width=4), nn.BatchNorm2d(8), qnn.QuantReLU(bit_width=4)]
    model = nn.Sequential(*layers, qnn.QuantConv2d(8, 8, 1, weight_bit_width=4), nn.BatchNorm2d(8), nn.SiLU())
    x = torch.randn(8, 3, 16, 16)
    ours = brevact.quantize_backward(copy.deepcopy(model), brevact.LosslessBackward, recompute=1024, min_numel=0)
    for net in (model, ours):
        net(x).square().mean().backward()
    for a, b in zip(ours.parameters(), model.parameters(), strict=True):
        top = max(b.grad.abs().max().item(), 1e-2)
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=256 * torch.finfo(torch.float32).eps * top)


class Given(layers.HeldOutput):
    """Decoder of an output that somebody else may hold, as another thread of the backward pass."""

    shape, dtype = (64, 3, 64, 64), torch.float32
    quality, lasts, depth = EXACT, True, 1

    def __init__(self, held: list[torch.Tensor] | None) -> None:
        self.held = held

    def _computed(self, tensors):
        out = torch.ones(self.shape)
        if self.held is not None:
            self.held.append(out)
        return out, None


@pytest.mark.parametrize("held", [None, []], ids=["alone", "held"])
def test_outputs_are_overwritten_only_where_nobody_else_holds_them(held):
    """Python counts the references; how many a lone local has depends on its version."""
    token = held_outputs.make_token(torch.device("cpu"))
    out, is_owned = layers.take(Given(held), (token,))
    assert is_owned == (held is None) and torch.equal(out, torch.ones(Given.shape))
    alignment = type("Alone", (), {"inverse": staticmethod(lambda spread: spread)})()
    norm = ChannelsAgain(((Given(held), 1),), alignment, (False,), Given.shape, out.stride(), out.dtype)
    found = norm.decode((token, torch.full((3,), 2.0), torch.ones(3)))
    assert torch.equal(found, torch.full(Given.shape, 3.0))
    assert all(torch.equal(each, torch.ones(Given.shape)) for each in held or ())
