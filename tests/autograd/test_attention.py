"""Laws of attention in a region: torch's own forward pass, gradients of torch's own attention on decoded tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import brevact
from brevact.autograd import attach_region, region
from brevact.quantizers import Rounding, UniformQuantizer
from tests.autograd.exactness import run_exactly
from tests.autograd.measuring import EXACT_VALUES, settings, train_module, watch_saved

attend = F.scaled_dot_product_attention


def tensors(*shapes: tuple[int, ...], dtype=torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def run(leaves, chosen, weights=None, autocast=False, call=attend, **options):
    """Output and gradients of attention over activations; those of a mask that has one, too."""
    torch.manual_seed(0)
    with region(chosen), torch.autocast("cpu", enabled=autocast):
        out = call(*(leaf * 1 for leaf in leaves), **options)
    weights = torch.linspace(-1, 1, out.numel()).sin().view(out.shape).to(out.dtype) if weights is None else weights
    mask = options.get("attn_mask")
    wanted = [*leaves, mask] if mask is not None and mask.requires_grad else leaves
    state = torch.get_rng_state()
    grads = torch.autograd.grad((out * weights).sum(), wanted)
    assert torch.equal(torch.get_rng_state(), state)
    return out, grads


def check(leaves, chosen=EXACT_VALUES, counts: bool = True, **options) -> None:
    """Compare with torch: the output bit for bit, gradients up to some roundings."""
    expected_out, expected = run(leaves, None, **options)
    out, grads = run(leaves, chosen, **options)
    assert torch.equal(out, expected_out) and out.stride() == expected_out.stride() and out.dtype == expected_out.dtype
    assert ("Formula" in out.grad_fn.name()) == counts
    eps = 64 * torch.finfo(out.dtype).eps
    for grad, reference in zip(grads, expected, strict=True):
        assert grad.shape == reference.shape and grad.dtype == reference.dtype
        torch.testing.assert_close(grad, reference, rtol=0, atol=eps * reference.abs().max().item())


Q, K = (2, 4, 8, 16), (2, 4, 10, 16)
MASK = (torch.arange(80).view(8, 10) * 7 % 5 > 1) & (torch.arange(8) != 3)[:, None]  # the fourth row is masked out
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "boolean mask": {"attn_mask": MASK},
    "mask of a batch": {"attn_mask": MASK.expand(2, 1, 8, 10)},
    "dropout": {"dropout_p": 0.3},
    "causal dropout": {"dropout_p": 0.3, "is_causal": True},
    "masked dropout": {"dropout_p": 0.3, "attn_mask": MASK},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_attention_is_torchs(options, dtype):
    check(tensors(Q, K, K, dtype=dtype), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trains", [False, True])
def test_masks_that_are_added(dtype, trains):
    mask = torch.randn(2, 1, 8, 10).masked_fill(~MASK, -torch.inf).to(dtype).requires_grad_(trains)
    check(tensors(Q, K, K, dtype=dtype), attn_mask=mask)


@pytest.mark.parametrize(
    "shapes, options",
    [
        (((8, 16), (10, 16), (10, 16)), {}),
        (((4, 8, 16), (4, 10, 16), (4, 10, 16)), {}),
        (((3, 2, 4, 8, 16), (3, 2, 4, 10, 16), (3, 2, 4, 10, 16)), {}),
        ((Q, K, (2, 4, 10, 7)), {}),
        ((Q, K, (2, 4, 10, 24)), {"is_causal": True}),
        ((Q, (2, 2, 10, 16), (2, 2, 10, 16)), {"enable_gqa": True}),
        ((Q, (2, 1, 10, 16), (2, 1, 10, 16)), {"enable_gqa": True, "dropout_p": 0.2}),
        ((Q, (2, 1, 10, 16), (2, 1, 10, 16)), {}),
        (((2, 4, 1, 16), (2, 4, 1, 16), (2, 4, 1, 16)), {}),
    ],
)
def test_shapes_of_attention(shapes, options):
    check(tensors(*shapes), **options)


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.2}, {"attn_mask": MASK}])
def test_attention_under_autocast_is_torchs(options):
    check(tensors(Q, K, K), autocast=True, **options)
    mask = torch.randn(8, 10, requires_grad=True)
    check(tensors(Q, K, K), autocast=True, **{**options, "attn_mask": mask})


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.2}])
def test_attention_by_a_chosen_kernel_is_torchs(options):
    def by_math(*inputs: Tensor, **options) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attend(*inputs, **options)

    check(tensors(Q, K, K), call=by_math, **options)


def test_transposed_heads_and_slices_of_one_projection():
    def of_projection(x: Tensor, **options) -> Tensor:
        q, k, v = x.view(2, 24, 3, 4, 16).unbind(2)
        return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options).transpose(1, 2)

    check(tensors((2, 24, 192)), call=of_projection, counts=False)
    leaf = tensors((2, 24, 192))
    assert torch.equal(run(leaf, settings(), call=of_projection)[0], run(leaf, None, call=of_projection)[0])


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk"])
def test_attention_of_constants(wanted):
    values = tensors(Q, K, K)
    for chosen in (None, EXACT_VALUES, settings()):
        leaves = {name: x for name, x in zip("qkv", values, strict=True) if name in wanted}
        inputs = [x * 1 if name in wanted else x.detach() for name, x in zip("qkv", values, strict=True)]
        with watch_saved() as saved, region(chosen):
            out = attend(*inputs)
        grads = torch.autograd.grad(out.sin().sum(), list(leaves.values()))
        if chosen is None:
            expected = grads
        elif chosen is EXACT_VALUES:
            for grad, reference in zip(grads, expected, strict=True):
                torch.testing.assert_close(grad, reference)
    assert [t.dtype for t in saved.tensors].count(torch.uint8) == (2 if wanted == "v" else 3)


def test_causal_masks_that_are_subclasses_pack_by_what_they_run():
    from torch.nn.attention.bias import causal_lower_right

    check(tensors(Q, K, K), attn_mask=causal_lower_right(8, 10))


def attend_with_made_mask(x: Tensor, blocked: float | None, layers: int = 1) -> Tensor:
    """Attend by a mask (4, 64, 64) that is computed, a quarter of which, and a row, may be blocked."""
    mask, sizes = (x @ x.mT).sin() * 3, (4, 64, 64)
    if blocked is not None:
        where = torch.rand(sizes, generator=torch.Generator().manual_seed(0)) < 0.25
        where[:, 5] = True
        mask = mask + torch.zeros(sizes).masked_fill(where, blocked)
    for _ in range(layers):
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocked", [None, -100.0, -1e9, -torch.inf])
def test_masks_that_layers_make_are_packed_once_and_blocked_scores_spoil_no_others(blocked, dtype):
    x = torch.randn(4, 64, 16).to(dtype)

    def step(bits: int | None, blocked: float | None, layers: int = 1) -> tuple[Tensor, Tensor, int]:
        out, (grad,), saved = run_exactly(lambda x: attend_with_made_mask(x, blocked, layers), [x], bits)
        return out, grad, saved.nbytes

    errors = []
    for value in (blocked, None):
        (expected_out, expected, plain), (out, grad, _), (_, packed, nbytes) = (
            step(bits, value) for bits in (None, 32, 8)
        )
        assert torch.equal(out, expected_out) and nbytes < plain - 4 * 64 * 64
        eps = 64 * torch.finfo(dtype).eps
        torch.testing.assert_close(grad, expected, rtol=0, atol=eps * expected.abs().max().item())
        errors.append((packed - expected).norm() / expected.norm())
    assert errors[0] < 2 * errors[1]
    assert step(8, blocked, layers=3)[2] - step(8, blocked, layers=2)[2] < 4 * 64 * 64


def test_a_made_mask_with_nan_has_no_plausible_gradient():
    x = torch.randn(4, 64, 16)
    x[0, 3, 2] = torch.nan
    _, (grad,), _ = run_exactly(lambda x: attend_with_made_mask(x, -100.0), [x], 8)
    assert grad.isnan().any()


def finer(bit_width: int, rounding: Rounding) -> UniformQuantizer:
    return UniformQuantizer(bit_width=max(bit_width, 8), rounding=rounding)


@pytest.mark.parametrize("bit_width", [2, 4, 12])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": MASK}, {"dropout_p": 0.3}])
def test_backward_is_torchs_on_decoded_tensors(bit_width, options):
    leaves, weights = tensors(Q, K, K), torch.randn(Q)
    leaves[1].data[..., :8] += 5.0
    chosen = settings(bit_width, Rounding.NEAREST, bucket_size=512)
    of_scores, of_value = finer(bit_width, Rounding.NEAREST), chosen.quantizer
    query, key, value = (x.detach() for x in leaves)
    mean = key.mean(-2, keepdim=True)
    key = key - torch.where(mean.abs() > key.std(-2, correction=0, keepdim=True), mean, 0)
    decoded = [
        of.quantize(x).dequantize().requires_grad_()
        for x, of in zip((query, key, value), (of_scores, of_scores, of_value), strict=True)
    ]
    _, grads = run(leaves, chosen, weights, **options)
    _, expected = run(decoded, None, weights, **options)
    for grad, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("peak", [0.0, 3.0])
def test_the_bias_of_two_bits_is_small(peak):
    draws = 100
    q, k, v = tensors((1, 2, 64, 32), (1, 2, 64, 32), (1, 2, 64, 32))
    q = (q + peak * k).detach().requires_grad_()  # each query looks at its own key
    weights = torch.randn(1, 2, 64, 32)
    _, expected = run([q, k, v], None, weights)
    samples = []
    for seed in range(draws):
        torch.manual_seed(seed)
        with region(settings(bit_width=2, bucket_size=512)):
            out = attend(q * 1, k * 1, v * 1)
        samples.append(torch.autograd.grad((out * weights).sum(), [q, k, v]))
    for i, reference in enumerate(expected):
        values = torch.stack([grads[i] for grads in samples]).double()
        noise = values.var(0).sum() / draws
        square = ((values.mean(0) - reference).square().sum() - noise) / reference.square().sum()
        # sums of 4096 squares: 5 of their standard errors, and a bias of 3 % of the norm
        spread = 5 * (2 / 4096) ** 0.5 * noise / reference.square().sum() * 8
        assert square <= 0.03**2 + spread, f"gradient {i}: bias {square.clamp_min(0).sqrt():.3f}"


def test_what_keys_have_in_common_adds_no_noise():
    """Offsets of trained key projections exceed differences between keys; a score's softmax does not depend on them."""
    errors = []
    for offset in (0.0, 30.0):
        q, k, v = (x.detach() for x in tensors((1, 2, 64, 32), (1, 2, 64, 32), (1, 2, 64, 32)))
        leaves = [x.requires_grad_() for x in (q, k + offset * torch.linspace(-1, 1, 32), v)]
        expected, grads = (run(leaves, each)[1] for each in (None, settings(8, bucket_size=512)))
        errors.append(max(float((a - b).norm() / b.norm()) for a, b in zip(grads, expected, strict=True)))
    assert errors[1] < 2 * errors[0]


