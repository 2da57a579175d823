"""Backward quantization in ``transformers.Trainer``."""

from __future__ import annotations

import doctest
import json

import pytest
import torch

import brevact
from brevact.autograd import current_region

pytestmark = pytest.mark.exhaustive


@pytest.fixture
def run():
    """The module that runs trainers; imported when a test runs, since that takes seconds."""
    from tests.trainers import running

    return running


@pytest.fixture
def callback(run):
    from brevact.trainers import HuggingFaceCallback

    return HuggingFaceCallback


def test_examples_run(callback):
    import brevact.trainers.hugging_face as module

    assert doctest.testmod(module).failed == 0 < doctest.testmod(module).attempted


def test_full_precision_trains_as_without_a_callback(run, callback, tmp_path):
    """Measurements restore the batches and random numbers that they take."""
    plain = run.trained(tmp_path)
    measured = run.trained(tmp_path, callback("none"))
    assert run.losses(measured) == run.losses(plain) and run.same_weights(measured.model, plain.model)
    row = measured.state.log_history[0]
    assert row["brevact/saved_mib"] == row["brevact/plain_mib"] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True},
        {"bf16": True},
        {"eval_strategy": "steps", "eval_steps": 1},
        {"label_smoothing_factor": 0.1},
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
        {"train_sampling_strategy": "group_by_length"},
        {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "torch_compile": True}
        | {"torch_compile_backend": "aot_eager"},
    ],
    ids=lambda options: " ".join(options),
)
def test_default_trains_with_options_of_the_trainer(run, callback, tmp_path, options):
    """Without dropout: rounding draws its seeds from the generator that dropout draws from."""
    plain = run.trained(tmp_path / "plain", model=run.gpt2(dropout=0.0), **options)
    trainer = run.trained(tmp_path, [callback("default")], model=run.gpt2(dropout=0.0), **options)
    assert run.losses(trainer)[0] == run.losses(plain)[0]
    assert not run.same_weights(trainer.model, plain.model)
    row = trainer.state.log_history[0]
    assert [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each] == pytest.approx(
        [each["eval_loss"] for each in plain.state.log_history if "eval_loss" in each], rel=1e-3
    )
    if "torch_compile" in options:
        assert "brevact/saved_mib" not in row
        return
    assert row["brevact/plain_mib"] > (1 if "gradient_checkpointing" in options else 3) * row["brevact/saved_mib"] > 0


def test_resumed_run_ends_as_the_whole_one(run, callback, tmp_path):
    def made():
        return [callback("6x", adapt_every=2)]

    options = {"save_strategy": "steps", "save_steps": 3, "steps": 5}
    whole = run.trained(tmp_path, made(), **options)
    checkpoint = tmp_path / "checkpoint-3"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    saved = state["stateful_callbacks"]["HuggingFaceCallback"]["attributes"]["saved_state"]
    assert saved["steps"] == 3 and saved["adaptive"]["steps"] == 3
    assert not [name for name in (path.name for path in checkpoint.iterdir()) if "brevact" in name]
    callbacks = made()
    resumed = run.trained(tmp_path, callbacks, resume=str(checkpoint), **options)
    assert run.same_weights(resumed.model, whole.model)
    assert resumed.state.log_history[-2] == whole.state.log_history[-2]
    restored = run.trained(
        tmp_path,
        callback("6x", adapt_every=2),
        resume=str(checkpoint),
        restore_callback_states_from_checkpoint=True,
        **options,
    )
    assert run.same_weights(restored.model, whole.model)


def test_run_without_a_callback_goes_on_with_one(run, callback, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1}
    run.trained(tmp_path, steps=1, **options)
    trainer = run.trained(tmp_path, callback("default"), resume=str(tmp_path / "checkpoint-1"), **options)
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["HuggingFaceCallback"]["attributes"]["saved_state"]["steps"] == 1
    assert "brevact/saved_mib" in trainer.state.log_history[-2]


def test_callbacks_refuse_to_stand_in_a_trainer_twice(run, callback, tmp_path):
    for callbacks in ([twice := callback(memory=False), twice], [callback(memory=False), callback(memory=False)]):
        with pytest.raises(ValueError, match=r"a trainer takes (it once|one)"):
            run.trained(tmp_path, *callbacks)
    with pytest.raises(ValueError, match="it has a callback of brevact already"):
        run.trained(tmp_path, callback(memory=False), [callback(memory=False)])


