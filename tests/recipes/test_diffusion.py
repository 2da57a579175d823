"""`python -m recipes.diffusion`: diffusers' UNet, DiT and autoencoder on images."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from recipes.diffusion import RECIPE, Diffusion, DiffusionSettings, main
from recipes.policies import prepare
from tests.recipes.running import PNG, POLICY, interrupted_at_forward, refused, values

missing = [name for name in RECIPE.libraries if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (pip install '.[domains]')")

#: Command line of the smallest runs: two steps an epoch.
SMALL = {"train_size": 8, "test_size": 4, "batch_size": 4, "epochs": 2, "width": 8, "image_size": 8}
TINY = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
VARIANTS = ["--compare", "checkpoint", POLICY, "LosslessBackward"]
CPU = torch.device("cpu")


def run(folder, model, *arguments):
    return main([*TINY, "--model", model, *VARIANTS, "--seeds", "0", "--out-dir", str(folder), *arguments])


@pytest.fixture(scope="module", params=["unet", "dit", "autoencoder"])
def whole_run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    assert run(folder, request.param) == 0
    return request.param, folder


def test_main_trains_pairs_and_draws_samples(whole_run):
    _, folder = whole_run
    found = {variant: value for (variant, _), value in values(folder).items()}
    assert found["plain"] == found["LosslessBackward"] != found[POLICY]
    assert float(found["checkpoint"]) == pytest.approx(float(found["plain"]), rel=1e-5)
    for variant in ("plain", "checkpoint", "LosslessBackward"):
        assert (folder / f"diffusion-{variant}.png").read_bytes().startswith(PNG)


def test_main_resumes_an_interrupted_run_to_the_same_result(whole_run, tmp_path):
    import diffusers
    from diffusers.models.autoencoders.vae import Encoder

    model, folder = whole_run
    kinds = {"unet": diffusers.UNet2DModel, "dit": diffusers.DiTTransformer2DModel, "autoencoder": Encoder}
    with interrupted_at_forward(kinds[model], 9):
        assert run(tmp_path, model) == 130
    assert run(tmp_path, model, "--resume") == 0
    assert values(tmp_path) == values(folder)


@pytest.mark.parametrize("model", ["unet", "dit", "autoencoder"])
def test_policies_pack_the_step(model):
    """The autoencoder's, too, whose step calls `encode` and `decode`."""
    import brevact

    task = Diffusion(replace(DiffusionSettings(**SMALL), model=model), 0, CPU)
    prepare(task, POLICY)
    report = brevact.memory_report(task.model, next(iter(task.batches(1))), lambda model, batch: task.loss(batch))
    assert report.plain_bytes > 3 * report.saved_bytes
    task.step(next(iter(task.batches(1))))


def test_evaluate_reads_averaged_weights_and_leaves_the_model_as_it_was():
    task = Diffusion(DiffusionSettings(**SMALL), 0, CPU)
    before = task.evaluate()
    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter.add_(1.0)
    weights = [parameter.detach().clone() for parameter in task.model.parameters()]
    assert task.evaluate() == before and task.model.training
    assert all(torch.equal(x, y) for x, y in zip(task.model.parameters(), weights, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "9"], "--width 9 is not possible: use a multiple of 8"),
        (["--ema", "1"], "--ema 1.0 is not possible: use a value from 0 to below 1"),
        (["--train-size", "99999"], "--train-size 99999 is not possible: the data set has 1437 images"),
        (["--dataset", "cifar10", "--data-dir", "nowhere"], "CIFAR-10 was not found in nowhere"),
    ],
)
def test_main_says_what_to_do_and_exits_with_2(tmp_path, capsys, arguments, message):
    refused(lambda words: run(tmp_path / "runs", "unet", *words), arguments, message, capsys)