@pytest.mark.parametrize("size", [1e3, 1e10, 1e30])
def test_far_keys_that_are_masked_out_add_no_noise(size):
    """Each key is a bucket of its own: others decode as if the far ones were not there."""
    errors, mask = [], (torch.arange(64) < 58).expand(64, 64)
    for factor in (1.0, size):
        torch.manual_seed(0)
        leaves = tensors((1, 2, 64, 32), (1, 2, 64, 32), (1, 2, 64, 32))
        leaves[1].data[:, :, 58:] *= factor
        both = [run(leaves, each, attn_mask=mask)[1] for each in (None, settings(8, bucket_size=32))]
        errors.append(max(float((a - b).norm() / b.norm()) for b, a in zip(*both, strict=True)))
    assert errors[1] < 1.1 * errors[0]


def test_queries_and_keys_take_eight_bits_and_nothing_else_is_stored():
    shape = (4, 8, 128, 32)
    inputs = [x * 1 for x in tensors(shape, shape, shape)]
    with watch_saved() as saved, region(settings(bit_width=2, bucket_size=512)):
        attend(*inputs)
    numel = inputs[0].numel()
    packed = [UniformQuantizer(bit_width=b).quantize(torch.zeros(shape)).nbytes for b in (8, 8, 2)]
    assert sorted(t.untyped_storage().nbytes() for t in saved.tensors) == sorted(packed)
    assert saved.nbytes < 2.3 * numel  # of 16 that torch keeps


