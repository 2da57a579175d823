"""One of two processes whose model is sharded, under the Hugging Face callback, by test_sharded.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import brevact
from brevact import trainers
from tests.ranks import WORLD, join
from tests.trainers.running import gpt2, texts, transformers

STEPS = 3


def sharded() -> Any:
    model = gpt2(dropout=0.0)
    for part in (*model.transformer.h, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (WORLD,)))
    return model


def trained(policy: str | None, rank: int, folder: Path) -> dict[str, Any]:
    """Losses and weights of a loop, as `Trainer` calls its callbacks; Accelerate shards nothing on a CPU."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    rows = [{name: x[None] for name, x in row.items()} for row in texts(2 * WORLD)[rank::WORLD]]
    callbacks = [] if policy is None else [trainers.HuggingFaceCallback(policy)]
    called = transformers.trainer_callback
    calls = called.CallbackHandler(callbacks, model, None, optimizer, None)
    calls.train_dataloader = rows
    args = transformers.TrainingArguments(str(folder), use_cpu=True, max_steps=STEPS, report_to=[], disable_tqdm=True)
    state, control = called.TrainerState(max_steps=STEPS), called.TrainerControl()
    losses, logs = [], {}
    try:
        calls.on_train_begin(args, state, control)
    except ValueError as error:
        return {"error": str(error)}
    for step in range(STEPS):
        loss = model(**rows[step % len(rows)]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.global_step += 1
        calls.on_step_end(args, state, control)
        losses.append(loss.detach())
        state.log_history.append(logs := {"loss": float(loss)})
        calls.on_log(args, state, control, logs)
    calls.on_train_end(args, state, control)
    left = [row for row in brevact.backward_policy(model).rows if row.settings is not None]
    weights = [each.full_tensor() for each in nn.Module.parameters(model)]
    return {"losses": losses, "weights": weights, "logs": logs, "left": len(left)}


def main(rank: int, folder: Path) -> None:
    join(rank, folder)
    policies = (None, "none", "default", "3x")
    torch.save({policy: trained(policy, rank, folder) for policy in policies}, folder / f"{rank}.pt")
    distributed.destroy_process_group()
