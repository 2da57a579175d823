"""`python -m recipes.finetune`: language models of Hugging Face, in `transformers.Trainer` with brevact's callback."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from recipes.domains.variants import prepare
from recipes.files import read_rows
from recipes.finetune import DOMAIN, FineTuneSettings, FineTuning, main
from tests.recipes.running import interrupted_at_forward

missing = [name for name in DOMAIN.libraries if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (pip install '.[domains]')")

#: Command line of the smallest runs: two steps an epoch.
SMALL = {"context": 16, "batch_size": 2, "sequences": 4, "test_sequences": 2, "epochs": 2, "vocabulary": 300}
TINY = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
#: Packs tensors of the smallest runs, too.
POLICY = "StochBackward4bit:min_numel=0"
VARIANTS = ["--variants", "checkpoint", POLICY, "LosslessBackward"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    assert main([*TINY, *VARIANTS, "--seeds", "0", "1", "--save", "--out-dir", str(folder)]) == 0
    return folder


def values(folder):
    return {(row["variant"], row["seed"]): row["value"] for row in read_rows(folder / "runs.csv")}


@pytest.mark.exhaustive
def test_main_trains_pairs_and_writes_text_of_each_variant(whole_run):
    found = values(whole_run)
    for seed in "01":
        plain, checkpoint, packed, lossless = (
            found[name, seed] for name in ("plain", "checkpoint", POLICY, "LosslessBackward")
        )
        assert plain == lossless != packed
        assert float(checkpoint) == pytest.approx(float(plain), rel=1e-5)
    assert (whole_run / "finetune-plain.txt").read_text("utf-8").startswith("The")


@pytest.mark.exhaustive
def test_main_resumes_an_interrupted_run_to_the_same_result(whole_run, tmp_path):
    from transformers import LlamaForCausalLM

    command = [*TINY, *VARIANTS, "--seeds", "0", "1", "--save", "--out-dir", str(tmp_path)]
    with interrupted_at_forward(LlamaForCausalLM, 9):
        assert main(command) == 130
    assert main([*command, "--resume"]) == 0
    assert values(tmp_path) == values(whole_run)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["full", "lora"])
def test_main_goes_on_from_the_weights_that_another_run_saved(whole_run, tmp_path, method):
    weights = ["--weights", str(whole_run / "finetune-plain"), "--text", "python-source", "--method", method]
    command = [*TINY, *weights, "--variants", "plain", "--seeds", "0", "--out-dir", str(tmp_path)]
    assert main(command) == 0
    before = read_rows(whole_run / "epochs.csv")
    assert read_rows(tmp_path / "epochs.csv")[0]["value"] not in {row["value"] for row in before}


def test_main_lets_gpt2_write_no_more_than_its_positions(tmp_path):
    command = [*TINY, "--architecture", "gpt2", "--context", "2", "--variants", "plain", "--seeds", "0"]
    assert main([*command, "--out-dir", str(tmp_path)]) == 0
    assert (tmp_path / "finetune-plain.txt").exists()


@pytest.mark.parametrize("method", ["full", "lora"])
def test_policies_pack_in_trainer(method, monkeypatch):
    """The loss is in the region, too: `Trainer` computes it there."""
    from brevact.policy.attach import region_of_step
    from brevact.trainers import training_policy

    entered = []
    monkeypatch.setattr(training_policy, "region_of_step", lambda model: entered.append(1) or region_of_step(model))
    task = FineTuning(replace(FineTuneSettings(**SMALL), method=method), 0, CPU)
    task.train_epoch(1, prepare(task, POLICY), lambda: None)
    assert len(entered) == task.steps_per_epoch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "1"], "--context 1 is not possible: use at least 2"),
        (["--vocabulary", "9"], "--vocabulary 9 is not possible: use at least 257"),
        (["--context", "9999999"], "--context 9999999 is not possible: a part of the text has"),
        (["--weights", "./nowhere"], "--weights ./nowhere cannot be loaded"),
        (["--text-file", "nowhere"], "--text-file nowhere cannot be read"),
        (["--resume"], "no runs to resume: there is no"),
    ],
)
def test_main_says_what_to_do_and_exits_with_2(tmp_path, capsys, arguments, message):
    assert main([*TINY, *arguments, "--seeds", "0", "--out-dir", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_main_says_how_many_tokens_given_weights_take(whole_run, tmp_path, capsys):
    weights = ["--weights", str(whole_run / "finetune-plain"), "--context", "4097"]
    assert main([*TINY, *weights, "--seeds", "0", "--out-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "the model of --weights takes 4096 tokens at most; use --context of at most" in error
