"""`python -m recipes.retrofit`: a trained ResNet whose norms go over to few levels."""

import csv

import pytest
import torch
from torch import nn

import brevact
from recipes import retrofit
from recipes.images import ImageSettings
from recipes.models import ResNet20

TINY = ["--dataset", "digits", "--train-size", "64", "--test-size", "32", "--epochs", "1", "--fine-tune-epochs", "1"]


@pytest.mark.exhaustive
def test_main_trains_retrofits_and_takes_its_own_weights(tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    common = [*TINY, "--formats", "L5", "--batch-size", "32"]
    assert retrofit.main([*common, "--scopes", "all", "all-but-first", "--out-dir", str(first)]) == 0
    with (first / "retrofit.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["norms"], row["scope"]) for row in rows] == [
        ("full precision", ""),
        ("L5", "all"),
        ("L5", "all-but-first"),
    ]
    saved = [float(row["saved_mib"]) for row in rows]
    assert saved[1] < saved[2] < saved[0] and all(0 <= float(row["accuracy"]) <= 1 for row in rows)
    weights = str(first / retrofit.WEIGHTS)
    capsys.readouterr()
    assert retrofit.main([*common, "--scopes", "all", "--pretrained", weights, "--out-dir", str(second)]) == 0
    with (second / "retrofit.csv").open(newline="") as file:
        again = list(csv.DictReader(file))
    assert again[0]["accuracy"] == rows[0]["accuracy"] and again[1]["accuracy"] == rows[1]["accuracy"]
    assert "L5 all" in capsys.readouterr().out


def test_rules_change_the_forward_of_norms_alone():
    model = ResNet20(classes=10)
    plan = retrofit.Plan(("L4",), ("all-but-first",), ImageSettings(), "StochBackward2bit")
    rules = retrofit.rules(model, plan, "L4", "all-but-first")
    assert list(rules) == ["stem.1", nn.BatchNorm2d, "*"] and brevact.quantizer(rules["*"]).bit_width == 2
    brevact.quantize_backward(model, rules)
    forward = {
        name: brevact.quantizer(rules[nn.BatchNorm2d]).quantize_forward and isinstance(module, nn.BatchNorm2d)
        for name, module in model.named_modules()
    }
    assert next(iter(rules)) == "stem.1" and not getattr(brevact.quantizer(rules["stem.1"]), "quantize_forward", False)
    assert sum(forward.values()) == sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 21
    x = torch.randn(4, 3, 32, 32)
    plain = ResNet20(classes=10)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain.stem(x), model.stem(x))
    assert not torch.equal(plain.blocks[0](plain.stem(x)), model.blocks[0](model.stem(x)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--act-quant", "StochBackward9bit"], "StochBackward9bit"),
        (["--pretrained", "nowhere.pt"], "nowhere.pt"),
        (["--epochs", "0"], "--epochs 0"),
    ],
)
def test_main_says_what_is_wrong(arguments, message, tmp_path, capsys):
    assert retrofit.main([*TINY, *arguments, "--out-dir", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
