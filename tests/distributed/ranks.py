"""One of two processes that average packed gradients; `tests.ranks.run_ranks` calls `main`, which writes a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import brevact
from brevact.distributed import quantized_hook
from tests.distributed.models import averaged, normal, parallel
from tests.ranks import join


def given(rank: int, step: int = 0) -> list[Tensor]:
    return normal(10 * step + rank)


def accumulated(rank: int) -> list[Tensor]:
    model = parallel(quantized_hook(brevact.StochBackward4bit))
    with model.no_sync():
        model(given(rank)).backward()
    model([-2 * g for g in given(rank)]).backward()
    return [p.grad for p in model.parameters()]


def resumed(rank: int) -> dict[str, list[Tensor]]:
    """Gradients of steps in one go, and of the last ones from a checkpoint, with buckets of one parameter each."""
    options = {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True}
    model = parallel(hook := quantized_hook(brevact.StochBackward3bit), **options)
    for step in range(2):
        averaged(model, given(rank, step))
    again = parallel(other := quantized_hook(brevact.StochBackward3bit), **options)
    other.load_state_dict(hook.state_dict())
    whole = [g for step in (2, 3) for g in averaged(model, given(rank, step))]
    return {"whole": whole, "resumed": [g for step in (2, 3) for g in averaged(again, given(rank, step))]}


def unused(rank: int) -> list[Tensor]:
    """Gradients where the ranks' losses reach different parameters, and one is reached by none."""
    model = parallel(quantized_hook(brevact.StochBackward4bit), find_unused_parameters=True)
    first, bias, _ = given(rank)
    return averaged(model, [first if rank else None, bias, None])


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def disagreeing(rank: int) -> dict[str, str]:
    """Errors of ranks that pack in different ways, with equal and with different bytes."""
    hooks = {
        "rounding": quantized_hook(brevact.DitherBackward4bit if rank else brevact.StochBackward4bit),
        "bit_width": quantized_hook(brevact.StochBackward2bit, bit_width=2 + rank),
        "min_numel": quantized_hook(brevact.StochBackward2bit, min_numel=10**6 if rank else 4096),
        "seed": quantized_hook(brevact.StochBackward2bit4bitMix, seed=rank),
    }
    errors = {name: raised(partial(averaged, parallel(hook), given(rank))) for name, hook in hooks.items()}
    model = parallel(hook := quantized_hook(brevact.StochBackward2bit))
    averaged(model, given(rank))
    hook.load_state_dict({"step": hook.step + rank, "seed": 0})
    errors["step"] = raised(lambda: averaged(model, given(rank)))
    return errors


def joined(rank: int) -> list[Tensor]:
    """Weights after an epoch in which rank 1 has a batch more."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(96, 64))
    model.register_comm_hook(None, quantized_hook(brevact.StochBackward4bit))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join():
        for step in range(2 + rank):
            optimizer.zero_grad()
            model(torch.randn(8, 96, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def measure(rank: int) -> dict[str, object]:
    drawn = parallel(quantized_hook(brevact.StochBackward4bit))
    mixed = parallel(quantized_hook(brevact.StochBackward2bit4bitMix))
    same = parallel(quantized_hook(brevact.StochBackward2bit))
    return {
        "drawn": averaged(drawn, given(rank)),
        "mixed": averaged(mixed, given(rank)),
        "same gradients": averaged(same, normal(0)),
        "accumulated": accumulated(rank),
        "unused": unused(rank),
        "joined": joined(rank),
        **resumed(rank),
        "disagreeing": disagreeing(rank),
    }


def left_alone() -> str:
    """The error of rank 0 when rank 1 is gone."""
    model = parallel(quantized_hook(brevact.StochBackward4bit))
    averaged(model, given(0))
    distributed.barrier()
    if distributed.get_rank() == 1:
        os._exit(0)
    return raised(lambda: averaged(model, given(0)))


def main(rank: int, folder: Path) -> None:
    join(rank, folder)
    torch.save(measure(rank), folder / f"{rank}.pt")
    distributed.barrier()
    (folder / "left_alone").write_text(left_alone(), "utf-8")
    os._exit(0)  # no farewell to a process that is gone
