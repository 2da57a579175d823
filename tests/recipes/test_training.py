import copy
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from recipes.efficientnetv2 import RECIPE
from recipes.errors import RecipeError
from recipes.images import make_batches
from recipes.runs import build_objective
from recipes.settings import Settings
from recipes.training import Trainer, make_schedule, parameter_groups, warmup_factor

CPU = torch.device("cpu")


def make_trainer(settings, data):
    torch.manual_seed(settings.seed)
    train_batches, test_batches = make_batches(settings, data, CPU)
    return (
        Trainer(build_objective(RECIPE, settings, data), settings, CPU, len(train_batches)),
        train_batches,
        test_batches,
    )


def learning_rates(settings, steps_per_epoch):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=settings.lr)
    schedule = make_schedule(optimizer, settings, steps_per_epoch)
    rates = []
    for _ in range(settings.epochs * steps_per_epoch):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


def test_parameter_groups_spare_vectors_from_weight_decay(tiny_settings, tiny_data):
    model = build_objective(RECIPE, tiny_settings, tiny_data).model
    decayed, spared = parameter_groups(model, 0.3)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert len(names) == len(decayed["params"]) + len(spared["params"])
    assert all(names[id(parameter)].endswith("weight") for parameter in decayed["params"])
    assert any(names[id(parameter)].endswith("bias") for parameter in spared["params"])
    assert all(parameter.ndim == 1 for parameter in spared["params"])


def test_warmup_factor_rises_then_falls_to_zero():
    factors = [warmup_factor(step, warmup=4, total=24, decay=True) for step in range(25)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(later < earlier for earlier, later in pairwise(factors[4:]))
    assert factors[14] == pytest.approx(0.5) and factors[24] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("schedule", "last"), [("constant", 1.0), ("cosine", 0.5 + 0.5 * math.cos(math.pi * 29 / 30))])
@pytest.mark.parametrize("warmup", [0.0, 1.0])
def test_make_schedule_warms_up(schedule, last, warmup):
    rates = learning_rates(Settings(schedule=schedule, lr=2.0, epochs=4, warmup_epochs=warmup), 10)
    assert rates[0] == pytest.approx(2.0 / 11 if warmup else 2.0)
    assert max(rates) == rates[round(10 * warmup)] == 2.0
    if warmup:
        assert rates[-1] == pytest.approx(2.0 * last)


@pytest.mark.parametrize("warmup", [0.0, 1.2])
def test_make_schedule_onecycle_peaks_after_the_rise(warmup):
    rates = learning_rates(Settings(schedule="onecycle", lr=2.0, epochs=4, warmup_epochs=warmup), 10)
    assert max(rates) == pytest.approx(2.0)
    assert rates.index(max(rates)) == max(2, round(10 * warmup)) - 1
    assert rates[-1] < 1e-3


def test_make_schedule_refuses_onecycle_for_three_steps():
    with pytest.raises(RecipeError, match="--schedule onecycle needs at least 4 steps, this run has 3"):
        learning_rates(Settings(schedule="onecycle", epochs=3), 1)


def test_train_epoch_learns_bright_from_dark(tiny_settings, tiny_data):
    settings = replace(tiny_settings, epochs=6, act_quant="StochBackward2bit", schedule="constant", label_smoothing=0.0)
    trainer, train_batches, _ = make_trainer(settings, tiny_data)
    scores = [trainer.train_epoch(train_batches, epoch, lambda: None) for epoch in range(1, 7)]
    assert scores[-1].loss < 0.5 * scores[0].loss
    assert scores[-1].accuracy > scores[0].accuracy


def test_evaluate_scores_the_model_in_eval_mode(tiny_settings, tiny_data):
    trainer, _, test_batches = make_trainer(replace(tiny_settings, batch_size=3), tiny_data)
    scores = trainer.evaluate(test_batches)
    trainer.model.eval()
    outputs = torch.cat([trainer.model(images) for images, _ in test_batches.epoch()])
    labels = tiny_data.test.labels
    assert scores.loss == pytest.approx(torch.nn.functional.cross_entropy(outputs, labels).item(), rel=1e-5)
    assert scores.accuracy == (outputs.argmax(1) == labels).float().mean().item()


