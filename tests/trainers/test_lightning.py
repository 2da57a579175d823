"""Backward quantization in ``lightning.Trainer``."""

from __future__ import annotations

import copy
import doctest
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import brevact

pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]


class Run:
    """Runs of one module, imported when a test runs."""

    def __init__(self, folder):
        import lightning

        self.folder, self.lightning = folder, lightning
        generator = torch.Generator().manual_seed(0)
        self.data = TensorDataset(
            torch.randn(1024, 64, generator=generator), torch.randint(64, (1024,), generator=generator)
        )

        class Net(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.body = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.SiLU(), nn.Linear(64, 64))

            def forward(self, x):
                return self.body(x)

            def training_step(self, batch, batch_idx):
                loss = F.cross_entropy(self(batch[0]), batch[1])
                self.log("loss", loss)
                self.node = type(loss.grad_fn).__name__
                return loss

            def validation_step(self, batch, batch_idx):
                self.log("val", F.cross_entropy(self(batch[0]), batch[1]))

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=1e-2)

        self.net = Net

    def __call__(self, *callbacks, steps=4, ckpt_path=None, net=None, **options):
        self.lightning.seed_everything(0, verbose=False)
        model = (net or self.net)()
        train, val = DataLoader(self.data, 128, shuffle=True), DataLoader(self.data, 512)
        switched_off = dict.fromkeys(
            ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
        )
        trainer = self.lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            callbacks=list(callbacks),
            default_root_dir=self.folder,
            **switched_off | options,
        )
        trainer.fit(model, train, val, ckpt_path=ckpt_path)
        return model, trainer


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


@pytest.fixture
def callback(run):
    from brevact.trainers import LightningCallback

    return LightningCallback


def equal(one, other):
    return all(torch.equal(x, y) for x, y in zip(one.parameters(), other.parameters(), strict=True))


def test_examples_run(callback):
    import brevact.trainers.lightning as module

    assert doctest.testmod(module).failed == 0 < doctest.testmod(module).attempted


def test_full_precision_trains_as_without_a_callback(run, callback):
    plain, trainer = run()
    measured, with_callback = run(callback("none"))
    assert equal(plain, measured)
    assert with_callback.callback_metrics["loss"] == trainer.callback_metrics["loss"]


def test_resumed_run_has_the_policy_and_the_widths_of_the_checkpoint(run, callback):
    first, second = callback("4x", adapt_every=1), callback("4x", adapt_every=1)
    _, trainer = run(first, steps=3)
    trainer.save_checkpoint(run.folder / "half.ckpt")
    seen = {}

    class Look(run.lightning.Callback):
        def on_train_start(self, trainer, module):
            seen.update(second.policy.state_dict())

    run(second, Look(), steps=4, ckpt_path=run.folder / "half.ckpt")
    saved = torch.load(run.folder / "half.ckpt", weights_only=True)["callbacks"]["LightningCallback"]
    assert seen == saved and saved["steps"] == 3 and saved["rules"] == first.policy.fitted.to_json()


@pytest.mark.parametrize("options", [{"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}], ids=str)
def test_default_trains_with_options_of_the_trainer(run, callback, options):
    used = callback("default", adapt_every=2)
    counted = []

    class Count(run.lightning.Callback):
        def on_train_batch_end(self, *args):
            counted.append(used.policy.state_dict()["steps"])

    _, trainer = run(used, Count(), steps=2, **options)
    assert counted == ([0, 1, 1, 2] if "accumulate_grad_batches" in options else [1, 2])
    assert trainer.callback_metrics["brevact/plain_mib"] > 3 * trainer.callback_metrics["brevact/saved_mib"]


@pytest.mark.parametrize("kind", ["no batch_idx", "decorated", "iterator", "before transfer", "float64", "bfloat16"])
def test_batches_are_those_of_the_loop(run, callback, kind):
    """Batches of measurements and of steps, for each form of `training_step` and each precision."""

    class Net(run.net):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return {"x": batch[0], "y": batch[1]} if kind == "before transfer" else batch

        def validation_step(self, batch, batch_idx):
            pass

    def step(module, batch, *args):
        x, y = (batch["x"], batch["y"]) if kind == "before transfer" else batch
        return F.cross_entropy(module(x), y)

    @functools.wraps(step)
    def decorated(*args):
        assert len(args) == 3
        return step(*args)

    steps = {
        "no batch_idx": lambda self, batch: step(self, batch),
        "decorated": decorated,
        "iterator": lambda self, dataloader_iter: step(self, next(dataloader_iter)[0]),
    }
    Net.training_step = steps.get(kind, lambda self, batch, batch_idx: step(self, batch))
    options = {"precision": {"float64": "64-true", "bfloat16": "bf16-true"}.get(kind, "32-true")}
    _, trainer = run(callback("default"), steps=2, net=Net, **options)
    assert trainer.callback_metrics["brevact/plain_mib"] > 3 * trainer.callback_metrics["brevact/saved_mib"] > 0


def test_manual_optimization_wants_a_loss_and_takes_one(run, callback):
    class Net(run.net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.optimizers().zero_grad()
            self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
            self.optimizers().step()

    with pytest.raises(ValueError, match=r"\(manual optimization\?\); pass loss="):
        run(callback("default"), steps=1, net=Net)
    used = callback("default", loss=lambda module, batch: F.cross_entropy(module(batch[0]), batch[1]))
    _, trainer = run(used, steps=1, net=Net)
    assert trainer.callback_metrics["brevact/plain_mib"] > 3 * trainer.callback_metrics["brevact/saved_mib"]


def test_a_step_that_asks_for_its_trainer_is_not_measured(run, callback):
    class Net(run.net):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1]) / self.trainer.num_training_batches

    with pytest.raises(ValueError, match=r"loss: training_step asks for its trainer.* or memory=False"):
        run(callback("default"), steps=1, net=Net)
    run(callback("default", memory=False), steps=1, net=Net)


def test_copies_of_the_module_train_themselves(run, callback):
    """Callbacks that average weights make such copies during training."""

    class Copy(run.lightning.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            copied = copy.deepcopy(module)
            assert copied.training_step.__self__ is copied

    run(callback("default", memory=False), Copy(), steps=1)


def test_a_run_that_fails_leaves_the_module_as_it_was(run, callback):
    class Stop(Exception):
        pass

    class Interrupting(run.lightning.Callback):
        def on_train_batch_end(self, *args):
            raise Stop

    model = run.net()
    with pytest.raises(Stop):
        run(callback("default"), Interrupting(), net=lambda: model)
    assert {row.settings for row in brevact.backward_policy(model).rows} == {None}
    with pytest.raises(RuntimeError, match="more than one stateful callback"):  # the trainer's own words
        run(callback("default"), callback("default"), net=lambda: model)
