"""Every wrong argument of every public function: the error names argument, value and accepted values."""

from __future__ import annotations

import functools
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
    "type": nn.ReLU,
    "quantizer": StochBackward2bit,
    "object": object(),
}


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


@functools.cache
def running() -> brevact.Adaptive:
    return adaptive(samples=4)


MODEL, Q, X = model(), StochBackward2bit, torch.zeros(4, 8)
TWO = [torch.ones(4, 8), 2 * torch.ones(4, 8)]
FIT = {"model": MODEL, "batches": TWO, "loss": mean_loss}
PACKED = UniformQuantizer().quantize(X, seed=0)
HOOK, SPEC = brevact.distributed.quantized_hook, brevact.parse_policy("2x")
#: Function, the other arguments of its call, and the values of `WRONG` that each argument takes.
TABLE: list[tuple[Callable[..., Any], dict[str, Any], dict[str, str]]] = [
    (quantize_backward, {"model": MODEL, "policy": Q}, {"model": "module", "policy": "quantizer"}),
    (restore_backward, {}, {"model": "module"}),
    (backward_policy, {}, {"model": "module"}),
    (backward_quant, {}, {"source": "None quantizer module"}),
    (quantizer, {}, {"source": "quantizer"}),
    (brevact.compile, {"function": MODEL}, {"function": "module type quantizer"}),
    (brevact.captured, {"step": MODEL}, {"graphs": "large", "warm_up": "large"}),
    (memory_report, {"model": MODEL, "batch": X}, {"model": "module", "batch": "tensor integers list object"}),
    (brevact.step_report, {"model": MODEL, "batch": X, "loss": mean_loss}, {"model": "module", "loss": ""}),
    (brevact.step_report, {"model": MODEL, "batch": X, "loss": mean_loss}, {"rounds": "large"}),
    (gradient_report, {**FIT, "batches": [X]}, {"model": "module", "loss": "", "draws": "large"}),
    (gradient_report, {**FIT, "draws": 2}, {"batches": "list", "layers": "None", "layer_draws": "large"}),
    (brevact.fit, {**FIT, "ratio": 2}, {"model": "module", "batches": "list", "loss": "", "quick": "bool"}),
    (brevact.fit, FIT, {"ratio": "None float", "saved_bytes": "None large", "noise": "None float large"}),
    (brevact.set_heap_tuning, {}, {"enabled": "bool"}),
    (brevact.noise_count, {}, {"count": "zero large None"}),
    (brevact.DEFAULT.let, {}, {"rules": ""}),
    (HOOK, {}, {"quantizer": "quantizer"}),
    (HOOK, {"quantizer": Q}, {"min_numel": "zero large", "seed": "zero large negative"}),
    (MixSchedule, {"model": mixing()}, {"model": "module", "kind": "", "start": "None zero", "end": "zero"}),
    (MixSchedule, {"model": mixing()}, {"steps": "large", "stairs": "large"}),
    (MixSchedule(mixing()).load_state_dict, {}, {"state": ""}),
    (brevact.actnn_level, {}, {"name": ""}),
    (brevact.Adaptive, {"batch": X, "loss": print, "ratio": 2}, {"model": "module"}),
    (adaptive, {}, {"loss": "module type quantizer", "ratio": "float", "bit_width": "float"}),
    (adaptive, {}, {"every": "large", "samples": "None large"}),
    (lambda indices: running().batch(indices).__enter__(), {}, {"indices": "list integers"}),
    (lambda state: running().load_state_dict(state), {}, {"state": ""}),
    (SPEC.attach, {"model": MODEL, "batches": TWO, "loss": mean_loss}, {"batches": "list", "loss": ""}),
    (Policy, {}, {"rules": ""}),
    (BackwardSettings, {}, {"quantizer": ""}),
    (
        BackwardSettings,
        {"quantizer": UniformQuantizer()},
        {"save_mode": "", "min_numel": "zero large", "residual_bit_width": ""},
    ),
    (bnn.ReLU, {}, {"act_quant": "None quantizer"}),
    (UniformQuantizer().quantize, {"x": X}, {"x": "tensor", "seed": "None zero negative large"}),
    (brevact.PackedActivation, {"spec": PACKED.spec, "buffer": PACKED.buffer}, {"spec": "", "buffer": ""}),
    (PACKED.dequantize_multiply, {}, {"other": "tensor"}),
    (quantizer, {"source": Q}, {"bit_width": "", "bucket_size": "None large", "channel_dim": "zero negative large"}),
    (quantizer, {"source": Q}, {"rounding": "", "granularity": "", "scale_dtype": "", "minimum_dtype": ""}),
    (quantizer, {"source": Q}, {"min_numel": "zero large", "save_mode": "", "forward_quant": "None"}),
    (quantizer, {"source": StochBackward2bit4bitMix}, {"mix_bit_width": "", "mix_prob": "zero"}),
    (quantizer, {"source": L4Backward}, {"format": "", "quantize_forward": "bool"}),
    (quantizer, {"source": DualPrecisionBackward2bit}, {"block": "large"}),
    (quantizer, {"source": SignMagnitudeBackward}, {"base_levels": "", "bucket": "None large"}),
    (quantizer, {"source": SignMagnitudeBackward}, {"use_max": "bool", "mix_levels_prob": "zero"}),
]
#: Calls of one argument that the message calls otherwise, and its accepted values.
OTHERS: list[tuple[Callable[[Any], Any], str, str]] = [
    (brevact.parse_policy, "policy", ""),
    (lambda x: quantize_backward(MODEL, {x: Q}), "policy rule", "string type list"),  # a list has no hash
    (lambda x: quantize_backward(MODEL, {"*": x}), "policy rule '*'", "None quantizer"),
    (lambda x: Policy({"*": x}), "policy rule '*'", "None quantizer"),
    (lambda x: brevact.DEFAULT.let({"*": x}), "policy rule '*'", "None quantizer"),
]
CASES = [
    *(
        pytest.param(
            *(lambda x, call=call, others=others, name=name: call(**{**others, name: x}), name, takes),
            id=f"{call.__name__}-{name}",
        )
        for call, others, arguments in TABLE
        for name, takes in arguments.items()
    ),
    *(pytest.param(*other, id=other[1]) for other in OTHERS),
]


