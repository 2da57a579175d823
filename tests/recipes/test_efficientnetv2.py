"""`python -m recipes.efficientnetv2`: images, forward quantizers, mixed precision, exact resumption."""

import math
from dataclasses import replace

import brevitas.quant
import pytest
import torch
from brevitas.proxy.runtime_quant import ActQuantProxyFromInjectorBase

from recipes.efficientnetv2 import RECIPE, EfficientNetV2Settings, ImageTask, forward_quantizer, main
from recipes.files import read_checkpoint, write_checkpoint
from recipes.models import EfficientNetV2
from recipes.policies import prepare
from recipes.recipe import RecipeError
from recipes.training import Run
from tests.recipes.running import PNG, interrupted_at_forward, refused, values, without_time

#: Command line of the smallest run: two steps an epoch.
TINY = "--train-size 16 --test-size 8 --batch-size 8 --epochs 2 --warmup-epochs 0.5".split()
SETTINGS = EfficientNetV2Settings(train_size=16, test_size=8, batch_size=8, epochs=2, warmup_epochs=0.5)
FORWARD = {"weight_quant": "Int8WeightPerTensorFloat", "input_quant": "Int8ActPerTensorFloat"}
MIXED = "StochBackward2bit4bitMix"
COMPARED = ["--compare", "StochBackward2bit", MIXED, "--stochastic-depth", "0.2"]
CPU = torch.device("cpu")


def make_task(seed=0, variant="plain", **changes):
    torch.manual_seed(seed)
    task = ImageTask(replace(SETTINGS, **changes), seed, CPU)
    prepare(task, variant)
    return task


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert main([*TINY, *COMPARED, "--out-dir", str(folder)]) == 0
    return folder


def test_main_compares_with_full_precision(whole_run):
    kept = {key[0]: float(value) for key, value in values(whole_run, column="kept_mib").items()}
    assert kept["StochBackward2bit"] < kept[MIXED] < kept["plain"] / 4
    assert (whole_run / "comparison.png").read_bytes().startswith(PNG)
    assert 0 <= float(values(whole_run)["plain", 0]) <= 1


# A run takes a forward pass for the report, two an epoch for training and one for testing.
@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [7, 14])
def test_main_resumes_an_interrupted_run_to_the_same_result(whole_run, tmp_path, capsys, number):
    command = [*TINY, *COMPARED, "--out-dir", str(tmp_path)]
    with interrupted_at_forward(EfficientNetV2, number):
        assert main(command) == 130
    assert "--resume goes on" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert without_time(tmp_path) == without_time(whole_run)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weight-quant", "Int8"], "--weight-quant Int8 is not a quantizer"),
        (["--weight-quant", "Int8ActPerTensorFloat"], "--weight-quant Int8ActPerTensorFloat is not a quantizer"),
        (["--input-quant", "Fp8e4m3ActPerChannelFloat2d"], "Fp8e4m3ActPerChannelFloat2d cannot quantize the layers"),
        (["--dataset", "cifar10", "--data-dir", "nowhere"], "CIFAR-10 was not found in nowhere"),
        (["--dataset", "tiny-imagenet", "--data-dir", "nowhere"], "expected nowhere/tiny-imagenet-200"),
        (["--train-size", "5000"], "--train-size 5000 is not possible: the data set has 1437 images"),
        (["--warmup-epochs", "99"], "--warmup-epochs 99 leaves nothing"),
        (["--batch-size", "1"], "--batch-size 1 is not possible: use at least 2"),
        (["--dropout", "1"], "--dropout 1.0 is not possible: use a value from 0 to below 1"),
        (["--schedule", "onecycle", "--epochs", "1"], "onecycle needs at least 4 steps, this run has 2"),
    ],
)
def test_main_says_what_to_do_and_exits_with_2(tmp_path, capsys, arguments, message):
    if "cifar10" in arguments:
        pytest.importorskip("torchvision", reason="torchvision is not installed")
    refused(main, [*TINY, *arguments, "--out-dir", str(tmp_path)], message, capsys)


def test_forward_quantizers_are_those_of_brevitas():
    name = "Int8ActPerTensorFloat"
    assert forward_quantizer(name, ActQuantProxyFromInjectorBase, "") is brevitas.quant.Int8ActPerTensorFloat
    state = torch.get_rng_state()
    make_task(seed=0)
    plain = torch.get_rng_state()
    torch.set_rng_state(state)
    make_task(seed=0, weight_quant="Int8WeightPerTensorFloat")
    assert torch.equal(torch.get_rng_state(), plain)  # trying a quantizer out draws nothing


