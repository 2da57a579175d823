"""`Policy.save`, `Policy.load` and the text of a policy."""

from __future__ import annotations

import importlib
import itertools
import json
from dataclasses import asdict

import brevitas.nn as qnn
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import brevact
from brevact import BackwardSettings, Policy, StochBackward2bit, StochBackward4bit
from brevact.autograd.region.rows import OP_NAMES
from brevact.injectors import backward_settings_from
from brevact.policy.files import LAYER_TYPES, LEAVES, PREDICATES, from_plain, to_plain
from brevact.quantizers import Granularity, Rounding, UniformQuantizer
from tests.crosses import some_of
from tests.user_code import MyBackward

#: A value of each setting that is not the default of any quantizer.
OTHER_VALUES = {
    "base_levels": 6,
    "bit_width": 5,
    "block": 4,
    "bucket": 256,
    "bucket_size": 100,
    "channel_dim": 2,
    "derive_min_bits": 0,
    "double_backward": True,
    "format": "U5",
    "granularity": Granularity.CHANNEL,
    "min_numel": 7,
    "minimum_dtype": torch.float16,
    "mix_bit_width": 8,
    "mix_levels": 20,
    "mix_levels_prob": 0.125,
    "mix_prob": 0.25,
    "quantize_forward": True,
    "recompute": 64,
    "residual_bit_width": 4,
    "rounding": Rounding.NEAREST,
    "save_mode": brevact.SaveMode.QUANTIZE_ON_BACKWARD,
    "scale_dtype": torch.float16,
    "score_bit_width": 5,
    "use_max": False,
}


def again(policy: Policy, tmp_path) -> Policy:
    path = tmp_path / "policy.json"
    policy.save(path)
    return Policy.load(path)


def test_policies_are_equal_if_they_store_the_same_by_the_same_rules_in_the_same_order(tmp_path):
    for policy in (brevact.DEFAULT, brevact.CONV_NET, brevact.TRANSFORMER):
        assert policy == policy and policy == Policy(dict(policy.rules))
    own = brevact.DEFAULT.let({"head": None, torch.exp: StochBackward4bit})
    for policy in (brevact.DEFAULT, brevact.CONV_NET, brevact.TRANSFORMER, own):
        assert again(policy, tmp_path) == policy
    rules = dict(brevact.DEFAULT.rules)
    others = (
        {key: rules[key] for key in reversed(rules)},
        rules | {"": brevact.DitherBackward4bit},
        rules | {"": brevact.StochBackward4bit.let(score_bit_width=5)},
        rules | {"head": StochBackward4bit},
    )
    assert all(Policy(other) != brevact.DEFAULT for other in others)
    assert Policy(rules, layers={"0": "Linear"}) != brevact.DEFAULT and brevact.DEFAULT != rules


def test_save_keeps_all_shipped_quantizers_by_name(tmp_path):
    policy = Policy({f"layer{index}": leaf for index, leaf in enumerate(LEAVES.values())})
    assert {*LEAVES} >= {name for name in vars(brevact.quant) if not name.startswith("_")}
    assert again(policy, tmp_path) == policy
    assert all(to_plain(leaf) == {"quantizer": name} for name, leaf in LEAVES.items())


@pytest.mark.parametrize("name", some_of(LEAVES, quick=6))
def test_save_keeps_pairs_of_settings(name):
    leaf = LEAVES[name]
    names = [each for each in sorted(leaf._setting_names()) if each in OTHER_VALUES]
    count = 0
    for first, second in itertools.combinations(names, 2):
        quantizer = leaf.let(**{first: OTHER_VALUES[first], second: OTHER_VALUES[second]})
        try:
            expected = backward_settings_from(quantizer)
        except ValueError:  # such a quantizer is refused itself
            continue
        count += 1
        plain = json.loads(json.dumps(to_plain(quantizer)))
        assert plain["quantizer"] == leaf.__name__
        assert backward_settings_from(from_plain(plain)) == expected
    assert count > len(names)


def test_pairs_of_settings_cover_all_settings():
    known = {name for leaf in LEAVES.values() for name in leaf._setting_names()} - {"forward_quant"}
    assert known == {*OTHER_VALUES}


@pytest.mark.parametrize("source", [type("Own", (StochBackward4bit,), {"bucket_size": 64}), MyBackward])
def test_save_keeps_settings_of_subclasses(source, tmp_path):
    policy = Policy({"*": source})
    assert again(policy, tmp_path) == policy