def test_dropout_stores_the_state_of_the_generator():
    shape = (4, 8, 128, 32)
    sizes = []
    for chosen in (None, settings(bit_width=2, bucket_size=512)):
        inputs = [x * 1 for x in tensors(shape, shape, shape)]
        with watch_saved() as saved, region(chosen):
            attend(*inputs, dropout_p=0.1)
        sizes.append(saved.nbytes)
    assert sizes[1] < sizes[0] / 20


def test_views_of_queries_are_packed_once():
    with watch_saved() as saved, region(settings(bit_width=8)):
        x = torch.randn(2, 64, 4, 32, requires_grad=True) * 1
        attend(*(x.transpose(1, 2) for _ in range(3)))
        x.transpose(1, 2) @ x.permute(0, 2, 3, 1)
    assert len({t.untyped_storage().data_ptr() for t in saved.tensors}) == 1


def test_nan_in_the_value_reaches_the_gradients():
    leaves = tensors(Q, K, K)
    leaves[2].data[0, 0, 3, 5] = float("nan")
    for grad, reference in zip(run(leaves, settings())[1], run(leaves, None)[1], strict=True):
        assert grad[reference.isnan()].isnan().all()


def test_a_mask_that_is_overwritten_is_noticed():
    mask = MASK.clone()
    with region(settings()):
        out = attend(*(x * 1 for x in tensors(Q, K, K)), attn_mask=mask)
    mask.logical_not_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_backward_twice_and_inside_a_region():
    leaves = tensors(Q, K, K)
    for chosen in (None, settings(bit_width=2)):
        with region(settings(bit_width=4, rounding=Rounding.NEAREST)):
            out = attend(*(leaf * 1 for leaf in leaves), dropout_p=0.2)
        with region(chosen), torch.autocast("cpu"), watch_saved() as saved:
            grads = [torch.autograd.grad(out.sum(), leaves, retain_graph=True) for _ in range(2)]
        assert all(map(torch.equal, *grads)) and not saved.tensors
        with pytest.raises(RuntimeError, match="double backward"):
            torch.autograd.grad(out.sum(), leaves, create_graph=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_attention_in_a_checkpoint(use_reentrant):
    leaves, grads = tensors(Q, K, K), []
    for wrapped in (False, True):
        torch.manual_seed(0)
        with region(EXACT_VALUES):
            inputs = [leaf * 1 for leaf in leaves]
            call = (lambda *x: checkpoint(attend, *x, None, 0.3, use_reentrant=use_reentrant)) if wrapped else None
            out = call(*inputs) if call else attend(*inputs, None, 0.3)
        out.sin().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
    for grad, reference in zip(*grads, strict=True):
        torch.testing.assert_close(grad, reference)


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_of_a_model_stores_packed_tensors(need_weights):
    model = nn.MultiheadAttention(64, 4, batch_first=True)
    brevact.quantize_backward(model, brevact.StochBackward2bit)
    x = torch.randn(4, 64, 64)
    with watch_saved() as saved:
        out = model(x, x, x, need_weights=need_weights)[0]
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    floats = [t for t in saved.tensors if t.is_floating_point() and t.untyped_storage().data_ptr() not in weights]
    assert all(t.numel() < 4096 or (need_weights and t.shape == (16, 64, 64)) for t in floats)
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


class Fused(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
        self.last, self.dropout = nn.Linear(64, 64), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).view(*x.shape[:2], 4, 16).transpose(1, 2) for project in self.projections)
        mask = (torch.arange(64) % 7 != 3).expand(64, 64)
        out = F.scaled_dot_product_attention(q, k, v, mask, self.dropout)
        return self.last(out.transpose(1, 2).reshape(x.shape))


def compiled(module: nn.Module) -> nn.Module:
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            return torch.compile(self.module, backend="aot_eager", fullgraph=True)(x)

    torch._dynamo.reset()
    return Compiled()


@pytest.mark.parametrize(
    "make",
    [Fused, lambda: Fused(0.1), lambda: nn.TransformerEncoderLayer(64, 4, 64, dropout=0.1, batch_first=True)],
    ids=["fused", "fused dropout", "layer"],
)
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.`")
def test_attention_compiles_whole_and_stores_packed_tensors(make):
    module, x = make(), torch.randn(4, 64, 64)
    _, _, plain = train_module(module, [x], None)
    attach_region(module, settings(bit_width=4, rounding=Rounding.NEAREST, bucket_size=512))
    _, grads, saved = train_module(compiled(module), [x], None)
    assert all(grad.isfinite().all() for grad in grads if grad is not None)
    mask = x.shape[1] ** 2 * x.element_size()  # a graph keeps the float mask, or that of dropout
    assert saved.nbytes <= plain.nbytes / 3 + mask  # query and key have 8 bits