def fault_of(call: Callable[[Any], Any], words: str, value: Any) -> str:
    """The answer to a wrong argument; empty where the error names argument, value and accepted ones."""
    try:
        call(value)
    except (TypeError, ValueError) as error:
        message = str(error)
    else:
        return "taken"
    # An injector makes an object of a class, and a quantizer of its own of an injector.
    shown = (value.__name__ if isinstance(value, type) else brief(value)) in message
    if isinstance(value, torch.Tensor):
        shown = "ensor" in message or f"got shape {tuple(value.shape)}" in message
    accepted = any(words in message for words in ("accepted", "must be", "leave it out"))
    return "" if words in message and shown and accepted and "\n" not in message and len(message) < 700 else message


@pytest.mark.parametrize(("call", "words", "takes"), CASES)
def test_wrong_arguments_are_named_with_what_is_accepted(call, words, takes):
    faults = {label: fault_of(call, words, value) for label, value in WRONG.items() if label not in takes.split()}
    assert not any(faults.values()), faults


def test_every_public_function_is_in_the_table():
    names = {name for name in vars(brevact.api) if not name.startswith("_")}
    leaves = set(vars(brevact.quant))
    # Returned by functions, or constants and enums.
    others = {"ActnnLevel", "CONV_NET", "DEFAULT", "RECOMPUTE", "TRANSFORMER", "BackwardPolicy", "FitReport"}
    others |= {"GradientReport", "MemoryReport", "StepReport", "SaveMode", "Rounding", "Granularity"}
    others |= {"distributed", "SampleWeights", "NormalizedFormat", *(n for n in names if n.endswith("Quantizer"))}
    covered = {row[0].__qualname__.partition(".")[0] for row in (*TABLE, *OTHERS)}
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


def test_a_policy_as_a_rule_is_told_where_rules_go():
    with pytest.raises(TypeError, match=r"yours go before them: brevact\.DEFAULT\.let\("):
        quantize_backward(model(), {"0": None, "*": brevact.DEFAULT})


def test_losses_take_a_model_and_a_batch():
    for call in (memory_report, brevact.step_report):
        with pytest.raises(TypeError, match=r"loss: got .*; accepted is a function of the model and a batch"):
            call(model(), X, lambda output: output.mean())
    with pytest.raises(TypeError, match="loss: got"):
        gradient_report(model(), TWO, lambda output: output.mean())


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (lambda model, batch: None, TypeError, "loss: returned None .*; return a scalar tensor"),
        (lambda model, batch: model(batch), ValueError, r"loss: returned a tensor of shape \(4, 8\)"),
        (lambda model, batch: model(batch).mean().detach(), ValueError, "loss: returned .* requires no gradient"),
    ],
)
def test_losses_return_scalars_with_a_gradient(loss, error, words):
    for call in (lambda: brevact.step_report(model(), X, loss), lambda: gradient_report(model(), TWO, loss)):
        with pytest.raises(error, match=words):
            call()


def test_a_large_model_is_shown_in_short():
    large = nn.Sequential(*[nn.Linear(8, 8) for _ in range(300)])
    for call in (quantizer, backward_quant, lambda x: quantizer(StochBackward2bit, bucket_size=x), BackwardSettings):
        with pytest.raises((TypeError, ValueError), match="<Sequential module>") as caught:
            call(large)
        assert len(str(caught.value)) < 700
