"""Models of other fields with their libraries' own losses: the recommended training step, in a region of the model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import brevact
from benchmarks.domain_models import DOMAINS
from benchmarks.step import Model, Step, loss_of
from brevact import BackwardSettings, LosslessBackward, StochBackward8bit
from brevact.autograd.region.seeds import seeded
from tests.autograd.measuring import watch_saved
from tests.real_models.test_real_models import Spy, without_zeros

pytestmark = pytest.mark.exhaustive

#: Times that `DEFAULT` keeps less, where it is less than 8 times. Graph nets keep the indices of their edges, and
#: divide by sums over them; of checkpointed layers, which keep their inputs as they are, the loss is left.
RATIOS = {
    "PyG GCN": 2.4,
    "PyG GATv2": 5.0,
    "PyG TransformerConv": 5.0,
    "Mixtral, checkpoints": 2.8,
    "Qwen3-MoE, checkpoints": 2.8,
}
DRAWS = 24
#: Rounding of float32 sums of gradients, relative to the largest gradient of the model: some hundred roundings.
ROUNDING = 256 * torch.finfo(torch.float32).eps


@pytest.fixture(params=DOMAINS)
def domain(request) -> Model:
    found = DOMAINS[request.param]
    if found.missing():
        pytest.skip(f"{request.param} needs {', '.join(found.missing())}: see benchmarks/domain_models.py")
    return found


def packed(domain: Model, policy: Any = brevact.DEFAULT) -> Step:
    """The step with a policy: built anew, since some models refuse to be copied."""
    step = domain.build()
    return step._replace(model=brevact.quantize_backward(step.model, policy))


def gradients(step: Step, seed: int = 0) -> dict[str, Tensor]:
    step.model.zero_grad(set_to_none=True)
    loss_of(step, seed).backward()
    return {name: p.grad for name, p in step.model.named_parameters() if p.grad is not None}


def norm_of(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(x.double().square().sum()) for x in tensors))


def digests(step: Step) -> set[tuple[tuple[int, ...], int]]:
    Spy.seen.clear()
    loss_of(step, 0)
    return set(Spy.seen)


def unequal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of the gradients that differ in a bit, or are missing."""
    return [name for name, x in expected.items() if name not in found or not torch.equal(found[name], x)]


def test_losses_and_lossless_gradients_are_bit_equal(domain):
    plain = domain.build()
    assert torch.equal(loss_of(packed(domain), 0), loss_of(plain, 0))
    assert unequal(gradients(packed(domain, LosslessBackward)), gradients(domain.build())) == []


def test_gradients_at_8_bits_are_close(domain):
    expected, found = gradients(domain.build()), gradients(packed(domain, StochBackward8bit))
    assert 0.0 < norm_of(found[name] - x for name, x in expected.items()) < 0.1 * norm_of(expected.values())


def test_mean_of_draws_is_the_gradient_of_each_parameter(domain):
    expected, step = gradients(domain.build()), packed(domain)
    state = [x.detach().clone() for x in (*step.model.parameters(), *step.model.buffers())]
    draws = []
    for draw in range(DRAWS):
        with torch.no_grad():  # statistics that a forward pass collects
            for x, before in zip((*step.model.parameters(), *step.model.buffers()), state, strict=True):
                x.copy_(before)
        with seeded(draw):  # the seed of the model's own random numbers stays
            draws.append(gradients(step))
    largest = max(float(x.abs().max()) for x in expected.values())
    errors = {}
    for name, x in expected.items():
        own = torch.stack([each[name] for each in draws]).double()
        standard_error = math.sqrt(float(own.var(0).sum()) / DRAWS) + ROUNDING * largest
        errors[name] = norm_of([own.mean(0) - x]) / standard_error
    assert max(errors.values()) < 5.0, {name: error for name, error in errors.items() if error >= 5.0}


def kept_bytes(step: Step) -> int:
    """Bytes of the distinct storages that autograd keeps for the step, without weights and inputs."""
    held = [*step.model.parameters(), *step.model.buffers(), *tree_leaves(step.batch)]
    known = {x.untyped_storage().data_ptr() for x in held if isinstance(x, Tensor)}
    with watch_saved() as saved:
        loss = loss_of(step, 0)
    saved.tensors = [x for x in saved.tensors if x.untyped_storage().data_ptr() not in known]
    del loss
    return saved.nbytes


def test_default_keeps_an_eighth(domain, request):
    plain, kept = kept_bytes(domain.build()), kept_bytes(packed(domain))
    assert plain / kept >= RATIOS.get(request.node.callspec.params["domain"], 8.0)


def test_no_weight_is_packed(domain):
    step = packed(domain, BackwardSettings(Spy(bit_width=2)))
    without_zeros(step.model)  # a scale of 0 makes constants of activations
    other = step._replace(batch=domain.build(seed=1).batch)
    first = digests(step)
    fixed = first & digests(other)  # the same for each batch
    with torch.no_grad():
        for p in step.model.parameters():
            p.mul_(1.25)
    assert first and not fixed - digests(step)  # constants, sines of positions, say, do not follow the weights


def test_restored_models_train_as_before(domain):
    plain, step = domain.build(), packed(domain)
    gradients(plain), gradients(step)
    restored = step._replace(model=brevact.restore_backward(step.model))
    assert unequal(gradients(restored, 1), gradients(plain, 1)) == []
