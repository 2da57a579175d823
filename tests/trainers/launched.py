"""Two processes of a CPU that Accelerate launches, by test_accelerate.py: python -m tests.trainers.launched FOLDER"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, debug_launcher
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import brevact
from brevact.trainers import TrainingPolicy


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


def main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(3)
    inner = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
    data = TensorDataset(torch.randn(1024, 64))
    model, optimizer, loader = accelerator.prepare(
        inner, torch.optim.SGD(inner.parameters(), lr=0.1), DataLoader(data, 128, shuffle=True)
    )
    policy = TrainingPolicy("StochBackward4bit", adapt_every=1)
    policy.begin(accelerator.unwrap_model(model), loader, loss)
    accelerator.register_for_checkpointing(policy)
    for batch in loader:
        with accelerator.accumulate(model):
            with brevact.backward_quant(model):
                value = loss(model, batch)
            accelerator.backward(value)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                policy.step()
    accelerator.save_state(str(folder / "state"))
    before = policy.state_dict()
    policy.step()
    accelerator.load_state(str(folder / "state"))
    found = {
        "processes": accelerator.num_processes,
        "state": policy.state_dict(),
        "is_restored": policy.state_dict() == before,
        "weights": [x.double().sum().item() for x in inner.parameters()],
        "figures": policy.figures(),
        "keys": [*inner.state_dict()],
    }
    policy.end()
    found["left"] = sum(row.settings is not None for row in brevact.backward_policy(inner).rows)
    (folder / f"{accelerator.process_index}.json").write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    debug_launcher(main, (Path(sys.argv[1]),), num_processes=2)