def test_train_epoch_calls_back_after_each_step(tiny_settings, tiny_data):
    trainer, train_batches, _ = make_trainer(tiny_settings, tiny_data)
    calls = []
    trainer.train_epoch(train_batches, 1, lambda: calls.append(trainer.lr))
    assert len(calls) == len(train_batches) == 2 and calls[0] != calls[1]


def test_train_epoch_stops_when_the_loss_is_not_finite(tiny_settings, tiny_data):
    trainer, train_batches, _ = make_trainer(tiny_settings, tiny_data)
    with torch.no_grad():
        trainer.model.classifier.bias.fill_(math.nan)
    with pytest.raises(RecipeError, match=r"loss became nan in epoch 1; try a smaller --lr"):
        trainer.train_epoch(train_batches, 1, lambda: None)


def test_train_epoch_clips_gradients(tiny_settings, tiny_data):
    trainer, train_batches, _ = make_trainer(replace(tiny_settings, clip_grad_norm=1e-3), tiny_data)
    trainer.train_epoch(train_batches, 1, lambda: None)
    norms = torch.stack([parameter.grad.norm() for parameter in trainer.model.parameters()])
    assert norms.norm().item() == pytest.approx(1e-3, rel=1e-3)  # clip_grad_norm_ adds 1e-6 to the norm


@pytest.mark.parametrize(("amp", "dtype"), [("off", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_trainer_computes_in_the_type_of_amp(tiny_settings, tiny_data, amp, dtype):
    trainer, train_batches, _ = make_trainer(replace(tiny_settings, amp=amp), tiny_data)
    seen = []
    trainer.model.classifier.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    before = trainer.model.classifier.weight.detach().clone()
    trainer.train_epoch(train_batches, 1, lambda: None)
    assert set(seen) == {dtype}
    assert trainer.scaler.is_enabled() == (amp == "fp16")
    assert not torch.equal(before, trainer.model.classifier.weight)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changes",
    [
        {"act_quant": "StochBackward2bit", "stochastic_depth": 0.3},
        {"schedule": "onecycle", "clip_grad_norm": 1.0, "amp": "bf16"},
        {"weight_quant": "Int8WeightPerTensorFloat", "input_quant": "Int8ActPerTensorFloat"},
    ],
)
def test_load_state_dict_continues_bit_for_bit(tiny_settings, tiny_data, changes):
    settings = replace(tiny_settings, **changes)
    whole, batches, _ = make_trainer(settings, tiny_data)
    whole.train_epoch(batches, 1, lambda: None)
    state = copy.deepcopy(whole.state_dict())
    expected = whole.train_epoch(batches, 2, lambda: None)
    resumed, _, _ = make_trainer(replace(settings, seed=5), tiny_data)
    resumed.load_state_dict(state)
    assert resumed.train_epoch(batches, 2, lambda: None) == expected
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


def test_load_state_dict_goes_on_learning_the_activation_scales(tiny_settings, tiny_data):
    settings = replace(tiny_settings, input_quant="Int8ActPerTensorFloat")
    whole, batches, _ = make_trainer(settings, tiny_data)
    whole.train_epoch(batches, 1, lambda: None)
    collecting = [module for module in whole.model.modules() if hasattr(module, "collect_stats_steps")]
    for module in collecting:
        module.counter = module.collect_stats_steps  # as after its 300 batches of statistics
    state = copy.deepcopy(whole.state_dict())
    expected = whole.train_epoch(batches, 2, lambda: None)
    resumed, _, _ = make_trainer(settings, tiny_data)
    resumed.load_state_dict(state)
    trained = {id(parameter) for group in resumed.optimizer.param_groups for parameter in group["params"]}
    assert trained == {id(parameter) for parameter in resumed.model.parameters()}
    scales = {name: value.detach().clone() for name, value in resumed.model.named_parameters() if "scaling" in name}
    assert len(scales) == len(collecting)
    assert resumed.train_epoch(batches, 2, lambda: None) == expected
    learned = dict(resumed.model.named_parameters())
    assert any(not torch.equal(learned[name], before) for name, before in scales.items())
    assert all(torch.equal(learned[name], value) for name, value in whole.model.named_parameters())
