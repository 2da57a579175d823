"""Count the launches of functions, plain and with `DEFAULT`: ATen ops and Triton kernels, forward and backward.

    python -m benchmarks.launches --functions linear layer_norm

Nothing needs a GPU: tensors are on the CPU, ATen's ops are counted as they are dispatched, without views and empty
tensors, and launches of Triton's kernels are counted in place of being run; so no value is right. On a GPU an ATen op
may be several kernels, and autocast casts other ops than on a CPU. Seeds are there: they are drawn 256 at a time.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import brevact
from benchmarks.records import print_table
from brevact import triton_kernels
from brevact.quantizers import backends
from brevact.triton_kernels.launch import Program

_NONE = ("empty", "new_empty", "_unsafe_view", "resize_", "lift", "_local_scalar_dense", "detach", "promote_types")


class _Block(nn.Module):
    """A residual block of a CNN."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
            *(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + x, inplace=True)


class _Loss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(x, torch.zeros(len(x), dtype=torch.int64))


class _Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*x.unbind())


_ROWS, _MAPS = (64, 1024), (8, 16, 32, 32)
#: Modules and the shapes of their inputs.
FUNCTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(1024, 64), _ROWS),
    "relu": (nn.ReLU, _ROWS),
    "gelu": (nn.GELU, _ROWS),
    "silu": (nn.SiLU, _ROWS),
    "layer_norm": (lambda: nn.LayerNorm(1024), _ROWS),
    "batch_norm": (lambda: nn.BatchNorm2d(16), _MAPS),
    "sdpa": (_Attention, (3, 2, 4, 128, 64)),
    "cross_entropy": (_Loss, _ROWS),
    "residual_block": (_Block, _MAPS),
}


class Launches(TorchDispatchMode):
    """Counts ATen's ops that compute something, and kernels of Triton."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        is_view = bool(returns) and all(each.alias_info and not each.alias_info.is_write for each in returns)
        name = func._schema.name.partition("::")[2]
        if not (is_view or name.startswith(_NONE)):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the launches of a block, as if its tensors were on a GPU."""
    seed, launches = torch.zeros((), dtype=torch.int64), Launches()

    def run(program: Program, *tensors: Tensor | None) -> None:
        launches.names[program.kernel.__name__] += 0 not in program.grid

    with (
        mock.patch.object(Program, "run", run),
        mock.patch.object(triton_kernels, "can_run", lambda arrays: True),
        mock.patch.object(triton_kernels.uniform, "seed_on", lambda device, given: None if given is None else seed),
        mock.patch.object(backends, "_launchers", lambda on_gpu: triton_kernels),
        launches,
    ):
        yield launches.names


def launches_of(name: str, policy: Any = None, autocast: bool = False) -> tuple[Counter[str], Counter[str]]:
    """Launches of the forward and of the backward pass of a function."""
    make, shape = FUNCTIONS[name]
    torch.manual_seed(0)
    model = make() if policy is None else brevact.quantize_backward(make(), policy)
    for _ in range(2):  # the first run finds plans
        x = torch.randn(shape, requires_grad=True).clone()
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext(), counted() as forward:
            out = model(x)
        grad = torch.ones_like(out)
        with counted() as backward:
            torch.autograd.grad(out, [x, *model.parameters()], grad)
    return forward, backward


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS), metavar="FUNCTION")
    parser.add_argument("--names", action="store_true", help="name the launches of packed functions, too")
    options = parser.parse_args(arguments)
    rows = []
    for name in options.functions:
        for autocast in (False, True):
            plain, ours = launches_of(name, None, autocast), launches_of(name, brevact.DEFAULT, autocast)
            row: dict[str, Any] = {"function": name, "autocast": "bf16" if autocast else "-"}
            for way, (forward, backward) in (("plain", plain), ("DEFAULT", ours)):
                row |= {f"{way} fwd": forward.total(), f"{way} bwd": backward.total()}
            if options.names:
                row |= {"fwd": _text(ours[0]), "bwd": _text(ours[1])}
            rows.append(row)
    print_table(rows)
    return 0


def _text(names: Counter[str]) -> str:
    return "+".join(name.removesuffix("_kernel") + (f"*{count}" if count > 1 else "") for name, count in names.items())


if __name__ == "__main__":
    sys.exit(main())
