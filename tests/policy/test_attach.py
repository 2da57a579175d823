"""`quantize_backward`, `restore_backward`, `backward_quant` and `quantizer`."""

from __future__ import annotations

import copy
import operator
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import brevact
import brevact.nn as bnn
from brevact import L4ForwardBackward, NearestBackward4bit, StochBackward2bit, StochBackward4bit, StochBackward8bit
from tests.autograd.measuring import watch_saved


class Net(nn.Module):
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


class Doubled(torch.autograd.Function):
    """Saves a tensor that no other op saves."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(2 * x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


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


@pytest.mark.parametrize("policy", [brevact.DEFAULT, brevact.RECOMPUTE, brevact.TRANSFORMER])
def test_rules_of_ones_own_stand_before_those_of_a_policy(policy):
    own = {Doubled: StochBackward8bit, F.cross_entropy: StochBackward2bit, "body": None}
    changed = policy.let({F.cross_entropy: None, "body": None}).let({Doubled: own[Doubled]})
    changed = changed.let({F.cross_entropy: own[F.cross_entropy]})
    assert [*changed.rules][:3] == [F.cross_entropy, Doubled, "body"] and changed == policy.let(
        {F.cross_entropy: own[F.cross_entropy], Doubled: own[Doubled], "body": None}
    )
    assert {**changed.rules} == {**policy.rules, **own} and "body" not in policy.rules
    model = nn.Sequential(OrderedDict(body=nn.Linear(64, 64), last=nn.Linear(64, 64)))
    brevact.quantize_backward(model, changed)
    x = torch.randn(128, 64)
    with watch_saved() as saved, brevact.backward_quant(model):
        F.cross_entropy(Doubled.apply(model.last(model.body(x))), x)
    assert saved.holds(x)  # read by the body
    ops = {each.rule: each.source for row in brevact.backward_policy(model).rows for each in row.ops}
    assert ops["Doubled"] == "StochBackward8bit" and ops["cross_entropy"] == "StochBackward2bit"


def test_rules_of_a_policy_object_may_match_nothing():
    policy = brevact.Policy({nn.LayerNorm: None, nn.BatchNorm2d: StochBackward4bit, "*": StochBackward2bit})
    rows = brevact.backward_policy(brevact.quantize_backward(Net(), policy)).rows
    assert [row.source for row in rows if row.kind == "BatchNorm2d"] == ["StochBackward4bit"] * 2
    with pytest.raises(TypeError, match="rules=3 of type int"):
        brevact.Policy(3)
    with pytest.raises(ValueError, match="rules: got no rules"):
        brevact.Policy({})


class Ops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
        self.attention = nn.MultiheadAttention(64, 2, batch_first=True)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = F.silu(self.first(x))
        x = self.attention(x, x, x, need_weights=False)[0]
        x = torch.exp(0.1 * (x @ x.mT @ x))
        return self.loss(self.head(x).flatten(0, 1), target)


def op_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 64, 64), torch.randint(64, (512,))


def bits_of(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[tuple[str, str], int | None]:
    """Whole bits per element that each op of each module packs; None if it packs nothing."""
    found: dict[tuple[str, str], int | None] = {}
    for row in brevact.memory_report(model, batch).ops:
        if row.how == "packed" and row.saved_bytes:
            found[row.layer, row.op] = 32 * row.saved_bytes // row.tensor_bytes
        elif row.how != "packed":
            found.setdefault((row.layer, row.op), None)
    return found


def test_rules_name_torch_functions_wherever_they_are_called():
    rules = {
        (F.cross_entropy, F.scaled_dot_product_attention): None,
        "head": brevact.StochBackward3bit,
        torch.bmm: StochBackward4bit,
        Tensor.exp: StochBackward8bit,  # which has no Function: saved-tensor hooks pack
        F.silu: brevact.StochBackward5bit.let(derive_min_bits=0),  # the derivative, not its input
        "*": StochBackward2bit,
    }
    model, batch = Ops(), op_batch()
    expected = model(*batch)
    brevact.quantize_backward(model, rules)
    assert torch.equal(model(*batch), expected)
    assert bits_of(model, batch) == {
        ("first", "linear"): 2,
        ("", "silu"): 5,
        ("attention", "linear"): 2,
        ("attention", "scaled_dot_product_attention"): None,
        ("", "matmul"): 4,  # as the rule for torch.bmm says
        ("", "exp"): 8,
        ("head.0", "linear"): 3,
        ("head.1", "silu"): 3,  # the rule for "head" comes first
        ("head.2", "linear"): 3,
        ("loss", "cross_entropy"): None,
    }
    model(*batch).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("base", [{}, {"*": None}, {"*": brevact.LosslessBackward}])
def test_rules_for_ops_alone_leave_the_rest_as_it_is(base):
    rules = {F.cross_entropy: StochBackward4bit, F.scaled_dot_product_attention: StochBackward8bit}
    model, batch = brevact.quantize_backward(Ops(), rules | base), op_batch()
    packed = {op for (_, op), bits in bits_of(model, batch).items() if bits}
    assert packed == {"cross_entropy", "scaled_dot_product_attention"}
    assert bits_of(model, batch)["loss", "cross_entropy"] == 4
    model.eval()
    with watch_saved() as saved:
        model(*batch)
    assert not any(t.dtype is torch.uint8 for t in saved.tensors)


def test_the_first_rule_decides_on_an_op_inside_another_one():
    attend, whole = F.scaled_dot_product_attention, F.multi_head_attention_forward
    for rules, inner in (({attend: None, whole: StochBackward4bit}, None), ({whole: StochBackward4bit}, 4)):
        found = bits_of(brevact.quantize_backward(Ops(), rules | {"*": StochBackward2bit}), op_batch())
        assert (found["attention", "linear"], found["first", "linear"]) == (4, 2)
        assert found["attention", "scaled_dot_product_attention"] == inner  # of the value
    found = bits_of(brevact.quantize_backward(Ops(), {whole: None, attend: StochBackward4bit, "*": None}), op_batch())
    assert not any(found.values())


def test_a_module_that_no_rule_matches_counts_as_its_parent():
    rules = {nn.Sequential: StochBackward2bit, F.silu: StochBackward4bit.let(derive_min_bits=0)}
    found = bits_of(brevact.quantize_backward(Ops(), rules), op_batch())
    assert found["head.1", "silu"] == 2 and found["", "silu"] == 4 and found["first", "linear"] is None


def test_layers_with_a_quantizer_of_their_own_have_no_rules_for_ops():
    four = StochBackward4bit.let(derive_min_bits=0)
    model = nn.Sequential(nn.Linear(64, 64), bnn.SiLU(act_quant=four), nn.SiLU())
    brevact.quantize_backward(model, {F.silu: None, "*": StochBackward2bit})
    found = bits_of(model, (torch.randn(128, 64),))
    assert found == {("0", "linear"): 2, ("1", "silu"): 4, ("2", "silu"): None}


def test_rules_for_ops_alone_find_nothing_in_a_layer_with_a_quantizer_of_its_own():
    for policy in ({F.silu: None}, brevact.Policy({F.silu: None})):
        with pytest.raises(ValueError, match=r"silu applies nowhere in SiLU; it has a backward quantizer of its own"):
            brevact.quantize_backward(bnn.SiLU(act_quant=StochBackward4bit), policy)


def test_gradients_of_an_op_with_a_rule_are_those_of_its_quantizer():
    x, weight = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    policy = brevact.Policy({torch.sigmoid: NearestBackward4bit, "*": None})
    with brevact.backward_quant(policy):
        (x @ weight).sigmoid().sum().backward()
    found, weight.grad = weight.grad, None
    y = x @ weight
    with brevact.backward_quant(NearestBackward4bit):
        y = y.sigmoid()
    y.sum().backward()
    assert torch.equal(found, weight.grad)


def test_checkpoints_and_hooks_inside_a_region_keep_what_they_are_given():
    x, weight = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    policy = brevact.Policy({F.silu: StochBackward4bit, "*": None})
    stored = []
    with brevact.backward_quant(policy):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: stored.append(t) or t, lambda t: t):
            F.silu(x @ weight)
        out = checkpoint(lambda x: F.silu(x @ weight), x, use_reentrant=False)
    assert not any(t.dtype is torch.uint8 for t in stored)
    (found,) = torch.autograd.grad(out.sum(), weight)
    (expected,) = torch.autograd.grad(F.silu(x @ weight).sum(), weight)
    assert torch.equal(found, expected)


def test_norms_round_their_output_by_the_rule_for_them_in_eval_mode_too():
    x = torch.randn(64, 8, 4, 4)
    norm, other = (nn.BatchNorm2d(8, momentum=1.0) for _ in range(2))
    both = nn.Sequential(other, nn.GroupNorm(2, 8))
    brevact.quantize_backward(norm, L4ForwardBackward)
    brevact.quantize_backward(both, {F.batch_norm: L4ForwardBackward, "*": StochBackward2bit})
    exact = brevact.restore_backward(copy.deepcopy(both))
    for train in (True, False):
        for model in (norm, both, exact):
            model.train(train)
        assert torch.equal(both(x), both[1](norm(x))) and not torch.equal(both(x), exact(x))
        with torch.no_grad():
            assert torch.equal(both(x), both[1](norm(x)))
        assert torch.equal(both[1](x), exact[1](x))
    brevact.restore_backward(both)
    brevact.quantize_backward(both, {F.batch_norm: None, "*": L4ForwardBackward})
    assert torch.equal(both[0](x), exact[0](x)) and not torch.equal(both[1](x), exact[1](x))


def test_rules_for_ops_survive_copy_and_pickle_and_are_equal():
    rules = {F.cross_entropy: None, torch.matmul: StochBackward4bit, "*": StochBackward2bit}
    model, batch = brevact.quantize_backward(Ops(), rules), op_batch()
    settings = brevact.backward_policy(model).rows[0].settings
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert brevact.backward_policy(twin) == brevact.backward_policy(model)
        assert bits_of(twin, batch) == bits_of(model, batch)
        assert hash(brevact.backward_policy(twin).rows[0].settings) == hash(settings)
    plain = brevact.backward_policy(brevact.quantize_backward(Ops(), StochBackward2bit)).rows[0].settings
    assert plain != settings and plain.key == settings.key  # a tensor that both pack is packed once
    with pytest.raises(TypeError, match=r"of_functions=3; accepted is a tuple of pairs"):
        brevact.BackwardSettings(plain.quantizer, of_functions=3)


def test_backward_policy_shows_rules_for_ops():
    model = brevact.quantize_backward(
        Ops(), {"head": None, (torch.bmm, F.silu): StochBackward4bit, "*": StochBackward2bit}
    )
    policy = brevact.backward_policy(model)
    assert [(each.op, each.rule, each.source) for each in policy.rows[0].ops] == [
        ("matmul", "bmm | silu", "StochBackward4bit"),
        ("silu", "bmm | silu", "StochBackward4bit"),
    ]
    lines = [line.split()[:2] for line in str(policy).splitlines()[2:]]
    assert lines == [["(model)", "Ops"], ["matmul", "op"], ["silu", "op"], ["head", "Sequential"]]
    assert str(policy).splitlines()[-1].split()[3:] == ["'head'", "full", "precision"]  # which has no rules for ops
    alone = brevact.backward_policy(brevact.quantize_backward(Ops(), {F.silu: StochBackward4bit}))
    assert (alone.rows[0].rule, alone.rows[0].source, alone.rows[0].settings) == ("", "full precision", None)
    assert len(str(alone).splitlines()) == 4


def test_the_default_applies_where_no_quantizer_is_named():
    model, batch = brevact.quantize_backward(Ops()), op_batch()
    explicit = brevact.quantize_backward(Ops(), brevact.DEFAULT)
    assert brevact.backward_policy(model) == brevact.backward_policy(explicit)
    assert brevact.backward_policy(model).rows[0].source == "DitherBackward4bit"
    with watch_saved() as saved, brevact.backward_quant():
        brevact.restore_backward(model)(*batch)
    assert saved.nbytes < 2 * brevact.memory_report(explicit, batch).saved_bytes
    for call in (brevact.backward_quant, lambda **overrides: brevact.quantize_backward(Ops(), **overrides)):
        with pytest.raises(TypeError, match=r"bucket_size: .*name one, such as brevact\.DitherBackward4bit"):
            call(bucket_size=64)


def test_backward_quant_takes_policies_without_rules_for_modules():
    x, weight = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    with watch_saved() as saved, brevact.backward_quant(brevact.Policy({torch.exp: StochBackward2bit})):
        (x @ weight).exp()
    assert [t.dtype for t in saved.tensors if t is not weight].count(torch.uint8) == 1 and saved.holds(x)
    for policy in (brevact.Policy({"head": None, "*": StochBackward2bit}), brevact.DEFAULT.let({"head": None})):
        with pytest.raises(TypeError, match="policy rule 'head' is for modules, of which a block of code knows"):
            brevact.backward_quant(policy)
    brevact.backward_quant(brevact.DEFAULT.let({torch.exp: StochBackward2bit}))
    with pytest.raises(TypeError, match="overrides go with a single quantizer"):
        brevact.backward_quant(brevact.Policy({"*": StochBackward2bit}), bucket_size=64)


def test_shipped_policies_fit_models_of_their_kind():
    block = nn.TransformerEncoderLayer(64, 4)
    transformer = nn.Sequential(nn.Embedding(10, 64), block, nn.RMSNorm(64), nn.CrossEntropyLoss())
    rows = brevact.backward_policy(brevact.quantize_backward(transformer, brevact.TRANSFORMER)).rows
    finer = {row.kind for row in rows if row.source == "DitherBackward4bit"}
    assert finer == {"LayerNorm", "RMSNorm"}
    assert {(op.op, op.source) for op in rows[0].ops} == {("cross_entropy", "DitherBackward4bit")}
    assert {row.source for row in rows} == {"DitherBackward4bit", "DitherBackward2bit"}
    rows = brevact.backward_policy(brevact.quantize_backward(Net(), brevact.CONV_NET)).rows
    assert {row.kind for row in rows if row.source == "DitherBackward3bit"} == {"Conv2d", "BatchNorm2d", "Linear"}
    assert {row.kind for row in rows if row.source == "DitherBackward2bit"} == {"Net", "Sequential", "SiLU", "ReLU"}


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
        ({F.ctc_loss: None}, TypeError, "policy rule ctc_loss: no quantizer changes what this function stores"),
        ({(F.gelu, torch.logcumsumexp): None}, TypeError, "policy rule logcumsumexp: .*nearest: log"),
        ({torch.ops.aten.gelu: None}, TypeError, "policy rule gelu: .*nearest: .*gelu"),
        ({operator.matmul: None}, TypeError, "policy rule matmul: .*nearest: matmul"),
        ({Tensor.view: None}, TypeError, "policy rule view: no quantizer"),
        ({F.avg_pool2d: StochBackward2bit}, TypeError, "policy rule avg_pool2d: no quantizer"),
        ({(F.gelu, nn.GELU): None}, TypeError, "accepted keys"),
        ({F.gelu: 3}, TypeError, "policy rule gelu: got 3"),
        ({"*": None, F.gelu: StochBackward2bit}, ValueError, "gelu applies nowhere: .*put it before them"),
        (
            {torch.bmm: None, Tensor.matmul: StochBackward2bit, "*": StochBackward2bit},
            ValueError,
            "matmul applies nowhere: .*the same op",
        ),
        ({lambda name, module: False: StochBackward2bit}, ValueError, "<lambda> matches no module of Net"),
        (brevact.Policy({nn.LayerNorm: None, nn.RMSNorm: None}), ValueError, "LayerNorm matches no module of Net"),
        ({"head": None, **brevact.DEFAULT.rules}, ValueError, r"is_separable matches no module.*DEFAULT\.let\("),
        (brevact.DEFAULT.let({"haed": None}), ValueError, r"'haed' matches no module of Net; nearest names: head"),
        (brevact.DEFAULT.let({"haed": None}).let({"head": None}), ValueError, "'haed' matches no module of Net"),
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


@pytest.mark.parametrize(("policy", "ratio"), [(brevact.DEFAULT, 8), (brevact.LosslessBackward, 1)])
def test_a_lazy_model_takes_a_policy_before_its_first_batch(policy, ratio):
    model = nn.Sequential(nn.LazyConv2d(16, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    brevact.quantize_backward(model, policy)
    x = torch.randn(8, 3, 16, 16)
    with brevact.backward_quant(model):
        model(x).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    report = brevact.memory_report(model, x)
    assert ratio * report.saved_bytes <= report.plain_bytes
    assert not any(row.settings for row in brevact.backward_policy(brevact.restore_backward(model)).rows)
