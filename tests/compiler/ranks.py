"""One of two processes that train a compiled model; `tests.ranks.run_ranks` calls `main`, which writes a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import brevact
from tests.ranks import WORLD, join

POLICIES = {"plain": None, "lossless": brevact.LosslessBackward, "packed": brevact.StochBackward4bit}
BATCH = torch.randn(WORLD * 256, 64, generator=torch.Generator().manual_seed(3))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(self.norm(x))))


def net(policy: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    return model if policy is None else brevact.quantize_backward(model, policy)


def sharded(model: nn.Sequential) -> nn.Sequential:
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (WORLD,)))
    return model


def in_place(model: nn.Sequential) -> nn.Sequential:
    for block in model:
        block.compile(backend="aot_eager")
    return model


def wrapped(model: nn.Sequential) -> nn.Sequential:
    for place in range(3):
        model[place] = torch.compile(model[place], backend="aot_eager")
    return model


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


def in_parallel(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=1.01)  # a bucket starts with at least 1 MiB, and then is full


WAYS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "blocks of fsdp, compiled first": lambda model: sharded(in_place(model)),
    "blocks of fsdp": lambda model: wrapped(sharded(model)),
    "whole fsdp": lambda model: whole(sharded(model)),
    "whole ddp": lambda model: whole(in_parallel(model)),
    "ddp of a whole": lambda model: in_parallel(whole(model)),
    "blocks of ddp": lambda model: in_parallel(in_place(model)),
}


def loss_of(model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x.detach().clone()


def trained(model: nn.Module, batch: Tensor) -> dict[str, object]:
    """Losses of two steps, the last gradients, and the weights after them."""
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    gradients, weights = [full(p.grad) for p in model.parameters()], [full(p) for p in model.parameters()]
    return {"gradients": gradients, "weights": weights, "losses": losses}


def kept(model: nn.Module, batch: Tensor) -> int:
    found: dict[int, Tensor] = {}
    weights = {x.data_ptr() for x in model.parameters() if not hasattr(x, "full_tensor")}

    def pack(x: Tensor) -> Tensor:
        if not (isinstance(x, nn.Parameter) or x.data_ptr() in weights):
            found[x.untyped_storage().data_ptr()] = x.detach()
        return x.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(batch).sum()
    loss.backward()  # FSDP frees the weights that it has gathered
    return sum(x.untyped_storage().nbytes() for x in found.values())


def measured(model: nn.Module, rank: int, batch: Tensor) -> dict[str, object]:
    found = trained(model, batch) | {"kept": kept(model, batch)}
    if rank == 0 or not isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel):
        found["reported"] = brevact.memory_report(model, batch).saved_bytes
    return found | {"after": trained(model, batch)["weights"]}


def main(rank: int, folder: Path) -> None:
    join(rank, folder)
    make, batch = WAYS[(folder / "way").read_text("utf-8")], BATCH.chunk(WORLD)[rank].clone()
    torch.save({name: measured(make(net(each)), rank, batch) for name, each in POLICIES.items()}, folder / f"{rank}.pt")
    distributed.destroy_process_group()