def test_save_keeps_every_kind_of_key(tmp_path):
    keys = ["blocks.*", "", *PREDICATES.values(), nn.Conv2d, nn.modules.conv._ConvNd, qnn.QuantConv2d]
    keys += [brevact.nn.SiLU, (nn.LayerNorm, nn.RMSNorm), F.cross_entropy, (torch.matmul, F.linear)]
    policy = Policy({key: StochBackward2bit for key in keys} | {"*": None})
    loaded = again(policy, tmp_path)
    assert list(loaded.rules) == list(policy.rules)
    assert loaded.rules["*"] is None


def test_save_keeps_every_op_and_type(tmp_path):
    of_op = {name: func for func, name in OP_NAMES.items()}
    keys = [*of_op.values(), *LAYER_TYPES.values()]
    loaded = again(Policy({key: None for key in keys}), tmp_path)
    assert [OP_NAMES[key] for key in loaded.rules if key in OP_NAMES] == list(of_op)
    assert list(loaded.rules)[len(of_op) :] == list(LAYER_TYPES.values())


class Own(nn.Linear):
    """A layer of a user's."""


class OwnQuantizer:
    is_stochastic = False

    def quantize(self, x, seed=None):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (
            {lambda name, module: True: None},
            ["<lambda>", "a function of yours", "brevact.policy.predicates.is_norm", "patterns"],
        ),
        ({Own: None}, ["Own cannot be saved", "torch.nn", "isinstance(module, Own)"]),
        ({"*": OwnQuantizer()}, ['rule {"name": "*"}', "OwnQuantizer", "cannot be saved"]),
        ({"*": UniformQuantizer(bit_width=3)}, ["UniformQuantizer", "StochBackward2bit.let(bucket_size=128)"]),
        ({"*": BackwardSettings(UniformQuantizer())}, ["BackwardSettings", "derives from no quantizer of brevact"]),
        ({"*": type("Mine", (StochBackward2bit,), {"quantizer": OwnQuantizer()})}, ["Mine", "in more than settings"]),
    ],
    ids=["lambda", "type", "quantizer", "object", "settings", "own"],
)
def test_save_refuses_what_is_the_users_own_and_writes_no_file(rules, words, tmp_path):
    path = tmp_path / "policy.json"
    with pytest.raises(TypeError) as caught:
        Policy(rules).save(path)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not path.exists()


