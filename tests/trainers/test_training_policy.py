"""A policy over a training run, in a loop of one's own."""

import copy
import functools
import gc
import json
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

import brevact
from brevact.policy.rules import has_policy
from brevact.trainers import TrainingPolicy
from brevact.trainers.training_policy import first_batches

BATCHES = torch.randn(4, 128, 64, generator=torch.Generator().manual_seed(0)).unbind()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))


def loss(model, batch):
    return model(batch).square().mean()


def trained(policy, model, batches, start=None):
    if start is None:
        policy.begin(model, BATCHES, loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        policy.step()
    return model


def test_training_policy_goes_on_from_its_state():
    """The state is JSON: a policy that is fitted, widths and steps; random numbers are those of the whole run."""

    def made():
        return TrainingPolicy("4x", adapt_every=2)

    torch.manual_seed(1)
    whole, policy = trained(made(), net(), BATCHES), None
    torch.manual_seed(1)
    policy = made()
    half = trained(policy, net(), BATCHES[:2])
    state, random_state = json.loads(json.dumps(policy.state_dict())), torch.get_rng_state()
    weights = {name: x.clone() for name, x in half.state_dict().items()}
    for begins_first in (False, True):
        policy, model = made(), net()
        if begins_first:
            policy.begin(model, BATCHES, loss)
        policy.load_state_dict(state)
        if not begins_first:
            policy.begin(model, BATCHES, loss)
        assert policy.fitted.report is not None and policy.adaptive.state_dict()["steps"] == 2
        model.load_state_dict(weights)
        torch.set_rng_state(random_state)
        trained(policy, model, BATCHES[2:], start=2)
        for one, other in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert policy.figures()["brevact/noise"] == policy.fitted.report.noise


def test_figures_have_bytes_of_models_that_are_compiled_at_the_beginning():
    for model, compiled in ((net(), True), (torch.compile(net(), backend="aot_eager"), False)):
        policy = TrainingPolicy("StochBackward4bit", adapt_every=1)
        policy.begin(model, BATCHES, loss, compiled=compiled)
        assert policy.figures().keys() == {"brevact/bit_width"}
        policy.end()
    policy = TrainingPolicy("StochBackward4bit")
    policy.begin(model, [BATCHES[0].clone()], loss)
    assert policy.memory.saved_bytes == brevact.memory_report(model, BATCHES[0], loss).saved_bytes
    assert "uncompiled" in policy.memory.note and policy.figures()["brevact/saved_mib"] > 0


def test_training_policy_leaves_random_numbers_and_loaders_as_they_were():
    data = torch.arange(512.0)[:, None].expand(-1, 64)
    loader = DataLoader(data, 128, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(5)))
    expected = [batch[:, 0].tolist() for batch in first_batches(loader, 2)]
    policy, model = TrainingPolicy("StochBackward4bit", adapt_every=1), net()
    state = torch.get_rng_state()
    policy.begin(model, loader, loss)
    policy.step()
    assert torch.equal(torch.get_rng_state(), state)
    assert [batch[:, 0].tolist() for batch in loader][:2] == expected
    policy.end()
    assert {row.settings for row in brevact.backward_policy(model).rows} == {None}


def test_training_policy_warns_of_a_state_of_another_policy():
    policy = TrainingPolicy("StochBackward2bit", memory=False)
    with pytest.warns(
        UserWarning, match="the checkpoint's policy is 'default', that of this run 'StochBackward2bit'"
    ) as found:
        policy.load_state_dict(TrainingPolicy("default").state_dict())
    assert [each.filename for each in found] == [__file__]
    with pytest.raises(ValueError, match=r"state: got the keys \['steps'\]; accepted are"):
        policy.load_state_dict({"steps": 3})
    with pytest.raises(TypeError, match="state: got None"):
        policy.load_state_dict(None)
    for part, error, message in (
        ({"steps": "3"}, TypeError, "state: steps: got '3' of type str; accepted is an int"),
        ({"steps": -1}, ValueError, "state: steps: got -1"),
        ({"noise_count": None}, TypeError, "state: noise_count: got None of type NoneType; accepted is an int"),
        ({"rules": {}}, TypeError, "text: got {} of type dict"),
    ):
        with pytest.raises(error, match=message):
            policy.load_state_dict(policy.state_dict() | part)


def test_a_state_that_does_not_fit_ends_the_run_and_one_that_is_none_leaves_it():
    policy, model = TrainingPolicy("4x", memory=False), net()
    policy.begin(model, BATCHES, loss)
    state = policy.state_dict()
    with pytest.raises(ValueError, match="text holds no policy"):
        policy.load_state_dict(state | {"rules": "{}"})
    assert has_policy(model)
    other = brevact.Policy({"": brevact.StochBackward2bit}, layers={"other": "Linear"}).to_json()
    with pytest.raises(ValueError, match="it was fitted for another model"):
        policy.load_state_dict(state | {"rules": other})
    assert not has_policy(model)
    with pytest.raises(ValueError, match="the run has not begun"):
        policy.step()


def test_weights_that_zero_3_gathers_are_not_measured():
    model = net()
    next(model.parameters()).ds_id = 0  # as DeepSpeed marks them
    policy = TrainingPolicy("default")
    with pytest.warns(UserWarning, match=r"ZeRO-3 no longer gathers .* logs have no bytes"):
        policy.begin(model, BATCHES, loss)
    policy.step()
    assert has_policy(model) and policy.figures() == {}
    policy.end()
    for options in ({"policy": "3x"}, {"adapt_every": 2}):
        with pytest.raises(ValueError, match=r"ZeRO-3 no longer gathers .*; fit in a run without it, and pass"):
            TrainingPolicy(**options).begin(model, BATCHES, loss)
        assert not has_policy(model)


