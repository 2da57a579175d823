"""Time of one quantized ReLU of Brevitas on a GPU: by stock ops, and by the kernels of a region.

    python -m benchmarks.gpu.quant_relu                 # 2^24 elements, float32 and bfloat16, on cuda
    python -m benchmarks.gpu.quant_relu --csv rows.csv  # appends the rows to a file

A `QuantReLU` of 4 bits with a learned scale, whose statistics are collected, on a flat activation; the gradient of the
output is a tensor of its own. Forward, and forward with backward (of the activation and the scale), are timed in turns
with `torch.relu` and with the device's own copy, by CUDA events; the cache is overwritten before each call. Policies
are `LosslessBackward`, whose gradients are those of stock ops to the last bit, which is checked before, and
`StochBackward2bit`, which keeps residuals of 2 bits.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import brevitas.nn as qnn
import torch
from brevitas.quant import Uint8ActPerTensorFloat
from torch import Tensor, nn

import brevact
from benchmarks.gpu.timing import alternating_times, limit_threads
from benchmarks.records import append_rows, print_table
from brevact import LosslessBackward, StochBackward2bit

POLICIES = {"stock": None, "LosslessBackward": LosslessBackward, "StochBackward2bit": StochBackward2bit}
_STATISTICS = 3


def quant_relu(x: Tensor) -> nn.Module:
    """A layer that has collected its statistics of a tensor.

    Args:
        x: activation.
    """
    layer = qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, bit_width=4, collect_stats_steps=_STATISTICS)
    layer = layer.to(x.device, x.dtype).train()
    with torch.no_grad():
        for _ in range(_STATISTICS + 1):
            layer(x[: 1 << 16])
    return layer


def step(layer: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients.

    Args:
        layer: a module, or a function.
        x: activation that requires a gradient.
        grad: gradient of the output.
    """
    out = layer(x)
    weights = tuple(layer.parameters()) if isinstance(layer, nn.Module) else ()
    return out, *torch.autograd.grad(out, (x, *weights), grad)


def measured(dtype: torch.dtype, numel: int, device: torch.device, rounds: int) -> list[dict[str, object]]:
    """Rows of one type.

    Args:
        dtype: of the activation.
        numel: its elements.
        device: where it is.
        rounds: timed calls of each.

    Raises:
        RuntimeError: a gradient of `LosslessBackward` is not that of stock ops.
    """
    torch.manual_seed(0)
    x, grad = torch.randn(2, numel, device=device, dtype=dtype)
    stock = quant_relu(x)
    layers: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu}
    for name, policy in POLICIES.items():
        made = quant_relu(x)
        made.load_state_dict(stock.state_dict())
        made.to(device)  # loading makes Brevitas' quantizers anew, on the CPU
        layers[name] = made if policy is None else brevact.quantize_backward(made, policy)
    x.requires_grad_()
    expected, found = (step(layers[name], x, grad) for name in ("stock", "LosslessBackward"))
    if not all(torch.equal(*pair) for pair in zip(expected, found, strict=True)):
        raise RuntimeError(f"LosslessBackward: the results in {dtype} differ from those of stock ops")
    buffer = torch.empty_like(grad)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: buffer.copy_(grad)}
    for name, layer in layers.items():
        calls[f"{name} forward"] = lambda layer=layer: layer(x)
        calls[f"{name} forward and backward"] = lambda layer=layer: step(layer, x, grad)
    times = alternating_times(calls, rounds, device)
    rows: list[dict[str, object]] = []
    for name, values in times.items():
        p20, *_, p80 = statistics.quantiles(values, n=5, method="inclusive")
        median, passes = statistics.median(values), name.removeprefix(name.split()[0]).strip()
        of_stock = "" if name == "copy" else f"{median / statistics.median(times[f'stock {passes}']):.3f}"
        milliseconds = {"median_us": median, "p20_us": p20, "p80_us": p80}
        rows.append(
            {
                "call": name,
                "dtype": str(dtype).removeprefix("torch."),
                "numel": numel,
                **{column: f"{1e3 * value:.1f}" for column, value in milliseconds.items()},
                "picoseconds_an_element": f"{1e9 * median / numel:.2f}",
                "of_stock": of_stock,
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and store the rows.

    Args:
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--numel", type=int, default=1 << 24, help="elements (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=50, help="timed calls of each (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--csv", help="append the rows to this file")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    limit_threads(device)
    found = [measured(getattr(torch, dtype), options.numel, device, options.rounds) for dtype in options.dtypes]
    rows = [row for each in found for row in each]
    print_table(rows)
    if options.csv is not None:
        append_rows(rows, options.csv, options.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
