"""Every wrong argument of every public function: the error names argument, value and what is accepted.

A table has, for each argument, what it takes; each of `WRONG` that it does not take must be refused, in words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import brevact
import brevact.nn as bnn
from brevact import (
    BackwardSettings,
    DualPrecisionBackward2bit,
    L4Backward,
    MixSchedule,
    Policy,
    SignMagnitudeBackward,
    StochBackward2bit,
    StochBackward2bit4bitMix,
    UniformQuantizer,
    backward_policy,
    backward_quant,
    gradient_report,
    memory_report,
    quantize_backward,
    quantizer,
    restore_backward,
)
from brevact.quantizers.brief import brief

WRONG = {
    "None": None,
    "string": "text",
    "bool": True,
    "zero": 0,
    "negative": -1,
    "large": 10**6,
    "float": 1.5,
    "nan": float("nan"),
    "list": [1, 2],
    "tensor": torch.zeros(4, 8),
    "integers": torch.zeros(4, dtype=torch.int64),
    "module": nn.ReLU(),
    "module type": nn.ReLU,
    "quantizer": StochBackward2bit,
    "object": object(),
}
COUNTS = ("zero", "large")
SOURCES = ("None", "quantizer")
RULES = ("string", "module type", "list")  # a list has no hash


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def mean_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()


def mixing() -> nn.Module:
    return quantize_backward(model(), StochBackward2bit4bitMix)


def adaptive(**arguments: Any) -> brevact.Adaptive:
    net = quantize_backward(model(), StochBackward2bit, min_numel=0)
    budget = {} if arguments.keys() & {"ratio", "bit_width"} else {"bit_width": 2}
    settings = {"batch": torch.randn(64, 8), "loss": lambda net, x: net(x).square().mean(), **budget, **arguments}
    return brevact.Adaptive(net, settings.pop("batch"), settings.pop("loss"), **settings)


TWO = [torch.ones(4, 8), 2 * torch.ones(4, 8)]
NO_REPORT = brevact.MemoryReport(())
PACKED = UniformQuantizer().quantize(torch.zeros(4, 8), seed=0)
#: Call, argument, and what of `WRONG` the argument takes.
ARGUMENTS: dict[str, tuple[Callable[[Any], Any], str, tuple[str, ...]]] = {
    "quantize_backward model": (lambda x: quantize_backward(x, StochBackward2bit), "model", ("module",)),
    "quantize_backward policy": (lambda x: quantize_backward(model(), x), "policy", ("quantizer",)),
    "quantize_backward rule": (lambda x: quantize_backward(model(), {x: StochBackward2bit}), "policy rule", RULES),
    "quantize_backward value": (
        lambda x: quantize_backward(model(), {"*": x}),
        "policy rule '*'",
        ("None", "quantizer"),
    ),
    "restore_backward model": (restore_backward, "model", ("module",)),
    "backward_policy model": (backward_policy, "model", ("module",)),
    "backward_quant source": (backward_quant, "source", (*SOURCES, "module")),
    "quantizer source": (quantizer, "source", ("quantizer",)),
    "memory_report model": (lambda x: memory_report(x, torch.zeros(4, 8)), "model", ("module",)),
    "memory_report batch": (lambda x: memory_report(model(), x), "batch", ("tensor", "integers", "list", "object")),
    "step_report model": (lambda x: brevact.step_report(x, torch.zeros(4, 8), mean_loss), "model", ("module",)),
    "step_report loss": (lambda x: brevact.step_report(model(), torch.zeros(4, 8), x), "loss", ()),
    "step_report rounds": (
        lambda x: brevact.step_report(model(), torch.zeros(4, 8), mean_loss, rounds=x),
        "rounds",
        ("large",),
    ),
    "MemoryReport max_layers": (lambda x: NO_REPORT.plot("unused.png", max_layers=x), "max_layers", ("large",)),
    "gradient_report model": (lambda x: gradient_report(x, [torch.zeros(4, 8)], mean_loss), "model", ("module",)),
    "gradient_report batches": (lambda x: gradient_report(model(), x, mean_loss), "batches", ("list",)),
    "gradient_report loss": (lambda x: gradient_report(model(), [torch.zeros(4, 8)], x), "loss", ()),
    "gradient_report draws": (
        lambda x: gradient_report(model(), [torch.ones(4, 8)], mean_loss, None, x),
        "draws",
        ("large",),
    ),
    "gradient_report layers": (
        lambda x: gradient_report(model(), [torch.ones(4, 8)], mean_loss, draws=2, layers=x),
        "layers",
        ("None",),
    ),
    "gradient_report layer_draws": (
        lambda x: gradient_report(model(), [torch.ones(4, 8)], mean_loss, draws=2, layer_draws=x),
        "layer_draws",
        ("large",),
    ),
    "fit model": (lambda x: brevact.fit(x, TWO, mean_loss, ratio=2), "model", ("module",)),
    "fit batches": (lambda x: brevact.fit(model(), x, mean_loss, ratio=2), "batches", ("list",)),
    "fit loss": (lambda x: brevact.fit(model(), TWO, x, ratio=2), "loss", ()),
    "fit ratio": (lambda x: brevact.fit(model(), TWO, mean_loss, ratio=x), "ratio", ("None", "float")),
    "fit saved_bytes": (
        lambda x: brevact.fit(model(), TWO, mean_loss, saved_bytes=x),
        "saved_bytes",
        ("None", "large"),
    ),
    "fit noise": (lambda x: brevact.fit(model(), TWO, mean_loss, noise=x), "noise", ("None", "float", "large")),
    "fit quick": (lambda x: brevact.fit(model(), TWO, mean_loss, ratio=2, quick=x), "quick", ("bool",)),
    "noise_count count": (brevact.noise_count, "count", (*COUNTS, "None")),
    "set_heap_tuning enabled": (brevact.set_heap_tuning, "enabled", ("bool",)),
    "distributed quantizer": (brevact.distributed.quantized_hook, "quantizer", ("quantizer",)),
    "distributed error_feedback": (
        lambda x: brevact.distributed.quantized_hook(StochBackward2bit, error_feedback=x),
        "error_feedback",
        ("None", "bool"),
    ),
    "distributed min_numel": (
        lambda x: brevact.distributed.quantized_hook(StochBackward2bit, min_numel=x),
        "min_numel",
        COUNTS,
    ),
    "distributed seed": (
        lambda x: brevact.distributed.quantized_hook(StochBackward2bit, seed=x),
        "seed",
        (*COUNTS, "negative"),
    ),
    "MixSchedule model": (lambda x: MixSchedule(x), "model", ("module",)),
    "MixSchedule kind": (lambda x: MixSchedule(mixing(), x), "kind", ()),
    "MixSchedule start": (lambda x: MixSchedule(mixing(), start=x), "start", ("None", "zero")),
    "MixSchedule end": (lambda x: MixSchedule(mixing(), end=x), "end", ("zero",)),
    "MixSchedule steps": (lambda x: MixSchedule(mixing(), steps=x), "steps", ("large",)),
    "MixSchedule stairs": (lambda x: MixSchedule(mixing(), stairs=x), "stairs", ("large",)),
    "MixSchedule state": (lambda x: MixSchedule(mixing()).load_state_dict(x), "state", ()),
    "actnn_level name": (lambda x: brevact.actnn_level(x), "name", ()),
    "Adaptive model": (lambda x: brevact.Adaptive(x, torch.zeros(4, 8), print, ratio=2), "model", ("module",)),
    "Adaptive loss": (lambda x: adaptive(loss=x), "loss", ("module", "module type", "quantizer")),
    "Adaptive ratio": (lambda x: adaptive(ratio=x), "ratio", ("float",)),
    "Adaptive bit_width": (lambda x: adaptive(bit_width=x), "bit_width", ("float",)),
    "Adaptive every": (lambda x: adaptive(every=x), "every", ("large",)),
    "Adaptive samples": (lambda x: adaptive(samples=x), "samples", ("None", "large")),
    "Adaptive indices": (lambda x: adaptive(samples=4).batch(x).__enter__(), "indices", ("list", "integers")),
    "Adaptive state": (lambda x: adaptive().load_state_dict(x), "state", ()),
    "parse_policy text": (brevact.parse_policy, "policy", ()),
    "PolicySpec batches": (lambda x: brevact.parse_policy("2x").attach(model(), x, mean_loss), "batches", ("list",)),
    "PolicySpec loss": (lambda x: brevact.parse_policy("2x").attach(model(), TWO, x), "loss", ()),
    "Policy rules": (Policy, "rules", ()),
    "Policy.let rules": (brevact.DEFAULT.let, "rules", ()),
    "Policy.let value": (lambda x: brevact.DEFAULT.let({"*": x}), "policy rule '*'", SOURCES),
    "Policy value": (lambda x: Policy({"*": x}), "policy rule '*'", SOURCES),
    "BackwardSettings quantizer": (BackwardSettings, "quantizer", ()),
    "BackwardSettings save_mode": (lambda x: BackwardSettings(UniformQuantizer(), save_mode=x), "save_mode", ()),
    "BackwardSettings min_numel": (lambda x: BackwardSettings(UniformQuantizer(), min_numel=x), "min_numel", COUNTS),
    "residual_bit_width": (
        lambda x: BackwardSettings(UniformQuantizer(), residual_bit_width=x),
        "residual_bit_width",
        (),
    ),
    "act_quant": (lambda x: bnn.ReLU(act_quant=x), "act_quant", SOURCES),
    "quantize x": (UniformQuantizer().quantize, "x", ("tensor",)),
    "quantize seed": (
        lambda x: UniformQuantizer().quantize(torch.zeros(8), x),
        "seed",
        ("None", "zero", "negative", "large"),
    ),
    "PackedActivation spec": (lambda x: brevact.PackedActivation(x, PACKED.buffer), "spec", ()),
    "PackedActivation buffer": (lambda x: brevact.PackedActivation(PACKED.spec, x), "buffer", ()),
    "dequantize out": (PACKED.dequantize, "out", ("None", "tensor")),
    "dequantize_multiply other": (PACKED.dequantize_multiply, "other", ("tensor",)),
}
SETTINGS: dict[str, tuple[type, tuple[str, ...]]] = {
    "bit_width": (StochBackward2bit, ()),
    "bucket_size": (StochBackward2bit, ("None", "large")),
    "channel_dim": (StochBackward2bit, ("zero", "negative", "large")),
    "rounding": (StochBackward2bit, ()),
    "granularity": (StochBackward2bit, ()),
    "scale_dtype": (StochBackward2bit, ()),
    "minimum_dtype": (StochBackward2bit, ()),
    "min_numel": (StochBackward2bit, COUNTS),
    "save_mode": (StochBackward2bit, ()),
    "forward_quant": (StochBackward2bit, ("None",)),
    "mix_bit_width": (StochBackward2bit4bitMix, ()),
    "mix_prob": (StochBackward2bit4bitMix, ("zero",)),
    "format": (L4Backward, ()),
    "quantize_forward": (L4Backward, ("bool",)),
    "block": (DualPrecisionBackward2bit, ("large",)),
    "base_levels": (SignMagnitudeBackward, ()),
    "bucket": (SignMagnitudeBackward, ("None", "large")),
    "use_max": (SignMagnitudeBackward, ("bool",)),
    "mix_levels_prob": (SignMagnitudeBackward, ("zero",)),
}
CASES = [
    pytest.param(call, argument, value, id=f"{name}={label}")
    for name, (call, argument, takes) in ARGUMENTS.items()
    for label, value in WRONG.items()
    if label not in takes
] + [
    pytest.param(lambda x, source=source, name=name: quantizer(source, **{name: x}), name, value, id=f"{name}={label}")
    for name, (source, takes) in SETTINGS.items()
    for label, value in WRONG.items()
    if label not in takes
]


@pytest.mark.parametrize(("call", "argument", "value"), CASES)
def test_wrong_arguments_are_named_with_what_is_accepted(call, argument, value):
    with pytest.raises((TypeError, ValueError)) as caught:
        call(value)
    message = str(caught.value)
    assert argument in message, message
    # An injector makes an object of a class, and a quantizer of its own of an injector.
    shown = value.__name__ if isinstance(value, type) else brief(value)
    if isinstance(value, torch.Tensor):
        assert "ensor" in message or f"got shape {tuple(value.shape)}" in message, message
    else:
        assert shown in message, message
    assert any(words in message for words in ("accepted", "must be", "leave it out")), message
    assert "\n" not in message and len(message) < 700, message


def test_every_public_function_is_in_the_table():
    names = {name for name in vars(brevact.api) if not name.startswith("_")}
    leaves = set(vars(brevact.quant))
    # Returned by functions, or constants and enums.
    others = {
        "ActnnLevel",
        "CONV_NET",
        "DEFAULT",
        "RECOMPUTE",
        "TRANSFORMER",
        "BackwardPolicy",
        "FitReport",
        "GradientReport",
        "PeakMemory",
        "ProcessMemory",
        "StepReport",
        "SaveMode",
        "Rounding",
        "Granularity",
        "SampleWeights",
    }
    others |= {"NormalizedFormat"} | {name for name in names if name.endswith("Quantizer")}  # by SETTINGS
    covered = {name.split()[0] for name in ARGUMENTS}
    assert names - leaves - others <= covered


@pytest.mark.parametrize(
    "call",
    [
        lambda: quantize_backward(StochBackward2bit, model()),
        lambda: memory_report(torch.zeros(4, 8), model()),
        lambda: MixSchedule("linear", mixing()),
    ],
)
def test_swapped_arguments_are_recognised(call):
    with pytest.raises(TypeError, match="the arguments are swapped: write"):
        call()


def test_a_swapped_rule_is_recognised():
    with pytest.raises(TypeError, match=r"the key says where .* the value which one: \{\"\*\": StochBackward2bit\}"):
        quantize_backward(model(), {StochBackward2bit: "0"})


def test_a_large_model_is_shown_in_short():
    large = nn.Sequential(*[nn.Linear(8, 8) for _ in range(300)])
    for call in (quantizer, backward_quant, lambda x: quantizer(StochBackward2bit, bucket_size=x), BackwardSettings):
        with pytest.raises((TypeError, ValueError), match="<Sequential module>") as caught:
            call(large)
        assert len(str(caught.value)) < 700
