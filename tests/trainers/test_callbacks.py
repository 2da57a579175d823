"""One run with each callback, where its library is installed; further tests of callbacks are exhaustive."""

import pytest
import torch

import brevact


def test_hugging_face_default_stores_less_and_leaves_the_model_as_it_was(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from brevact.trainers import HuggingFaceCallback
    from tests.trainers import running

    class Look(running.transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append("brevact/saved_mib" in logs)

    seen, plain = [], running.trained(tmp_path / "plain")
    trainer = running.trained(tmp_path, Look(), [HuggingFaceCallback("default")])
    assert seen == [True, True, False]  # callbacks that stand before it, too; the last log has no loss
    assert running.losses(trainer)[0] == running.losses(plain)[0]  # the forward pass is unchanged
    assert not running.same_weights(trainer.model, plain.model)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert all(row["brevact/plain_mib"] > 6 * row["brevact/saved_mib"] > 0 for row in rows)
    assert {row.settings for row in brevact.backward_policy(trainer.model).rows} == {None}


@pytest.mark.filterwarnings("ignore")
def test_lightning_default_covers_the_loss_and_leaves_the_module_as_it_was(tmp_path):
    pytest.importorskip("lightning")
    from brevact.trainers import LightningCallback
    from tests.trainers.test_lightning import Run

    model, trainer = Run(tmp_path)(LightningCallback("default"), val_check_interval=2)
    figures = trainer.callback_metrics
    assert figures["brevact/plain_mib"] > 5 * figures["brevact/saved_mib"] > 0
    assert model.node != "NllLossBackward0"  # the loss, which is outside of `forward`, has packed probabilities
    assert {row.settings for row in brevact.backward_policy(model).rows} == {None}
    assert "training_step" not in vars(model) and "val" in figures
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    keys = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"].keys()
    assert keys == {"body.0.weight", "body.0.bias", "body.3.weight", "body.3.bias"}