RULE = {"name": "*", "quantizer": "StochBackward2bit"}
REPORT = asdict(brevact.FitReport("ratio=24", 100, 2400, 0.01, 0.05, 0.001, 0.0, 0.001, 7)) | {"groups": []}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("no json", ["holds no policy", "Policy.save"]),
        ("[" * 100_000, ["holds no policy"]),
        ('{"brevact": "1", "brevact": "2"}', ["'brevact'", "twice"]),
        ([], ["holds no policy"]),
        ({"rules": [RULE]}, ["holds no policy"]),
        ({"rules": {}}, ["rules", "accepted is a list"]),
        ({"rules": []}, ["at least one"]),
        ({"brevact": "9.1", "levels": 3, "rules": [RULE]}, ["written by brevact 9.1; this is", "'levels'", "Accepted"]),
        ({"rules": [RULE | {"bits": 3}]}, ["rule 1", "'bits'", "settings"]),
        ({"rules": [RULE, RULE]}, ["rule 2", "earlier rule"]),
        ({"rules": [{"quantizer": None}]}, ["rule 1", "exactly one"]),
        ({"rules": [RULE | {"predicate": "x"}]}, ["name, predicate", "exactly one"]),
        ({"rules": [{"name": "*"}]}, ["rule 1", "quantizer"]),
        ({"rules": [{"name": 3, "quantizer": None}]}, ["name: got 3", "a string"]),
        (
            {"rules": [{"types": ["torch.nn.Conv2D"], "quantizer": None}]},
            ["torch.nn.Conv2D", "nearest: torch.nn.Conv2d"],
        ),
        ({"rules": [{"types": ["os.system"], "quantizer": None}]}, ["os.system", "not known here"]),
        (
            {"rules": [{"functions": ["crossentropy"], "quantizer": None}]},
            ["nearest: cross_entropy", "Policy.load(path).let("],
        ),
        ({"rules": [{"predicate": "os.system", "quantizer": None}]}, ["os.system", "brevact.policy.predicates."]),
        ({"rules": [RULE | {"quantizer": "StochBackward2bits"}]}, ["nearest: StochBackward2bit"]),
        ({"rules": [RULE | {"quantizer": "os.system"}]}, ["not known here"]),
        ({"rules": [RULE | {"quantizer": {"class": "os"}}]}, ["not known here"]),
        ({"rules": [RULE | {"settings": {"bucketsize": 3}}]}, ["rule 1", "bucketsize", "did you mean bucket_size"]),
        ({"rules": [RULE | {"settings": {"bit_width": 99}}]}, ["rule 1", "bit_width: got 99"]),
        ({"rules": [RULE | {"settings": {"quantizer": "x"}}]}, ["quantizer"]),
        ({"rules": [RULE | {"settings": {"bit_width": {"x": 1}}}]}, ["{'x': 1}"]),
        ({"rules": [RULE | {"settings": 3}]}, ["settings: got 3"]),
        ({"rules": [RULE | {"quantizer": "brevitas.quant.Int8ActPerTensorFloat"}]}, ["such as StochBackward8bit"]),
        ({"rules": [RULE | {"settings": {"bit_width": [3]}}]}, ["settings: got [3]"]),
        ({"rules": [{"name": "*", "quantizer": None, "settings": {"a": 1}}]}, ["full precision", "leave them out"]),
        ({"rules": [RULE], "layers": ["a"]}, ["layers"]),
        ({"rules": [RULE | {"min_numel": 3}], "report": None}, ["rule 1", "'min_numel'"]),
        ({"brevact": "9.1", "rules": [RULE], "report": REPORT | {"noize": 0.1}}, ["report: ", "'noize'"]),
        ({"brevact": "9.1", "rules": [RULE], "report": REPORT | {"groups": [3]}}, ["report: "]),
    ],
    ids=range(33),
)
def test_load_refuses_what_it_does_not_know(content, words, tmp_path):
    path = tmp_path / "policy.json"
    if isinstance(content, dict) and content.get("rules") != [RULE]:
        content = {"brevact": brevact.__version__, **content}
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError) as caught:
        Policy.load(path)
    assert str(path) in str(caught.value) or words == ["at least one"]
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(("path", "predicate"), PREDICATES.items(), ids=PREDICATES)
def test_functions_are_written_by_the_path_under_which_they_are_imported(path, predicate):
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name) is predicate


def net(kind=nn.ReLU, last="head") -> nn.Module:
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(nn.Linear(8, 8), kind()))
    model.add_module(last, nn.Linear(8, 2))
    return model


def test_a_fitted_policy_is_for_the_model_that_it_was_fitted_for(tmp_path):
    layers = {name: type(module).__name__ for name, module in net().named_modules()}
    policy = again(Policy({"*": StochBackward2bit}, layers), tmp_path)
    assert policy.layers == layers
    model = brevact.quantize_backward(net(), policy)
    assert brevact.backward_policy(model).rows[0].source == "StochBackward2bit"
    for changed, words in (
        (net(nn.SiLU), ["body.1 is a SiLU, and was a ReLU"]),
        (net(last="heads"), ["head is missing, heads is new"]),
        (nn.Sequential(net()), ["body is missing", "0 is new", "model.module"]),
    ):
        with pytest.raises(ValueError) as caught:
            brevact.quantize_backward(changed, policy)
        assert all(word in str(caught.value) for word in words), caught.value
        assert not any(module._forward_pre_hooks for module in changed.modules())


def test_a_fitted_policy_takes_classes_that_derive_from_those_of_its_layers():
    layers = {name: type(module).__name__ for name, module in net().named_modules()}
    model = net()
    model.head.__class__ = type("FSDPLinear", (nn.Linear,), {})  # as FSDP2 does
    brevact.quantize_backward(model, Policy({"*": StochBackward2bit}, layers))


def test_print_shows_a_line_a_rule():
    text = str(Policy({"head": None, (nn.Conv2d, nn.Linear): StochBackward4bit, F.linear: StochBackward2bit}))
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["rule", "for", "bits", "backward", "quantizer"]
    assert lines[2] == ["'head'", "name", "-", "full", "precision"]
    assert lines[3][:6] == ["Conv2d", "|", "Linear", "type", "4", "StochBackward4bit:"]
    assert lines[4][:3] == ["linear", "op", "2"]
