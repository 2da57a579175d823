"""`quantize_backward`, `restore_backward`, `backward_quant` and `quantizer`."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import brevact
import brevact.nn as bnn
from brevact import NearestBackward4bit, StochBackward2bit, StochBackward4bit
from brevact.policies import computes_attention, is_activation_function, is_norm
from tests.autograd.measuring import watch_saved


class Net(nn.Module):
    """Two blocks and a head, with a functional op between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU()),
            nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU()),
        )
        self.head = nn.Linear(16, 5)
        self.tied = self.head

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return self.head((x * x.mean((2, 3), keepdim=True).sigmoid()).mean((2, 3)))


def images() -> Tensor:
    return torch.randn(16, 3, 16, 16)


def test_quantize_backward_leaves_the_model_as_it_was():
    model = Net().double()
    model.blocks[0].eval()
    model.head.weight.register_hook(lambda grad: grad)
    before = {name: (id(m), type(m), m.training) for name, m in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    x = images().double()
    model.eval()
    expected = model(x)
    model.train()
    model.blocks[0].eval()
    assert brevact.quantize_backward(model, StochBackward2bit) is model
    assert {name: (id(m), type(m), m.training) for name, m in model.named_modules()} == before
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(model.eval()(x), expected)
    brevact.restore_backward(model)
    for module in model.modules():
        assert not (module._forward_hooks or module._forward_pre_hooks or module._forward_hooks_always_called)


def test_quantize_backward_packs_and_restore_backward_ends_it():
    model, x = Net(), images()
    torch.manual_seed(0)
    expected = model(x)
    sizes = {}
    for name, change in (("plain", None), ("packed", brevact.quantize_backward), ("again", brevact.restore_backward)):
        if change is brevact.quantize_backward:
            change(model, StochBackward2bit)
        elif change:
            change(model)
        with watch_saved() as saved:
            out = model(x)
        assert torch.equal(out, expected)
        sizes[name] = saved.nbytes
    assert sizes["plain"] == sizes["again"] > 8 * sizes["packed"]


def test_submodules_run_in_the_region_when_called_by_themselves():
    model = brevact.quantize_backward(Net(), StochBackward2bit)
    with watch_saved() as saved:
        model.blocks(images())
    assert any(t.dtype is torch.uint8 for t in saved.tensors)


def test_rules_go_by_name_and_type_and_the_first_match_wins():
    model, x = Net(), images()
    rules = {
        "head": None,
        "blocks.1": NearestBackward4bit.let(bucket_size=64),
        nn.BatchNorm2d: StochBackward4bit,
        "*": StochBackward2bit,
    }
    brevact.quantize_backward(model, rules)
    report = {row.layer: row for row in brevact.memory_report(model, x).rows}
    bits = {
        name: 32 * report[name].saved_bytes / report[name].plain_bytes
        for name in ("blocks.0.0", "blocks.0.1", "blocks.1.1")
    }
    assert 2 <= bits["blocks.0.0"] < 2.3  # input image, "*"
    assert 4 <= bits["blocks.0.1"] < 4.3  # by type
    assert 4.6 <= bits["blocks.1.1"] < 5.1  # by name: 4 bits and 48 bits for each 64 elements
    with watch_saved() as saved:
        model.head(torch.randn(4096, 16))
    assert all(t.dtype is torch.float32 for t in saved.tensors)


def test_patterns_name_a_module_and_what_is_inside_it():
    model = Net()
    brevact.quantize_backward(model, {"blocks.*.1": None, "blocks": StochBackward2bit})
    report = {row.layer: row for row in brevact.memory_report(model, images()).rows}
    assert report["blocks.0.1"].plain_bytes == report["blocks.0.1"].saved_bytes
    assert report["blocks.0.2"].plain_bytes > 10 * report["blocks.0.2"].saved_bytes
    head = report[""]  # the product between the layers stays plain: no rule names the model itself
    assert head.saved_bytes >= head.plain_bytes


def test_rules_may_be_functions_and_tuples_of_types():
    model = Net()
    rules = {
        lambda name, module: name.endswith("1.1"): None,
        (nn.BatchNorm1d, nn.BatchNorm2d): StochBackward4bit,
        "*": StochBackward2bit,
    }
    brevact.quantize_backward(model, rules)
    applied = {row.module: (row.rule, row.source) for row in brevact.backward_policy(model).rows}
    assert applied["blocks.1.1"] == ("<lambda>", "full precision")
    assert applied["blocks.0.1"] == ("BatchNorm1d | BatchNorm2d", "StochBackward4bit")
    assert applied[""] == applied["blocks.0.0"] == ("'*'", "StochBackward2bit")


def test_a_rule_for_any_name_of_a_tied_module_counts():
    model = brevact.quantize_backward(Net(), {"tied": None, "*": StochBackward2bit})
    assert {row.module: row.settings for row in brevact.backward_policy(model).rows}["head"] is None


def test_rules_of_a_policy_object_may_match_nothing():
    policy = brevact.Policy({nn.LayerNorm: None, nn.BatchNorm2d: StochBackward4bit, "*": StochBackward2bit})
    rows = brevact.backward_policy(brevact.quantize_backward(Net(), policy)).rows
    assert [row.source for row in rows if row.kind == "BatchNorm2d"] == ["StochBackward4bit"] * 2
    with pytest.raises(TypeError, match="rules=3 of type int"):
        brevact.Policy(3)
    with pytest.raises(ValueError, match="rules: got no rules"):
        brevact.Policy({})


def test_shipped_policies_fit_models_of_their_kind():
    block = nn.TransformerEncoderLayer(64, 4)
    transformer = nn.Sequential(nn.Embedding(10, 64), block, nn.RMSNorm(64), nn.CrossEntropyLoss())
    rows = brevact.backward_policy(brevact.quantize_backward(transformer, brevact.TRANSFORMER)).rows
    finer = {row.kind for row in rows if row.source == "StochBackward4bit"}
    assert finer == {"LayerNorm", "RMSNorm", "CrossEntropyLoss"}
    assert {row.source for row in rows} == {"StochBackward4bit", "StochBackward2bit"}
    rows = brevact.backward_policy(brevact.quantize_backward(Net(), brevact.CONV_NET)).rows
    assert {row.kind for row in rows if row.source == "StochBackward3bit"} == {"Conv2d", "BatchNorm2d", "Linear"}
    assert {row.kind for row in rows if row.source == "StochBackward2bit"} == {"Net", "Sequential", "SiLU", "ReLU"}


def test_rules_know_modules_by_their_kind():
    class LlamaRMSNorm(nn.Module):
        pass

    class GELUActivation(nn.Module):
        pass

    norms = (nn.BatchNorm2d(3), nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.InstanceNorm1d(3), LlamaRMSNorm())
    functions = (nn.ReLU(), nn.SiLU(), nn.Sigmoid(), nn.Softmax(-1), GELUActivation())
    attentions = (nn.MultiheadAttention(4, 2),)
    others = (nn.Linear(3, 3), nn.Conv2d(3, 3, 3), nn.PReLU(), nn.Sequential(nn.LayerNorm(3)), nn.CrossEntropyLoss())
    for rule, kinds in ((is_norm, norms), (is_activation_function, functions), (computes_attention, attentions)):
        for module in (*norms, *functions, *attentions, *others):
            assert rule("", module) == (module in kinds), (rule, module)


def test_backward_policy_shows_what_applies_where():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), bnn.SiLU(act_quant=StochBackward4bit)))
    plain = brevact.backward_policy(model)
    assert [row.rule for row in plain.rows] == ["", "", "", "", "its own"]
    brevact.quantize_backward(model, {"1.0": None, "*": StochBackward2bit.let(bucket_size=64)})
    policy = brevact.backward_policy(model)
    assert [row.module for row in policy.rows] == [name for name, _ in model.named_modules() if "quant" not in name]
    lines = str(policy).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["(model)", "1.0", "1.1"]
    assert "bucket_size=64" in lines[2] and lines[2].split()[2] == "3"
    assert "full precision" in lines[3] and "bit_width=4" in lines[4]
    with pytest.raises(TypeError, match="model: got 3"):
        brevact.backward_policy(3)


