"""A user's file that calls the whole interface; `tests/test_typing.py` checks it with ``mypy --strict``."""

from __future__ import annotations

from pathlib import Path

import brevitas.nn as qnn  # type: ignore[import-untyped]
import torch
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat, Uint8ActPerTensorFloat  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
import brevact.nn as bnn
from brevact import L4Backward, SaveMode, StochBackward2bit, StochBackward2bit4bitMix, UniformQuantizer


class MyBackward(StochBackward2bit):
    bucket_size = 128


def layers() -> nn.Sequential:
    conv = bnn.QuantConv2d(
        64,
        128,
        3,
        padding=1,
        weight_quant=Int8WeightPerTensorFloat,
        input_quant=Int8ActPerTensorFloat,
        act_quant=StochBackward2bit,
        act_bucket_size=256,
    )
    norm = bnn.BatchNorm2d(128, act_quant=L4Backward)
    relu = qnn.QuantReLU(act_quant=StochBackward2bit, forward_quant=Uint8ActPerTensorFloat, bucket_size=128)
    return nn.Sequential(conv, norm, relu, bnn.SiLU(act_quant=MyBackward), bnn.ReLU(act_quant=None))


def is_head(name: str, module: nn.Module) -> bool:
    return name == "head"


def policies(model: nn.Sequential) -> nn.Sequential:
    """Every kind of policy; the model keeps its type."""
    ablation = StochBackward2bit.let(save_mode=SaveMode.QUANTIZE_ON_BACKWARD)
    brevact.restore_backward(brevact.quantize_backward(model, StochBackward2bit))
    brevact.restore_backward(brevact.quantize_backward(model, ablation, bucket_size=64))
    brevact.restore_backward(brevact.quantize_backward(model, UniformQuantizer(bit_width=3)))
    brevact.restore_backward(
        brevact.quantize_backward(model, brevact.BackwardSettings(UniformQuantizer(), min_numel=0))
    )
    brevact.quantize_backward(model, {"head": None, nn.BatchNorm2d: L4Backward, "*": StochBackward2bit4bitMix})
    brevact.restore_backward(model)
    brevact.restore_backward(brevact.quantize_backward(model, {(nn.LayerNorm, nn.RMSNorm): MyBackward, is_head: None}))
    brevact.restore_backward(brevact.quantize_backward(model, brevact.CONV_NET))
    brevact.restore_backward(brevact.quantize_backward(model))
    brevact.restore_backward(brevact.quantize_backward(model, {(torch.matmul, F.silu): None, "*": StochBackward2bit}))
    brevact.restore_backward(brevact.quantize_backward(model, brevact.Policy({nn.Linear: StochBackward2bit})))
    rules = {"0": None, (nn.LayerNorm, nn.RMSNorm): L4Backward, is_head: None, nn.Linear: MyBackward, "*": ablation}
    brevact.quantize_backward(model, rules)
    policy: brevact.BackwardPolicy = brevact.backward_policy(model)
    texts: list[str] = [row.rule for row in policy.rows]
    print(policy, texts)
    return brevact.restore_backward(model)


def regions(net: nn.Module, x: Tensor) -> Tensor:
    @brevact.backward_quant(StochBackward2bit, bucket_size=128)
    def loss(x: Tensor, scale: float) -> Tensor:
        return (x * scale).square().mean()

    with brevact.backward_quant(), brevact.backward_quant(brevact.Policy({F.cross_entropy: None, "*": MyBackward})):
        net(x)
    with brevact.backward_quant(StochBackward2bit):
        y: Tensor = net(x)
        with brevact.backward_quant(None):
            y = net(y)
    return loss(y, 2.0)


def gradients(model: nn.Module, batches: list[tuple[Tensor, Tensor]], folder: Path) -> float:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    report: brevact.GradientReport = brevact.gradient_report(model, batches, loss, draws=8)
    brevact.gradient_report(model, batches, loss, brevact.DEFAULT, layers=None, progress=False)
    print(report)
    report.plot(folder / "gradients.png")
    report.to_csv(folder / "gradients.csv")
    return report.noise + report.bias + sum(row.noise for row in report.rows if row.readers)


def memory(model: nn.Module, batch: Tensor, folder: Path) -> float:
    report: brevact.MemoryReport = brevact.memory_report(model, batch)
    brevact.memory_report(model, (batch,))
    brevact.memory_report(model, {"input": batch})
    print(report, report.explain())
    report.plot(folder / "memory.png")
    report.to_csv(folder / "memory.csv")
    saved: int = report.saved_bytes + report.plain_bytes + sum(row.saved_bytes for row in report.rows)
    return saved + report.ratio


def tensors(x: Tensor) -> Tensor:
    q = brevact.quantizer(StochBackward2bit, bucket_size=256)
    packed: brevact.PackedActivation = q.quantize(x, seed=0)
    size: int = packed.nbytes
    if isinstance(q, UniformQuantizer):
        size += q.bit_width
    return packed.dequantize() * size + packed.dequantize_multiply(x)


def schedule(model: nn.Module, steps: int) -> float:
    mixture = brevact.MixSchedule(model, "cosine", start=0.9, end=0.1, steps=steps)
    for _ in range(steps):
        mixture.step()
    mixture.load_state_dict(mixture.state_dict())
    return mixture.mix_prob


def settings() -> tuple[int, torch.dtype]:
    chosen = brevact.BackwardSettings(UniformQuantizer(rounding=brevact.Rounding.NEAREST))
    return chosen.min_numel, UniformQuantizer(granularity=brevact.Granularity.TENSOR).scale_dtype
