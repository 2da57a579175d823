"""`python -m recipes.finetune`: language models of Hugging Face, in `transformers.Trainer` with brevact's callback."""

import importlib.util
import itertools
from dataclasses import replace

import pytest
import torch

import brevact
from recipes import finetune
from recipes.files import read_rows
from recipes.finetune import RECIPE, FineTuneSettings, FineTuning, main
from recipes.policies import prepare
from tests.libraries import run_interpreted
from tests.recipes.running import POLICY, interrupted_at_forward, refused, values

missing = [name for name in RECIPE.libraries if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (pip install '.[domains]')")

#: Command line of the smallest runs: two steps an epoch.
SMALL = {"context": 16, "batch_size": 2, "sequences": 4, "test_sequences": 2, "epochs": 2, "vocabulary": 300}
TINY = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
VARIANTS = ["--compare", "checkpoint", POLICY, "LosslessBackward"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    assert main([*TINY, *VARIANTS, "--seeds", "0", "1", "--save", "--out-dir", str(folder)]) == 0
    return folder


@pytest.mark.exhaustive
def test_main_trains_pairs_and_writes_text_of_each_variant(whole_run):
    found = values(whole_run)
    for seed in (0, 1):
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
def test_policies_pack_in_trainer(method):
    """The noise of the first of two steps is in the second."""
    losses = []
    for variant in ("plain", POLICY):
        torch.manual_seed(0)
        task = FineTuning(replace(FineTuneSettings(**SMALL), method=method), 0, CPU)
        prepare(task, variant)
        losses.append(task.train_epoch(1, lambda: None))
    assert losses[0] != losses[1]


@pytest.fixture
def made(monkeypatch):
    """Makes tasks with models of two layers."""
    monkeypatch.setitem(finetune.SIZES, "tiny", (128, 2, 2))

    def make(**options):
        torch.manual_seed(0)
        return FineTuning(replace(FineTuneSettings(**SMALL, lr=1e-2), **options), 0, CPU)

    return make


@pytest.mark.parametrize(
    "options",
    [
        {"packed": True},
        {"trainer": "sft"},
        {"trainer": "sft", "packed": True},
        {"trainer": "dpo"},
        {"trainer": "dpo", "method": "lora"},
        {"trainer": "dpo", "liger": True},
        {"trainer": "dpo", "liger": True, "method": "lora"},
        {"method": "lora", "weights_4bit": True},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_options_train_with_packed_tensors(made, options, monkeypatch):
    """The loss is bit for bit that of plain training, and falls in steps on the same batches."""
    libraries = {"bitsandbytes": "weights_4bit", "trl": "trainer", "liger_kernel": "liger"}
    for name in (name for name, option in libraries.items() if option in options):
        pytest.importorskip(name)
    monkeypatch.setattr(finetune, "take_liger", lambda *args, **options: None)  # of Liger, a CPU runs the loss alone
    task = made(context=32, **options)
    batch = next(task.batches(1))
    plain = task.loss(batch)
    if "liger" in options:
        assert torch.allclose(made(context=32, **options | {"liger": False}).loss(batch), plain)
    prepare(task, POLICY)
    report = brevact.memory_report(task.model, batch, lambda model, batch: task.loss(batch))
    with task.region():
        assert task.loss(batch) == plain
    for _ in range(2):
        task.train_epoch(1, lambda: None)
    task.model.load_state_dict(task.model.state_dict())  # as a run that goes on does
    print(f"{options}: {report.ratio:.2f} times less")
    assert report.ratio > 4 and task.loss(batch) < plain


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_packed_texts_attend_to_themselves_alone(made, architecture):
    task = made(packed=True, context=48, architecture=architecture)
    batch = next(task.batches(1))
    ids, positions = batch["input_ids"][0], batch["position_ids"][0]
    ends = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
    assert len(ends) > 3 and (batch["labels"][0][ends[:-1]] == -100).all()
    logits = task.model.eval()(**batch, use_cache=False).logits[0]
    for first, end in itertools.pairwise(ends):
        alone = task.model(input_ids=ids[None, first:end]).logits[0]
        torch.testing.assert_close(logits[first:end], alone, rtol=1e-4, atol=1e-5)


def test_every_nth_block_is_checkpointed_beside_packed_tensors(made):
    """Fewer checkpoints keep more; gradients are those of plain training, and with packed tensors the loss is."""
    kept, gradients = {}, {}
    for every, variant in ((0, "plain"), (1, "checkpoint"), (2, "checkpoint"), (2, f"checkpoint+{POLICY}")):
        task = made(packed=True, checkpoint_every=max(1, every))
        batch = next(task.batches(1))
        prepare(task, variant)
        report = brevact.memory_report(task.model, batch, lambda model, batch, task=task: task.loss(batch))
        kept[every, variant] = report.plain_bytes, report.saved_bytes
        with task.region():
            loss = task.loss(batch)
        loss.backward()
        gradients[every, variant] = loss.detach(), *(x.grad for x in task.model.parameters())
    (plain, _), (all_, _), (half, _), (beside, packed) = kept.values()
    print(f"plain {plain}, each block {all_}, every second {half}, with packed tensors {packed}")
    assert all_ < half == beside < plain and packed < half
    *exact, rounded = gradients.values()
    assert all(map(torch.equal, exact[0], exact[1])) and all(map(torch.equal, exact[0], exact[2]))
    assert torch.equal(rounded[0], exact[0][0]) and not all(map(torch.equal, rounded, exact[0]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("trainer", ["trainer", "dpo"])
def test_main_trains_with_interpreted_kernels_of_liger(tmp_path, trainer):
    pytest.importorskip("liger_kernel", reason="not installed: liger-kernel (pip install '.[test]')")
    if trainer == "dpo":
        pytest.importorskip("trl")
    few = {"context": 8, "sequences": 2, "test-sequences": 1, "epochs": 1, "batch-size": 2, "out-dir": tmp_path}
    words = [word for name, value in few.items() for word in (f"--{name}", str(value))]
    words += ["--trainer", trainer, "--compare", POLICY, "--seeds", "0"]
    run_interpreted("recipes.finetune", "--liger", *words)
    plain, packed = read_rows(tmp_path / "runs.csv")
    assert plain["loss"] == packed["loss"] and float(plain["kept_mib"]) > 2 * float(packed["kept_mib"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights-4bit"], "--weights-4bit is not possible with --method full; use --method lora"),
        (["--trainer", "dpo", "--packed"], "--packed is not possible with --trainer dpo"),
        (["--trainer", "dpo", "--batch-size", "1"], "--batch-size 1 is not possible with --trainer dpo"),
        (["--checkpoint-every", "0"], "--checkpoint-every 0 is not possible: use at least 1"),
        pytest.param(
            ["--liger"],
            "Liger's kernels need a GPU; to interpret them on a CPU, slowly, set TRITON_INTERPRET=1",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
        ),
        (["--context", "1"], "--context 1 is not possible: use at least 2"),
        (["--vocabulary", "9"], "--vocabulary 9 is not possible: use at least 257"),
        (["--context", "9999999"], "--context 9999999 is not possible: a part of the text has"),
        (["--weights", "./nowhere"], "--weights ./nowhere cannot be loaded"),
        (["--text-file", "nowhere"], "--text-file nowhere cannot be read"),
        (["--resume"], "no runs to resume: there is no"),
    ],
)
def test_main_says_what_to_do_and_exits_with_2(tmp_path, capsys, arguments, message):
    refused(main, [*TINY, *arguments, "--seeds", "0", "--out-dir", str(tmp_path / "runs")], message, capsys)


def test_main_says_how_many_tokens_given_weights_take(whole_run, tmp_path, capsys):
    weights = ["--weights", str(whole_run / "finetune-plain"), "--context", "4097"]
    assert main([*TINY, *weights, "--seeds", "0", "--out-dir", str(tmp_path)]) == 2  # behind bars of transformers
    assert "the model of --weights takes 4096 tokens at most; use --context of at most" in capsys.readouterr().err