def test_layers_with_a_quantizer_of_their_own_keep_it():
    model = nn.Sequential(bnn.QuantConv2d(3, 8, 3, weight_quant=None, act_quant=StochBackward4bit), nn.BatchNorm2d(8))
    brevact.quantize_backward(model, StochBackward2bit)
    report = brevact.memory_report(model, images())
    bits = [32 * row.saved_bytes / row.plain_bytes for row in report.rows]
    assert 4 <= bits[0] < 4.3 and 2 <= bits[1] < 2.3
    brevact.restore_backward(model)
    bits = [32 * row.saved_bytes / row.plain_bytes for row in brevact.memory_report(model, images()).rows]
    assert 4 <= bits[0] < 4.3 and bits[1] == 32


def test_policies_survive_copy_and_pickle():
    model = brevact.quantize_backward(Net(), {"head": None, "*": StochBackward2bit})
    x = images()
    size = brevact.memory_report(model, x).saved_bytes
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert brevact.memory_report(twin, x).saved_bytes == size
        brevact.restore_backward(twin)
        assert brevact.memory_report(twin, x).saved_bytes > size
    assert brevact.memory_report(model, x).saved_bytes == size


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (nn.ReLU, TypeError, "ReLU"),
        ({"haed": None}, ValueError, r"'haed' matches no module of Net; nearest names: head"),
        ({nn.LayerNorm: StochBackward2bit}, ValueError, "LayerNorm"),
        ({3: StochBackward2bit}, TypeError, "policy rule 3 of type int"),
        ({"*": "StochBackward2bit"}, TypeError, "StochBackward2bit"),
        (None, TypeError, "None"),
        ({"*": None, nn.BatchNorm2d: StochBackward2bit}, ValueError, "BatchNorm2d applies nowhere.* put it before"),
        ({}, ValueError, "no rules"),
        ({StochBackward2bit: None}, TypeError, "StochBackward2bit"),
        ({(nn.Conv2d, 3): None}, TypeError, "accepted keys"),
        ({lambda name, module: None: StochBackward2bit}, TypeError, "<lambda> returned None"),
        ({lambda name, module: False: StochBackward2bit}, ValueError, "<lambda> matches no module of Net"),
        (brevact.Policy({nn.LayerNorm: None, nn.RMSNorm: None}), ValueError, "LayerNorm matches no module of Net"),
    ],
)
def test_quantize_backward_refuses_wrong_policies(policy, error, message):
    model = Net()
    with pytest.raises(error, match=message):
        brevact.quantize_backward(model, policy)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_quantize_backward_refuses_a_second_policy_and_no_model():
    model = brevact.quantize_backward(Net(), StochBackward2bit)
    for twice in (model, model.blocks, nn.Sequential(model)):
        with pytest.raises(ValueError, match="restore_backward"):
            brevact.quantize_backward(twice, StochBackward2bit)
    with pytest.raises(ValueError, match="no backward policy"):
        brevact.restore_backward(Net())
    for function in (brevact.restore_backward, brevact.memory_report, brevact.quantize_backward):
        with pytest.raises(TypeError, match="model: got 3"):
            function(3, *([] if function is brevact.restore_backward else [StochBackward2bit]))
    with pytest.raises(TypeError, match="bucket_size: overrides go with a single quantizer"):
        brevact.quantize_backward(Net(), {"*": StochBackward2bit}, bucket_size=64)


