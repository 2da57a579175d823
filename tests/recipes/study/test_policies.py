"""Policies of runs, by the words of their rows."""

import pytest
import torch

import brevact
from recipes.efficientnetv2 import RECIPE
from recipes.errors import RecipeError
from recipes.images import make_batches
from recipes.runs import build_objective
from recipes.study.policies import attach
from recipes.training import Trainer


@pytest.fixture
def attached(tiny_settings, tiny_data):
    """The trainer that a policy is attached to, and the schedule of its mixture."""

    def attached(words):
        device = torch.device("cpu")
        batches = make_batches(tiny_settings, tiny_data, device)[0]
        trainer = Trainer(build_objective(RECIPE, tiny_settings, tiny_data), tiny_settings, device, len(batches))
        return trainer, batches, attach(words, trainer, batches, steps=4)

    return attached


def saved(trainer, batches):
    return brevact.memory_report(trainer.objective, next(batches.epoch())).saved_bytes


@pytest.mark.exhaustive
def test_attach_fits_to_the_bytes_of_another_policy(attached):
    fitted, default = (saved(*attached(words)[:2]) for words in ("fit:bytes=DEFAULT", "DEFAULT"))
    assert 0.9 * default < fitted <= default


@pytest.mark.exhaustive
def test_attach_moves_widths_at_the_bytes_of_the_policy(attached):
    trainer, batches, _ = attached("StochBackward4bit@adaptive:1")
    trainer.train_epoch(batches, 1, lambda: None)
    assert len(set(trainer.adaptive.bit_widths.values())) > 1
    assert saved(trainer, batches) <= saved(*attached("StochBackward4bit")[:2])


def test_attach_follows_a_schedule_of_the_mixture(attached):
    trainer, _, schedule = attached("StochBackward2bit4bitMix@linear:0.8:0.2")
    found = []
    for _ in range(5):
        found.append({row.settings.quantizer.probability for row in brevact.backward_policy(trainer.model).rows})
        schedule.step()
    assert found == [{0.8}, {0.65}, {0.5}, {0.35}, {0.2}]


def test_attach_gives_a_stage_a_policy_of_its_own(attached):
    model = attached("None+blocks.1*=NearestBackward4bit")[0].model
    rows = brevact.backward_policy(model).rows
    quantized = {row.module for row in rows if row.settings}
    assert quantized == {row.module for row in rows if row.module.startswith("blocks.1")} != set()


@pytest.mark.parametrize(
    "words", ["Stoch", "fit:3", "DEFAULT@adaptive:", "DEFAULT@linear:1:0", "StochBackward2bit4bitMix@line:1:0"]
)
def test_attach_names_the_policy_that_it_refuses(attached, words):
    with pytest.raises(RecipeError, match=f"policy {words}: "):
        attached(words)
