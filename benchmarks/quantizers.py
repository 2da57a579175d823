"""Nanoseconds per element of quantizers, and as multiples of `clone()` of the same tensor.

    python -m benchmarks.quantizers --csv docs/quantizers.csv          # on a GPU: --device cuda

Operations take turns with `clone()`, so that all see the same machine; times are medians, on a GPU between CUDA events.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.records import append_rows, print_table
from brevact.quantizers import UniformQuantizer, decode_through

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 24, help="elements of the tensor (default: %(default)s)")
    parser.add_argument("--bit-widths", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=9, help="timed calls of each operation (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--csv", help="append the rows to this file")
    options = parser.parse_args(arguments)
    rows = []
    for name in options.dtypes:
        torch.manual_seed(0)
        x = torch.randn(options.numel, device=options.device).to(DTYPES[name])
        for bit_width in options.bit_widths:
            found = times(operations(x, bit_width), options.repeats, options.device)
            for operation, nanoseconds in found.items():
                rows.append(
                    {
                        **{"operation": operation, "dtype": name, "bit_width": bit_width, "numel": options.numel},
                        "ns": f"{nanoseconds / options.numel:.4f}",
                        "of_clone": f"{nanoseconds / found['clone']:.2f}",
                    }
                )
    print_table(rows)
    if options.csv:
        append_rows(rows, options.csv, options.device)


def operations(x: Tensor, bit_width: int) -> dict[str, Callable[[], object]]:
    """Calls by name: packing by each rounding, and decoding, also through a SiLU and times a gradient."""
    quantizers = {
        rounding: UniformQuantizer(bit_width=bit_width, rounding=rounding)
        for rounding in ("nearest", "stochastic", "dithered")
    }
    packed = quantizers["stochastic"].quantize(x)
    return {
        "clone": x.clone,
        **{name: lambda q=quantizer: q.quantize(x) for name, quantizer in quantizers.items()},
        "dequantize": lambda: packed.dequantize(),
        "dequantize and multiply": lambda: packed.dequantize_multiply(x),
        "dequantize with SiLU": lambda: decode_through(packed, F.silu, None, None, x.dtype, None),
    }


def times(calls: dict[str, Callable[[], object]], repeats: int, device: str = "cpu") -> dict[str, float]:
    """Median nanoseconds of calls that take turns; the first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            found[name].append(_on_gpu(call) if device == "cuda" else _on_cpu(call))
    return {name: statistics.median(values[1:]) for name, values in found.items()}


def _on_cpu(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - start


def _on_gpu(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(2_000_000)  # about a millisecond, so that the device does not wait for Python
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return 1e6 * start.elapsed_time(end)


if __name__ == "__main__":
    main()