def test_begin_says_that_widths_cannot_keep_so_few_bytes():
    with pytest.raises(ValueError, match=r"adapt_every=2, at the bytes that .* or pass a policy of more bits"):
        TrainingPolicy("StochBackward1bit", adapt_every=2).begin(net(), BATCHES, loss)


def test_begin_refuses_what_is_no_batches_and_no_loss():
    for arguments, message in (((3, loss), "batches: got 3 of type int"), ((BATCHES, 3), "loss: got 3 of type int")):
        with pytest.raises(TypeError, match=message):
            TrainingPolicy("default").begin(net(), *arguments)


def test_an_interrupted_run_keeps_no_model_alive_and_an_ended_one_no_loss():
    model = net()
    TrainingPolicy("default").begin(model, BATCHES, loss)  # and nothing ends it
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    of_run = functools.partial(loss)
    gone, policy = weakref.ref(of_run), TrainingPolicy("default")
    policy.begin(net(), BATCHES, of_run)
    policy.end()
    del of_run
    gc.collect()
    assert gone() is None and policy.figures()


def test_state_of_rules_by_functions_is_the_same_in_another_process():
    """Where it has the address of a function, the state of a checkpoint would be left aside."""
    text = TrainingPolicy(brevact.Policy({lambda name, module: True: brevact.StochBackward2bit})).spec.text
    assert "<lambda>" in text and "0x" not in text


def test_begin_prepares_batches_as_the_loop_does():
    policy = TrainingPolicy("default")
    policy.begin(net(), [x.tolist() for x in BATCHES], loss, prepare=torch.tensor)
    assert policy.memory.plain_bytes > policy.memory.saved_bytes > 0
    policy.end()


def test_training_policy_leaves_the_model_alone_where_it_cannot_begin():
    model = net()
    for options, message in (
        ({"policy": "4x"}, "policy '4x': measured on batches with a loss, of which there are none"),
        ({"adapt_every": 2}, "adapt_every: measured on batches"),
        ({"policy": None}, "policy=None is the policy that the model has, and it has none"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainingPolicy(**options).begin(model)
        assert {row.settings for row in brevact.backward_policy(model).rows} == {None}
    first = TrainingPolicy("default")
    first.begin(model)
    with pytest.raises(ValueError, match="another training policy is at work on it"):
        TrainingPolicy("default").begin(model)
    first.begin(model)  # again, as after an interrupt
    brevact.restore_backward(model)
    TrainingPolicy("default").begin(model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"policy": "defualt"}, ValueError, "nearest: DEFAULT"),
        ({"policy": 3}, TypeError, "got 3 of type int, which is no backward quantizer"),
        ({"policy": {}}, ValueError, "got no rules"),
        ({"adapt_every": 0}, ValueError, "adapt_every: got 0; accepted is an int of at least 1"),
        ({"adapt_every": 0.5}, TypeError, r"adapt_every: got 0\.5"),
        ({"memory": "yes"}, TypeError, "memory: got 'yes'; accepted are True and False"),
    ],
)
def test_training_policy_refuses(options, error, message):
    with pytest.raises(error, match=message):
        TrainingPolicy(**options)


def test_a_loaded_state_stays_until_a_run_goes_on_from_it():
    def broken():
        raise OSError("the loader is not ready")
        yield

    policy, model = TrainingPolicy("4x", adapt_every=2), net()
    policy.begin(model, BATCHES, loss)
    policy.step()
    state = policy.state_dict()
    policy.end()
    policy = TrainingPolicy("4x", adapt_every=2)
    policy.load_state_dict(state)
    assert policy.state_dict() == state  # of a checkpoint that is written before the run goes on
    with pytest.raises(OSError, match="the loader is not ready"):
        policy.begin(net(), broken(), loss)
    assert policy.state_dict() == state
    policy.begin(net(), BATCHES, loss)
    assert policy.state_dict() == state
    policy.step()
    assert policy.state_dict()["steps"] == 2


def test_a_copy_of_a_policy_leaves_the_model_alone():
    policy, model = TrainingPolicy("StochBackward4bit"), net()
    policy.begin(model, BATCHES, loss)
    twin = copy.deepcopy(policy)
    twin.end()
    assert has_policy(model)
    policy.end()
    assert not has_policy(model)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"sensitivities": [float("nan"), 1.0, 1.0]}, "sensitivities: got nan; accepted is a number of at least 0"),
        ({"sensitivities": [-1.0, 1.0, 1.0]}, r"sensitivities: got -1\.0; accepted is a number of at least 0"),
        ({"bit_widths": [2.7, 2, 2]}, r"bit_widths: got 2\.7 of type float; accepted is an int"),
        ({"bit_widths": ["a", 2, 2]}, "bit_widths: got 'a' of type str; accepted is an int"),
        ({"steps": "a"}, "steps: got 'a' of type str; accepted is an int"),
    ],
)
def test_adaptive_refuses_a_state_of_other_numbers(part, message):
    policy = TrainingPolicy("StochBackward4bit", adapt_every=1)
    policy.begin(net(), BATCHES, loss)
    adaptive = policy.adaptive
    with pytest.raises((TypeError, ValueError), match=message):
        adaptive.load_state_dict(adaptive.state_dict() | part)


def test_step_refuses_a_run_that_has_not_begun():
    with pytest.raises(ValueError, match="the run has not begun; call begin"):
        TrainingPolicy("default").step()