def test_weights_decay_and_vectors_do_not():
    task = make_task(weight_decay=0.3)
    decayed, spared = task.optimizer.param_groups
    names = {id(parameter): name for name, parameter in task.model.named_parameters()}
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    assert len(names) == len(decayed["params"]) + len(spared["params"])
    assert all(names[id(parameter)].endswith("weight") for parameter in decayed["params"])
    assert all(parameter.ndim == 1 for parameter in spared["params"])


@pytest.mark.parametrize("schedule", ["cosine", "constant", "onecycle"])
def test_learning_rate_warms_up(schedule):
    task = make_task(schedule=schedule, lr=2.0, epochs=20, warmup_epochs=2.0)
    rates = []
    for _ in range(40):
        rates.append(task.scheduler.get_last_lr()[0])
        task.optimizer.step()
        task.scheduler.step()
    assert max(rates) == pytest.approx(2.0) and rates.index(max(rates)) in (3, 4) and rates[0] < 0.5
    assert rates[-1] == pytest.approx(2.0) if schedule == "constant" else rates[-1] < 0.02


def test_an_epoch_learns():
    task = make_task(variant="StochBackward2bit", schedule="constant", epochs=8, label_smoothing=0.0, dropout=0.0)
    losses = [task.train_epoch(epoch, lambda: None) for epoch in range(1, 9)]
    assert losses[-1] < 0.5 * losses[0]


def test_scores_are_those_of_the_model_in_eval_mode():
    task = make_task(batch_size=3)
    loss, accuracy = task.scores()
    assert task.model.training
    task.model.eval()
    outputs = torch.cat([task.model(images) for images, _ in task.test_batches.epoch()])
    labels = task.data.test.labels
    assert loss == pytest.approx(torch.nn.functional.cross_entropy(outputs, labels).item(), rel=1e-5)
    assert accuracy == (outputs.argmax(1) == labels).float().mean().item()


def test_gradients_are_clipped():
    task = make_task(clip_grad_norm=1e-3)
    task.train_epoch(1, lambda: None)
    norms = torch.stack([parameter.grad.norm() for parameter in task.model.parameters()])
    assert norms.norm().item() == pytest.approx(1e-3, rel=1e-3)  # clip_grad_norm_ adds 1e-6 to the norm


@pytest.mark.parametrize(("amp", "dtype"), [("off", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_model_computes_in_the_type_of_amp(amp, dtype):
    task, seen = make_task(amp=amp), []
    task.model.classifier.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    before = task.model.classifier.weight.detach().clone()
    task.train_epoch(1, lambda: None)
    assert set(seen) == {dtype} and task.scaler.is_enabled() == (amp == "fp16")
    assert not torch.equal(before, task.model.classifier.weight)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("StochBackward2bit", {"stochastic_depth": 0.3, "clip_grad_norm": 1.0, "amp": "fp16"}),
        ("plain", {"schedule": "onecycle", "amp": "bf16"}),
        ("DEFAULT", FORWARD),
    ],
)
def test_a_run_goes_on_bit_for_bit(variant, changes, tmp_path):
    settings = replace(SETTINGS, **changes)
    whole = Run(RECIPE, settings, variant, 0, CPU)
    whole.task.train_epoch(1, lambda: None)
    for module in whole.task.model.modules():
        if hasattr(module, "collect_stats_steps"):
            module.counter = module.collect_stats_steps  # Brevitas: as after its 300 batches of statistics
    write_checkpoint(tmp_path / "checkpoint.pt", whole.state_dict())
    expected = whole.task.train_epoch(2, lambda: None)
    resumed = Run(RECIPE, settings, variant, 0, CPU, read_checkpoint(tmp_path / "checkpoint.pt"))
    trained = {id(parameter) for group in resumed.task.optimizer.param_groups for parameter in group["params"]}
    assert trained == {id(parameter) for parameter in resumed.task.model.parameters()}
    assert resumed.task.train_epoch(2, lambda: None) == expected and math.isfinite(expected)
    for name, value in whole.task.model.state_dict().items():
        assert torch.equal(resumed.task.model.state_dict()[name], value), name


def test_checkpoints_are_refused():
    with pytest.raises(RecipeError, match="batch norms would average"):
        make_task(variant="checkpoint")
