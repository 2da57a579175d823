import json
from dataclasses import asdict
from pathlib import Path

import pytest

from recipes.efficientnetv2 import EfficientNetV2Settings
from recipes.errors import RecipeError
from recipes.settings import Settings, parse


def parsed(*words):
    return parse(words, prog="recipe", description="", settings=EfficientNetV2Settings)


def test_parse_reports_only_what_was_given():
    command = parsed("--lr", "0.1", "--act-override", "bucket_size=64", "--act-override", "scale_dtype=float32")
    assert command.given == {"lr": 0.1, "act_override": ("bucket_size=64", "scale_dtype=float32")}
    assert (command.out_dir, command.resume, command.compare, command.overwrite) == (None, None, None, False)


def test_parse_help_states_every_default(capsys):
    with pytest.raises(SystemExit):
        parsed("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "largest learning rate of AdamW (default: 0.003)" in text
    assert "largest norm of all gradients together (default: none)" in text


def test_parse_help_shows_the_settings_of_a_recipe_before_those_of_all(capsys):
    with pytest.raises(SystemExit):
        parsed("--help")
    text = capsys.readouterr().out
    assert text.index("  --dataset ") < text.index("  --model ") < text.index("  --act-quant ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "xl"], "invalid choice: 'xl'"),
        (["--bucket-size", "3"], "unrecognized arguments: --bucket-size 3"),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3"),
        (["--compare", "StochBackward2bit", "--act-quant", "StochBackward2bit"], "leave out --act-quant"),
        (["--resume", "a", "--out-dir", "b"], "leave out --out-dir"),
    ],
)
def test_parse_refuses_with_status_2(capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        parsed(*words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("batch_size", 1),
        ("lr", 0.0),
        ("weight_decay", -0.1),
        ("label_smoothing", 1.0),
        ("clip_grad_norm", 0.0),
        ("dropout", 1.0),
        ("stochastic_depth", -0.1),
        ("train_size", 0),
        ("warmup_epochs", -1.0),
        ("warmup_epochs", 8.0),
        ("seed", -1),
    ],
)
def test_settings_refuse_values_out_of_range(field, value):
    with pytest.raises(RecipeError, match=f"--{field.replace('_', '-')} {value:g}.*use"):
        EfficientNetV2Settings(**{field: value})


def test_resumed_settings_keep_everything_but_place_and_device():
    settings = EfficientNetV2Settings(lr=0.1, data_dir="a")
    changed = settings.resumed({"lr": 0.1, "data_dir": "b", "device": "cpu"})
    assert changed == EfficientNetV2Settings(lr=0.1, data_dir="b", device="cpu")
    with pytest.raises(RecipeError, match=r"started with --epochs 8 \(now 3\), --lr 0.1 \(now 0.2\)"):
        settings.resumed({"lr": 0.2, "epochs": 3})


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "meta"])
def test_torch_device_refuses_what_is_not_there(device):
    with pytest.raises(RecipeError, match=f"--device {device} cannot be used here"):
        Settings(device=device).torch_device()


def test_label_tells_a_changed_quantizer():
    changed = Settings(act_quant="StochBackward2bit", act_override=("bit_width=4",), save_mode="quantize_on_backward")
    assert changed.label == "StochBackward2bit bit_width=4 quantize_on_backward"
    assert Settings(act_quant="StochBackward2bit").label == "StochBackward2bit"
    assert Settings(save_mode="quantize_on_backward").label == "full precision"


def test_restored_settings_are_those_that_were_written():
    settings = Settings(lr=0.1, act_quant="StochBackward2bit", act_override=("bit_width=4",))
    assert Settings.restored(json.loads(json.dumps(asdict(settings))), Path("file")) == settings


@pytest.mark.parametrize(
    "content", [None, [1], {}, asdict(Settings()) | {"colour": 3}, asdict(Settings()) | {"lr": "x"}]
)
def test_restored_refuses_what_are_no_settings(content):
    with pytest.raises(RecipeError, match=r"file .*; start a new run"):
        Settings.restored(content, Path("file"))