def test_unknown_overrides_name_the_nearest():
    for call in (
        lambda: brevact.quantize_backward(Net(), StochBackward2bit, buket_size=64),
        lambda: brevact.backward_quant(StochBackward2bit, buket_size=64),
        lambda: brevact.quantizer(StochBackward2bit, buket_size=64),
    ):
        with pytest.raises((TypeError, ValueError), match=r"buket_size.*bucket_size"):
            call()


def test_backward_quant_is_a_context_manager_and_a_decorator():
    layer = nn.Linear(64, 64)
    x = torch.randn(64, 64)

    @brevact.backward_quant(StochBackward2bit)
    def forward() -> Tensor:
        return layer(x)

    for _ in range(2):
        with watch_saved() as saved:
            forward()
        assert any(t.dtype is torch.uint8 for t in saved.tensors)
    with watch_saved() as saved, brevact.backward_quant(StochBackward2bit), brevact.backward_quant(None):
        layer(x)
    assert saved.holds(x)


def test_scripted_modules_are_refused_and_nothing_changes():
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))
    with pytest.raises(TypeError, match=r"takes no forward hooks .*brevact\.backward_quant\(\.\.\.\)"):
        brevact.quantize_backward(model, StochBackward2bit)
    assert not any(module._forward_pre_hooks for module in model.modules())
