"""Regions on a real device: nothing waits for it, CUDA graphs draw new noise, the compiler keeps codes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from brevact.autograd import BackwardSettings, region
from brevact.quantizers import NormalizedQuantizer, Rounding
from tests.autograd.measuring import settings, watch_saved

pytestmark = pytest.mark.gpu


def network() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU(True), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3))
    return nn.Sequential(*convolutions, nn.ReLU(True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def batch(device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 3, 32, 32, generator=generator).to(device), torch.arange(16, device=device) % 10


def step(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    return loss


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gradients_are_those_of_the_cpu(memory_format):
    # 24 bits: half a step is less than float32's own error; the devices sum in other orders.
    found = []
    for device in ("cpu", "cuda"):
        model = network().to(device, memory_format=memory_format)
        brevact.quantize_backward(model, settings(24, Rounding.NEAREST))
        images, labels = batch(device)
        with torch.backends.cudnn.flags(allow_tf32=False):
            step(model, images.contiguous(memory_format=memory_format), labels)
        found.append([p.grad.cpu() for p in model.parameters()])
    top = max(grad.abs().max() for grad in found[0])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-4 * top.item())


@pytest.mark.parametrize("rounding", Rounding)
def test_a_step_does_not_wait_for_the_device(rounding):
    model = brevact.quantize_backward(network().cuda(), settings(2, rounding))
    images, labels = batch("cuda")
    step(model, images, labels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(model, images, labels)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_seeds_fix_the_gradients_on_a_device():
    model = brevact.quantize_backward(network().cuda(), settings(2))
    images, labels = batch("cuda")

    def grad(seed: int) -> Tensor:
        torch.manual_seed(seed)
        model.zero_grad()
        with torch.backends.cudnn.flags(deterministic=True):
            step(model, images, labels)
        return model[0].weight.grad.clone()

    assert torch.equal(grad(1), grad(1))
    assert not torch.equal(grad(1), grad(2))


def test_each_call_of_a_captured_step_draws_new_noise():
    layer = nn.Linear(256, 64).cuda()
    brevact.quantize_backward(layer, settings(2))
    weights = torch.randn(512, 64, device="cuda")

    @brevact.captured
    def run(x: Tensor) -> None:
        layer.zero_grad()
        (layer(x) * weights).sum().backward()

    x, grads = torch.randn(512, 256, device="cuda"), []
    for _ in range(203):
        run(x)
        grads.append(layer.weight.grad.clone())
    values = torch.stack(grads[3:]).double()
    assert not torch.equal(grads[3], grads[4])
    expected = weights.double().t() @ x.double()
    error = (values.mean(0) - expected).abs()
    top = expected.abs().max()
    assert (error <= 5.5 * values.std(0) / len(values) ** 0.5 + 1e-3 * top).all()  # 16,384 entries; TF32 products


def trained(capture, amp: torch.dtype | None) -> list[Tensor]:
    """Losses, parameters and gradients after steps of two shapes, with a schedule and scaled losses."""
    model = brevact.quantize_backward(network().cuda(), settings(4, Rounding.NEAREST))
    rate = torch.tensor(1e-3, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=amp is torch.float16)

    @capture
    def run(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", amp, enabled=amp is not None), brevact.backward_quant(model):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    images, labels = batch("cuda")
    losses = []
    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # it says why a step is not captured
        for call in range(12):
            size = (16, 12)[call % 2]
            losses.append(run(images[:size] + call / 100, labels[:size]))
            schedule.step()
    return [*losses, *(p.detach() for p in model.parameters()), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("amp", [None, torch.bfloat16, torch.float16])
def test_captured_steps_are_the_steps(amp):
    for a, b in zip(trained(brevact.captured, amp), trained(lambda step: step, amp), strict=True):
        assert torch.equal(a, b)


def test_a_step_that_waits_runs_as_it_is():
    model = network().cuda()
    step = brevact.captured(lambda images, labels: F.cross_entropy(model(images), labels).item())
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="it waits for the GPU, at .*test_gpu.py"):
        found = [step(*batch("cuda")) for _ in range(6)]
    assert all(isinstance(each, float) for each in found)


def test_after_a_failed_capture_other_steps_are_captured():
    model = network().cuda()

    def failing(images: Tensor, labels: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return F.dropout(F.cross_entropy(model(images), labels)).detach()

    with torch.no_grad():
        step = brevact.captured(failing)
        with pytest.warns(RuntimeWarning, match="its capture failed with"):
            assert all(step(*batch("cuda")).isfinite() for _ in range(6))
        good = brevact.captured(lambda images: F.dropout(images, 0.5))
        found = [good(torch.ones(1000, device="cuda")) for _ in range(6)]
        assert not torch.equal(found[-1], found[-2]) and torch.rand(3, device="cuda").isfinite().all()


def test_graphed_callables_take_a_model_with_a_policy_inside_of_another_module():
    model = brevact.quantize_backward(network().cuda(), settings(2))
    images, labels = batch("cuda")
    graphed = torch.cuda.make_graphed_callables(nn.Sequential(model), (images,))
    grads = []
    for _ in range(2):
        model.zero_grad()
        step(graphed, images, labels)
        grads.append(model[-1].weight.grad.clone())
    assert not torch.equal(*grads), "replays draw the same noise"


def test_compiled_model_keeps_codes_on_a_device():
    model = brevact.quantize_backward(network().cuda(), settings(24, Rounding.NEAREST))
    reference = network().cuda()
    images, labels = batch("cuda")
    with torch.backends.cudnn.flags(allow_tf32=False):
        with watch_saved() as saved:
            loss = F.cross_entropy(torch.compile(model, fullgraph=True)(images), labels)
        loss.backward()
        step(reference, images, labels)
    assert not [x.shape for x in saved.tensors if x.is_floating_point() and x.dim() == 4 and x.shape[2] > 3]
    top = max(p.grad.abs().max() for p in reference.parameters())
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-4 * top.item())


def test_compiled_model_in_cuda_graphs_draws_new_noise():
    layer = brevact.quantize_backward(nn.Linear(256, 64).cuda(), settings(2))
    run = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    x = torch.randn(512, 256, device="cuda")
    grads = []
    for _ in range(6):
        layer.zero_grad()
        torch.compiler.cudagraph_mark_step_begin()
        run(x).square().sum().backward()
        grads.append(layer.weight.grad.clone())
    assert not torch.equal(grads[-1], grads[-2])


NORMS = {
    "batch_norm": lambda: nn.BatchNorm2d(8),
    "instance_norm": lambda: nn.InstanceNorm2d(8, affine=True),
    "layer_norm": lambda: nn.LayerNorm((12, 16)),
    "group_norm": lambda: nn.GroupNorm(2, 8),
    "rms_norm": lambda: nn.RMSNorm(16),
}


def run_norm(norm: nn.Module, x: Tensor, chosen: BackwardSettings | None) -> tuple[Tensor, tuple[Tensor, ...], int]:
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    with watch_saved() as saved, region(chosen):
        out = norm(leaf * 1)
    weights = {p.untyped_storage().data_ptr() for p in norm.parameters()}
    saved.tensors = [t for t in saved.tensors if t.untyped_storage().data_ptr() not in weights]
    grads = torch.autograd.grad(out, [leaf, *norm.parameters()], out.detach().sin())
    return out.detach(), grads, saved.nbytes


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_norms_run_as_torch_does(name, dtype, autocast, memory_format):
    norm = NORMS[name]().cuda().to(torch.float32 if autocast else dtype)
    x = torch.randn(8, 8, 12, 16, device="cuda").to(dtype).contiguous(memory_format=memory_format)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        expected_out, expected, _ = run_norm(norm, x, None)
        out, grads, stored = run_norm(norm, x, settings(bit_width=32))
    assert torch.equal(out, expected_out) and out.dtype is expected_out.dtype and out.stride() == expected_out.stride()
    statistics = 2 * 4 * x.numel() // 12
    assert stored <= x.numel() * dtype.itemsize + statistics  # no float32 copy of an input in bfloat16
    for grad, reference in zip(grads, expected, strict=True):
        # sums of some hundred products in another order, rounded to the type
        atol = 8 * torch.finfo(dtype).eps * reference.abs().max().item()
        torch.testing.assert_close(grad, reference, rtol=8 * torch.finfo(dtype).eps, atol=atol)


@pytest.mark.parametrize("name", [name for name in NORMS if name != "rms_norm"])
@pytest.mark.parametrize("rounds", [False, True])
def test_groups_with_nan_have_nan_gradients_on_a_device(name, rounds):
    norm, x = NORMS[name]().cuda(), torch.randn(8, 8, 12, 16, device="cuda")
    x[3, 2, 1, 0] = float("nan")
    chosen = BackwardSettings(NormalizedQuantizer(format="L4", quantize_forward=rounds), min_numel=0)
    expected_out, expected, _ = run_norm(norm, x, None)
    out, grads, _ = run_norm(norm, x, chosen)
    assert torch.equal(out.isnan(), expected_out.isnan())
    for grad, reference in zip(grads[:2], expected[:2], strict=True):  # the weighting of the output is NaN, too
        assert torch.equal(grad.isnan(), reference.isnan())
