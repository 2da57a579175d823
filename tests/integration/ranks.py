"""One of two processes that train together; `tests.ranks.run_ranks` calls `main`, which writes a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import brevact
from brevact import StochBackward2bit
from brevact.trainers import TrainingPolicy
from tests.integration.models import codes, quantized
from tests.ranks import WORLD, join

FOUR_BITS = "StochBackward4bit:min_numel=0"
BATCH = torch.randn(WORLD * 24, 64, generator=torch.Generator().manual_seed(3))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(64, 48), nn.SiLU())
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), inner, nn.Linear(48, 8))


def loss_of(out: Tensor) -> Tensor:
    return out.float().square().mean()


def full_grads(model: nn.Module) -> list[Tensor]:
    grads = [p.grad for p in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in grads]


def train(model: nn.Module, part: Tensor) -> dict[str, object]:
    packed, floats, out = codes(model, part)
    loss_of(out).backward()
    return {"packed": len(packed), "kept": [tuple(x.shape) for x in floats], "grads": full_grads(model)}


def in_parallel(before: bool, **options: object) -> nn.Module:
    if before:
        return DistributedDataParallel(quantized(net()), **options)
    return quantized(DistributedDataParallel(net(), **options))


def sharded(before: bool, lowers: bool = False, quantizes: bool = True) -> nn.Module:
    model = quantized(net()) if before else net()
    policy = MixedPrecisionPolicy(*((torch.bfloat16, torch.float32) if lowers else ()))
    for module in (model[3], model[0], model):
        fully_shard(module, mesh=init_device_mesh("cpu", (WORLD,)), mp_policy=policy)
    return model if before or not quantizes else quantized(model)


def accumulated(part: Tensor) -> list[Tensor]:
    model = in_parallel(True)
    with model.no_sync():
        (loss_of(model(part[:12])) / 2).backward()
    (loss_of(model(part[12:])) / 2).backward()
    return full_grads(model)


def hooked(part: Tensor) -> list[Tensor]:
    model = in_parallel(True)
    model.register_comm_hook(None, fp16_compress_hook)
    return train(model, part)["grads"]


def recomputed(part: Tensor) -> list[Tensor]:
    model = in_parallel(False)
    loss_of(checkpoint(model, part, use_reentrant=False)).backward()
    return full_grads(model)


def trained(make: Callable[[], nn.Module], part: Tensor) -> list[Tensor]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model(part)).backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def followed(part: Tensor, policy: str) -> list[Tensor] | str:
    """Weights of a sharded model whose run a training policy follows, or its error."""
    model, run = sharded(False, quantizes=False), TrainingPolicy(policy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        run.begin(model, [part, part + 1], lambda model, batch: loss_of(model(batch)))
    except ValueError as error:
        return str(error)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model(part)).backward()
        optimizer.step()
        run.step()
    assert run.figures()["brevact/plain_mib"] > run.figures()["brevact/saved_mib"] > 0
    run.end()
    return [p.full_tensor() for p in model.parameters()]


def measured(model: nn.Module, part: Tensor) -> nn.Module:
    brevact.memory_report(model, part)
    brevact.gradient_report(model, [part, part + 1], lambda run, batch: loss_of(run(batch)), draws=2, layers=None)
    return model


def noise(wrap: Callable[[nn.Module], Callable]) -> Tensor:
    """Codes of the same tensor at the same seed."""
    torch.manual_seed(0)
    packed, _, _ = codes(wrap(quantized(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), StochBackward2bit)), BATCH)
    return packed[0]


def adapted(part: Tensor) -> dict[str, object]:
    """Widths and gradients of a model whose widths follow both ranks' measurements."""
    model = DistributedDataParallel(brevact.quantize_backward(net(), StochBackward2bit, min_numel=0))

    def loss(run: nn.Module, batch: Tensor) -> Tensor:
        return loss_of(run(batch))

    adaptive = brevact.Adaptive(model, part, loss, bit_width=2, every=1)
    found = []
    for _ in range(2):
        loss(model, part).backward()
        adaptive.step(part)
        found.append(adaptive.state_dict())
    return {"states": found, "grads": full_grads(model)}


def measure(rank: int) -> dict[str, object]:
    part = BATCH.chunk(WORLD)[rank]
    return {
        "adaptive": adapted(part),
        "noise": noise(lambda model: model),
        "noise in a graph": noise(lambda model: torch.compile(model, backend="aot_eager", fullgraph=True)),
        "ddp, quantized before": train(in_parallel(True), part),
        "ddp, quantized after": train(in_parallel(False, gradient_as_bucket_view=True, bucket_cap_mb=0.01), part),
        "fsdp, quantized before": train(sharded(True), part),
        "fsdp, quantized after": train(sharded(False), part),
        "fsdp, bfloat16": train(sharded(False, True), part),
        "no_sync": accumulated(part),
        "communication hook": hooked(part),
        "checkpoint": recomputed(part),
        "weights, ddp": trained(lambda: in_parallel(True), part),
        "weights, fsdp": trained(lambda: sharded(True), part),
        "weights, fsdp, of four bits": trained(
            lambda: brevact.quantize_backward(sharded(False, quantizes=False), FOUR_BITS), part
        ),
        "weights, fsdp, followed": followed(part, FOUR_BITS),
        "fsdp, fitted": followed(part, "2x"),
        "weights, fsdp, measured": trained(lambda: measured(sharded(True), part), part),
    }


def main(rank: int, folder: Path) -> None:
    join(rank, folder)
    torch.save(measure(rank), folder / f"{rank}.pt")
    distributed.destroy_process_group()
