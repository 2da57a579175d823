"""Modules of a model with a policy that are called by themselves, and blocks that run by a model's policy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import brevact
import brevact.nn as bnn
from brevact import NearestBackward4bit, StochBackward2bit, StochBackward4bit, StochBackward8bit
from brevact.autograd import current_region
from brevact.autograd.region.module_hooks import inherited_region, regions_of
from brevact.policy.attach import attachment_of
from tests.autograd.measuring import watch_saved


class Vae(nn.Module):
    """An encoder and a decoder, whose parts no rule of `DEFAULT` matches, and methods beside `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 16, 3, padding=1))
        self.decoder = nn.ModuleList([nn.Conv2d(16, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1)])

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def decode(self, z: Tensor) -> Tensor:
        for each in self.decoder:
            z = each(z)
        return z

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def parts(self, x: Tensor):
        z = self.encode(x)
        yield z
        yield self.decode(z)


POLICIES = {
    "default": brevact.DEFAULT,
    "all": StochBackward2bit,
    "root": {"": StochBackward4bit},
    "rules": {nn.GELU: StochBackward8bit, F.cross_entropy: None, "encoder.0": None, "*": StochBackward4bit},
}


def images() -> Tensor:
    return torch.randn(8, 3, 32, 32)


def saved_by(run: Callable[[], object]) -> int:
    """Bytes that a run saves for backward; parameters count for nothing, as they are there anyway."""
    with watch_saved() as saved:
        result = run()
    del result
    return sum(
        {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
            for x in saved.tensors
            if x.dtype is torch.uint8 or x.numel() >= 4096
        }.values()
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_parts_and_methods_of_a_model_pack_as_its_forward_does(policy):
    model, x = Vae(), images()
    z = torch.randn(8, 16, 32, 32)
    calls = {
        "encode": lambda: model.encode(x),
        "decode": lambda: model.decode(z),
        "encoder": lambda: model.encoder(x),
        "layer": lambda: model.encoder[2](z),
        "forward": lambda: model.forward(x),
        "generator": lambda: list(model.parts(x)),
    }
    torch.manual_seed(0)
    outputs = {name: call() for name, call in calls.items()}
    plain = {name: saved_by(call) for name, call in calls.items()}
    brevact.quantize_backward(model, POLICIES[policy])
    for name, call in calls.items():
        torch.testing.assert_close(call(), outputs[name], rtol=0, atol=0)
        assert current_region() is None
        # 8 bits at most, but for the input of `encoder.0`, which one of the policies keeps; 10 % are metadata
        kept = 4 * x.numel() if policy == "rules" and name not in ("decode", "layer") else 0
        assert saved_by(call) < kept + 1.1 * plain[name] / 4, name
    brevact.restore_backward(model)
    assert {name: saved_by(call) for name, call in calls.items()} == plain
    assert not any(each._forward_pre_hooks or each._forward_hooks for each in model.modules())


def test_gradients_of_a_part_called_alone_are_those_inside_the_model():
    part = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 16, 3, padding=1))
    model = brevact.quantize_backward(nn.Sequential(part), {"": NearestBackward4bit})
    x, gradients = images(), []
    for call in (model, part):
        part.zero_grad()
        call(x).square().sum().backward()
        gradients.append([p.grad for p in part.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_modules_without_a_rule_run_as_the_module_around_them():
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.GELU()), nn.Sequential(nn.Linear(64, 64), nn.GELU()))
    brevact.quantize_backward(model, {"0": None, nn.GELU: StochBackward8bit, "": StochBackward2bit})
    assert inherited_region(model[0][0]) is None and regions_of(model[0][0])[0].settings is None  # by its name
    assert inherited_region(model[1][0]).settings.quantizer.bit_width == 2
    assert inherited_region(model[1]).settings is regions_of(model)[0].settings
    x = torch.randn(256, 64)
    with watch_saved() as saved:
        model[0](x)
    assert saved.holds(x)  # full precision, by itself too
    with watch_saved() as saved:
        model[1](x)
    assert not saved.holds(x)


def test_a_head_that_trains_packs_in_a_model_in_eval_mode():
    model, x = Vae().eval().requires_grad_(False), images()
    model.encoder.train().requires_grad_(True)
    plain = saved_by(lambda: model(x))
    brevact.quantize_backward(model)
    with watch_saved() as saved:
        model.encoder(x)
    assert not saved.holds(x)
    assert saved_by(lambda: model(x)) < plain
    model.eval()
    assert saved_by(lambda: model(x)) == plain  # no part of it is in training mode


def test_parts_pack_inside_a_region_that_is_not_of_the_model():
    model = brevact.quantize_backward(Vae(), {"": StochBackward4bit})
    x = images()
    with brevact.backward_quant(None), watch_saved() as saved:
        model.encode(x)
    assert not saved.holds(x)

    class Own(Vae):
        def encode(self, x: Tensor) -> Tensor:
            with brevact.backward_quant(None):  # in the code of the model, which decides
                return self.encoder(x)

    model = brevact.quantize_backward(Own(), {"": StochBackward4bit})
    with watch_saved() as saved:
        model(x)
    assert saved.holds(x)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_parts_in_a_checkpoint_recompute_what_they_stored(use_reentrant):
    model = brevact.quantize_backward(Vae(), {"": NearestBackward4bit})
    x, gradients = images().requires_grad_(), []
    for run in (model.encoder, lambda x: checkpoint(model.encoder, x, use_reentrant=use_reentrant)):
        model.zero_grad()
        run(x).square().sum().backward()
        gradients.append([p.grad for p in model.encoder.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_parts_of_copies_pack_by_themselves():
    model = brevact.quantize_backward(Vae())
    x = images()
    expected = saved_by(lambda: model.encode(x))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert saved_by(lambda twin=twin: twin.encode(x)) == expected
        assert attachment_of(twin) is not attachment_of(model)
        assert inherited_region(twin.encoder).around is regions_of(twin)[0]
        brevact.restore_backward(twin)
        assert not any(each._forward_pre_hooks or each._forward_hooks for each in twin.modules())
    part = copy.deepcopy(model.encoder)
    assert saved_by(lambda: part(x)) == expected
    with pytest.raises(ValueError, match="already has a backward policy"):
        brevact.quantize_backward(part)
    assert [row.source for row in brevact.backward_policy(part).rows] == ["DitherBackward4bit"] * 4
    assert str(brevact.backward_policy(part)).count("\n") == 3
    assert saved_by(lambda: brevact.restore_backward(part)(x)) > 4 * expected


def test_layers_with_a_quantizer_of_their_own_keep_it_when_called_alone():
    layer = bnn.SiLU(act_quant=StochBackward8bit)
    model = brevact.quantize_backward(nn.Sequential(nn.Sequential(layer)), {"": StochBackward2bit})
    assert inherited_region(layer) is None and inherited_region(model[0]) is not None
    assert [hook.origin for hook in regions_of(layer)] == ["layer"]


class TestStep:
    @pytest.mark.parametrize("policy", POLICIES)
    def test_functions_outside_of_modules_get_what_the_model_gets(self, policy):
        model, x, labels = Vae(), images(), torch.randint(1024, (24,))

        def step() -> Tensor:
            out = model.decode(model.encode(x))
            return F.cross_entropy(out.view(24, 1024), labels) + out.exp().sum()

        plain_loss, plain = step(), saved_by(step)
        without = saved_by(lambda: step() if policy else None)
        brevact.quantize_backward(model, POLICIES[policy])
        region = brevact.backward_quant(model)
        with region:
            assert torch.equal(step(), plain_loss)
        assert current_region() is None
        kept = {"rules": 8 * x.numel()}.get(policy, 0)  # input of `encoder.0`, probabilities of the loss
        assert saved_by(region(step)) < kept + 1.1 * plain / 4
        assert saved_by(step) > 4 * x.numel()  # the loss lies outside
        assert without == plain

    def test_modules_keep_their_own_rules_inside(self):
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
        brevact.quantize_backward(model, {nn.GELU: StochBackward8bit, "": StochBackward2bit})
        widths = []
        for module in model:
            module.register_forward_pre_hook(lambda *_: widths.append(current_region().settings.quantizer.bit_width))
        with brevact.backward_quant(model):
            model(torch.randn(256, 64))
            model[0](torch.randn(256, 64))
        assert widths == [2, 8, 2]

    def test_code_outside_keeps_full_precision_where_no_rule_is_for_the_model(self):
        model = brevact.quantize_backward(Vae(), {"encoder": StochBackward2bit})
        x, y = images(), torch.randn(64, 64, requires_grad=True)
        with brevact.backward_quant(model), watch_saved() as saved:
            model(x)
            y.square()
        assert saved.holds(y) and not saved.holds(x)

    def test_wrappers_and_parts_run_by_the_policy_of_the_model(self):
        model = brevact.quantize_backward(Vae(), {"": StochBackward4bit})
        for each in (model, model.encoder, nn.Sequential(model), nn.Sequential(nn.Sequential(model), nn.ReLU())):
            with brevact.backward_quant(each):
                assert current_region().outer_settings is regions_of(model)[0].settings

    def test_code_around_models_of_different_policies_keeps_full_precision(self):
        both = nn.ModuleDict({name: nn.Linear(8, 8) for name in "ab"})
        for name, source in (("a", StochBackward2bit), ("b", StochBackward4bit)):
            brevact.quantize_backward(both[name], source)
        with brevact.backward_quant(both):
            assert current_region().outer_settings is None
        brevact.restore_backward(both.b)
        brevact.quantize_backward(both.b, StochBackward2bit)
        with brevact.backward_quant(both):
            assert current_region().settings.quantizer.bit_width == 2

    def test_it_reads_the_policy_when_it_is_entered(self):
        model = brevact.quantize_backward(nn.Linear(8, 8), StochBackward2bit)
        region = brevact.backward_quant(model)
        brevact.quantize_backward(brevact.restore_backward(model), StochBackward4bit)
        with region:
            assert current_region().settings.quantizer.bit_width == 4
        brevact.restore_backward(model)
        with pytest.raises(ValueError, match="a model without a backward policy"), region:
            pass

    def test_it_packs_in_eval_mode_but_not_without_gradients(self):
        model, x = brevact.quantize_backward(Vae()).eval(), images()
        with watch_saved() as saved, brevact.backward_quant(model):
            model(x)
        assert any(t.dtype is torch.uint8 for t in saved.tensors)
        with watch_saved() as saved, brevact.backward_quant(model), torch.no_grad():
            model(x)
        assert not saved.tensors

    def test_a_model_without_policy_and_overrides_are_refused(self):
        with pytest.raises(ValueError, match=r"source: got <Vae module>.* brevact\.quantize_backward\(model\) gives"):
            brevact.backward_quant(Vae())
        with pytest.raises(TypeError, match="bit_width: overrides go with a single quantizer"):
            brevact.backward_quant(brevact.quantize_backward(Vae()), bit_width=4)

    def test_a_slot_is_a_quantizer_and_a_model_may_have_the_attributes_of_one(self):
        layer = bnn.SiLU(act_quant=StochBackward8bit)
        with brevact.backward_quant(layer.act_quant):
            assert current_region().settings.quantizer.bit_width == 8
        model = Vae()
        model.quantize = nn.Linear(8, 8)  # as a VQ-VAE has
        with brevact.backward_quant(brevact.quantize_backward(model, StochBackward4bit)):
            assert current_region().settings.quantizer.bit_width == 4
