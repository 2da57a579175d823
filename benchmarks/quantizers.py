"""Time and peak memory of the uniform quantizer beside `x.clone()` of the same tensor.

Decoding through SiLU, or through its derivative times a gradient, stands beside what torch makes of the decoded tensor;
"maps" have an affine map for each of 64 channels of 32 x 32 elements, "rows" one for each of 768 elements of a row.

    python -m benchmarks.quantizers --csv quantizers.csv

Every operation is timed in turns with `clone()`, so that both see the same machine; times are medians, ratios are to
the median of `clone()` at the same dtype. New tensors come from memory that the process does not hold yet. Peak memory
is the growth of the resident set during a call, less the result, relative to the input; it is known on Linux only.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.process_memory import return_free_memory
from benchmarks.records import write_rows
from brevact.quantizers import PackedActivation, Rounding, UniformQuantizer, decode_affine, decode_through

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
OPERATIONS = ("nearest", "stochastic", "dequantize into a buffer", "dequantize", "dequantize * other")
SHAPES = {"maps": ((64, 32, 32), (1, 64, 1, 1)), "rows": ((768,), (1, 768))}
"""Shape of a sample, and that of the factors of an affine map."""

Row = dict[str, object]


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 24, help="elements of the tensor (default: %(default)s)")
    parser.add_argument("--bit-widths", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--bucket-size", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=9, help="timed calls of each operation (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", help="append the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    write_rows(list(_measure(options)), options.csv)


def _measure(options: argparse.Namespace) -> Iterator[Row]:
    """One row an operation, type and width."""
    for name in options.dtypes:
        torch.manual_seed(0)
        x = torch.randn(options.numel).to(DTYPES[name])
        buffer = torch.empty_like(x)
        for bit_width in options.bit_widths:
            operations = _operations(x, buffer, bit_width, options.bucket_size)
            times: dict[str, list[float]] = {operation: [] for operation in operations}
            for _ in range(options.repeats + 1):
                for operation, call in operations.items():
                    return_free_memory()  # every new tensor costs its page faults
                    start = time.perf_counter()
                    result = call()
                    times[operation].append(1e3 * (time.perf_counter() - start))
                    del result
            clone, dequantize = (statistics.median(times[operation][1:]) for operation in ("clone", "dequantize"))
            for operation, call in operations.items():
                p20, median, p80 = _percentiles(times[operation][1:])  # the first call warms up
                extra = _peak_extra(call, x, operation)
                yield {
                    "operation": operation,
                    "dtype": name,
                    "bit_width": bit_width,
                    "bucket_size": options.bucket_size,
                    "numel": options.numel,
                    "median_ms": f"{median:.2f}",
                    "p20_ms": f"{p20:.2f}",
                    "p80_ms": f"{p80:.2f}",
                    "ratio_to_clone": f"{median / clone:.2f}",
                    "ratio_to_dequantize": f"{median / dequantize:.2f}",
                    "peak_extra": "" if extra is None else f"{extra:.1%}",
                    "numba": _numba_version(),
                }


def _operations(x: Tensor, buffer: Tensor, bit_width: int, bucket_size: int) -> dict[str, Callable[[], object]]:
    nearest = UniformQuantizer(bit_width=bit_width, bucket_size=bucket_size, rounding=Rounding.NEAREST)
    stochastic = UniformQuantizer(bit_width=bit_width, bucket_size=bucket_size)
    packed = stochastic.quantize(x)
    calls = (
        lambda: nearest.quantize(x),
        lambda: stochastic.quantize(x),
        lambda: packed.dequantize(out=buffer),
        packed.dequantize,
        lambda: packed.dequantize_multiply(x, out=buffer),
    )
    return {"clone": x.clone, **dict(zip(OPERATIONS, calls, strict=True)), **_through(x, stochastic)}


def _through(x: Tensor, quantizer: UniformQuantizer) -> dict[str, Callable[[], object]]:
    """Decoding through an affine map and a function."""
    calls: dict[str, Callable[[], object]] = {}
    for name, (sample, shape) in {"": ((), ()), **SHAPES}.items():
        count = x.numel() // math.prod(sample)
        part = x[: count * math.prod(sample)].view(count, *sample)
        scale, shift = (torch.rand(shape) + 0.5, torch.randn(shape)) if name else (None, None)
        # What a norm stores is float32, whatever the type of its input.
        packed, where = (quantizer.quantize(part.float()), f" of {name}") if name else (quantizer.quantize(part), "")
        for operation, function, grad in (("SiLU", F.silu, None), ("SiLU' * other", silu_derivative, part)):
            arguments = (packed, function, scale, shift, x.dtype, grad)
            calls[f"dequantize with {operation}{where}"] = functools.partial(decode_through, *arguments)
            calls[f"torch's {operation}{where}"] = functools.partial(_by_torch, *arguments)
    return calls


def silu_derivative(x: Tensor) -> Tensor:
    """Derivative of SiLU, as torch computes it."""
    return torch.ops.aten.silu_backward(torch.ones_like(x), x)


def _by_torch(
    packed: PackedActivation,
    function: Callable[[Tensor], Tensor],
    scale: Tensor | None,
    shift: Tensor | None,
    dtype: torch.dtype,
    grad: Tensor | None,
) -> Tensor:
    """What `decode_through` is defined by."""
    values = function(decode_affine(packed, scale, shift, dtype))
    return values if grad is None else grad * values


def _percentiles(times: list[float]) -> tuple[float, float, float]:
    if len(times) < 2:
        return times[0], times[0], times[0]
    cuts = statistics.quantiles(times, n=5, method="inclusive")
    return cuts[0], statistics.median(times), cuts[3]


def _peak_extra(call: Callable[[], Any], x: Tensor, operation: str) -> float | None:
    """Largest growth of the resident set during a call, less the bytes of a new result, relative to the input."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists() or not reset.exists():
        return None

    def kibibytes(field: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field))

    return_free_memory()
    reset.write_text("5")  # the peak starts again from the present resident set
    before = kibibytes("VmHWM:")
    result = call()
    grown = 1024 * (kibibytes("VmHWM:") - before)
    into_buffer = operation in ("dequantize into a buffer", "dequantize * other")
    fresh = 0 if into_buffer else result.nbytes
    return (grown - fresh) / (x.numel() * x.element_size())


def _numba_version() -> str:
    try:
        import numba
    except ImportError:
        return "none: the plain torch reference"
    return numba.__version__


if __name__ == "__main__":
    main()