def test_callback_keeps_the_policy_of_a_model_that_has_one(run, callback, tmp_path):
    model = brevact.quantize_backward(run.gpt2(), brevact.StochBackward4bit)
    with pytest.raises(ValueError, match="already has a backward policy"):
        run.trained(tmp_path, callback("default", memory=False), model=model)
    trainer = run.trained(tmp_path, callback(None), model=model)
    assert trainer.state.log_history[0]["brevact/plain_mib"] > 3 * trainer.state.log_history[0]["brevact/saved_mib"]
    assert brevact.backward_policy(model).rows[0].source == "StochBackward4bit"
    with pytest.raises(ValueError, match="policy=None is the policy that the model has, and it has none"):
        run.trained(tmp_path, callback(None))


def test_interrupted_run_can_be_started_again(run, callback, tmp_path):
    class Stop(Exception):
        pass

    class Interrupting(run.transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            raise Stop

    model, used = run.gpt2(), callback("default", memory=False)
    with pytest.raises(Stop):
        run.trained(tmp_path, used, Interrupting(), model=model)
    run.trained(tmp_path, used, model=model)
    with pytest.raises(Stop):
        run.trained(tmp_path, used, Interrupting(), model=model)
    with pytest.raises(ValueError, match="another training policy is at work on it"):
        run.trained(tmp_path, callback("default", memory=False), model=model)
    used.policy.end()
    run.trained(tmp_path, callback("default", memory=False), model=model)


def lora(run, **options):
    import peft

    config = peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=["c_attn", "c_proj", "c_fc"], **options)
    return peft.get_peft_model(run.gpt2(), config)


def test_lora_stores_inputs_of_adapters_once_and_nothing_of_frozen_weights(run):
    model = brevact.quantize_backward(lora(run))
    report = brevact.memory_report(model, torch.stack([row["input_ids"] for row in run.texts(4)]))
    ops = [row for row in report.ops if row.saved_bytes]
    assert report.ratio > 4
    names = {row.layer for row in ops if "c_attn" in row.layer}
    assert names and not [row for row in ops if "base_layer" in row.layer and row.how == "packed"]
    model(**{name: x[None] for name, x in run.texts(1)[0].items()}).loss.backward()
    assert {name for name, x in model.named_parameters() if x.grad is not None} == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }


def test_lora_on_weights_of_four_bits_stores_nothing_of_them(run):
    """QLoRA: the base layers of bitsandbytes run as they are, on a CPU, too."""
    import bitsandbytes
    import peft

    torch.manual_seed(0)
    base = torch.nn.Sequential(*(bitsandbytes.nn.Linear4bit(128, 128, quant_type="nf4") for _ in range(2)))
    base = torch.nn.Sequential(base[0], torch.nn.SiLU(), base[1]).to("cpu")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False))
    weights = [x for x in model.parameters() if x.requires_grad]
    assert len(weights) == 4 and model.base_model.model[0].base_layer.weight.dtype is torch.uint8
    x = torch.randn(64, 128)
    exact = model(x)
    expected = torch.autograd.grad(exact.square().mean(), weights)
    brevact.quantize_backward(model, brevact.LosslessBackward)
    for one, other in zip(torch.autograd.grad(model(x).square().mean(), weights), expected, strict=True):
        assert torch.equal(one, other)
    brevact.quantize_backward(brevact.restore_backward(model))
    assert torch.equal(model(x), exact)
    report = brevact.memory_report(model, x)
    assert report.ratio > 3 and not [row for row in report.ops if "base_layer" in row.layer and row.saved_bytes]
    assert all(x.isfinite().all() for x in torch.autograd.grad(model(x).square().mean(), weights))


def test_lora_trains_in_sft_trainer(run, callback, tmp_path):
    import datasets
    import tokenizers
    import trl

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = run.transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="?", eos_token="?", pad_token="?"
    )
    data = datasets.Dataset.from_dict({"text": ["a b " * 30] * 16})
    arguments = trl.SFTConfig(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,  # inputs of checkpoints are kept as they are
    )
    trainer = trl.SFTTrainer(lora(run), arguments, train_dataset=data, processing_class=tokenizer)
    callback("default").add_to(trainer)
    trainer.train()
    row = trainer.state.log_history[0]
    assert row["brevact/plain_mib"] > 3 * row["brevact/saved_mib"] > 0


def test_a_loss_behind_the_model_is_computed_in_its_region(run, callback, tmp_path):
    """With label smoothing the trainer computes the loss itself from the model's logits."""
    seen = []

    class Smoother:
        def __call__(self, outputs, labels, **options):
            seen.append(current_region() is not None)
            return torch.nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())

    class Look(run.transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            joined[0]._trainer().label_smoother = Smoother()

    joined = [callback("StochBackward4bit", memory=False)]
    trainer = run.trained(tmp_path, Look(), joined, label_smoothing_factor=0.1)
    assert seen and all(seen)
    assert "compute_loss" not in vars(trainer)
