"""Liger's kernels, which overwrite their input: run where Triton interprets them (TRITON_INTERPRET=1)."""

from __future__ import annotations

import importlib
import math
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from brevact import RECOMPUTE, DitherBackward4bit, LosslessBackward, Policy, StochBackward4bit, StochBackward8bit
from recipes.liger import liger as interpreted
from tests.quantizers.subjects import uniform_step
from tests.trainers.running import VOCABULARY, transformers

liger = importlib.import_module("liger_kernel.transformers")

SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 32},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "use_cache": False},
}
#: Models, and policies in which queries and keys, which RoPE overwrites, are known.
CASES: list[tuple[str, Any]] = [
    ("Llama", RECOMPUTE),
    ("Llama", LosslessBackward.let(recompute=1024)),
    ("Llama", DitherBackward4bit.let(score_bit_width=4, recompute=1024)),
    ("Qwen3", StochBackward8bit),
]


def gradients(name: str, policy: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES))
    if policy is not None:
        brevact.quantize_backward(model, policy)
    ids = torch.randint(VOCABULARY, (1, 64), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, labels=ids).loss.backward()
    attention = model.model.layers[0].self_attn
    return [attention.q_proj.weight.grad, attention.k_proj.weight.grad]


def errors() -> list[float]:
    found, exact = [], {name: gradients(name, None) for name in dict(CASES)}
    for name, policy in CASES:
        pairs = zip(gradients(name, policy), exact[name], strict=True)
        found += [float((grad - expected).norm() / expected.norm()) for grad, expected in pairs]
    return found


def check_rotation() -> None:
    """Rounding moves few codes; the norm of n = 4,096 independent errors varies by 1 / sqrt(2 n) of itself."""
    plain = errors()
    only = dict.fromkeys(("rms_norm", "swiglu", "fused_linear_cross_entropy", "cross_entropy"), False)
    liger.apply_liger_kernel_to_llama(rope=True, **only)
    liger.apply_liger_kernel_to_qwen3(rope=True, **only)
    bound = 1 + 5 / math.sqrt(2 * 4096)
    for case, (found, expected) in enumerate(zip(errors(), plain, strict=True)):
        assert found <= bound * max(expected, 1e-6), (CASES[case // 2][0], found, expected)


class Head(nn.Module):
    """A loss that overwrites logits, which derive from the packed input of a norm, with their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.loss = nn.Linear(64, 256), nn.LayerNorm(256), liger.LigerCrossEntropyLoss()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(2 * self.norm(self.layer(x)), y)


def check_loss() -> None:
    """A rule packs the gradient that the loss saves: the gap between two levels of its 4 bits is the largest error."""
    torch.manual_seed(0)
    head, x, y = Head(), torch.randn(64, 64), torch.randint(0, 256, (64,))
    logits = []
    head.norm.register_forward_hook(lambda module, args, out: out.retain_grad() or logits.append(out))
    function = importlib.import_module("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction
    for rules in (None, {function: StochBackward4bit, "*": DitherBackward4bit}):
        if rules is not None:
            brevact.quantize_backward(head, Policy(rules))
        head(x, y).backward()
    exact, found = (out.grad for out in logits)
    gap = uniform_step(brevact.quantizer(StochBackward4bit).quantize(exact), exact)
    assert not torch.equal(found, exact) and ((found - exact).abs() <= gap * (1 + 1e-3)).all()
    assert torch.equal(*(F.softmax(out.detach(), -1) for out in logits))


def check_model() -> None:
    """Without rules a Llama with all kernels keeps a fifth; its gradient differs by the noise of draws alone."""
    liger.apply_liger_kernel_to_llama()
    ids = torch.randint(VOCABULARY, (1, 64), generator=torch.Generator().manual_seed(1))

    def model(policy: Any) -> nn.Module:
        torch.manual_seed(0)
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
        return made if policy is None else brevact.quantize_backward(made, policy)

    def step(made: nn.Module) -> Tensor:
        made.zero_grad()
        made(input_ids=ids, labels=ids).loss.backward()
        return torch.cat([p.grad.flatten() for p in made.parameters()])

    plain = step(model(None))
    assert torch.equal(step(model(LosslessBackward)), plain)
    packed = model(DitherBackward4bit.let(min_numel=0))
    errors = torch.stack([step(packed) - plain for _ in range(8)])
    along, variance = errors @ plain, float(errors.square().sum(1).mean())
    # A bias of second order is a curvature times the variance.
    assert abs(float(along.mean())) <= 5 * float(along.std()) / 8**0.5 + variance
    report = brevact.memory_report(packed, None, loss=lambda made, batch: made(input_ids=ids, labels=ids).loss)
    kept = [row for row in report.ops if row.op.startswith("Liger") and row.how == "full precision"]
    assert report.ratio >= 5 and not kept, report


if __name__ == "__main__":
    interpreted()
    for check in sys.argv[1:]:
        globals()[check]()
