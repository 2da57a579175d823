"""The kernels of the uniform quantizer beside the device's own copy, in bytes a second."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.processes import Row, message_of
from benchmarks.gpu.timing import alternating_times, l2_bytes, limit_threads
from brevact.quantizers import Layout, PackedActivation, PackedSpec, Rounding, UniformQuantizer, kernel_ops
from brevact.quantizers.formats.uniform.quantizer import plan_of

OPERATIONS = ("nearest", "stochastic", "dequantize into a buffer", "dequantize * other")
COLUMNS = (
    *("operation", "dtype", "bit_width", "numel", "moved_mib", "median_us", "p20_us", "p80_us"),
    *("gb_s", "copy_gb_s", "fraction_of_copy", "goal", "threads", "error"),
)
_LEAST_NUMEL = 2**28
_CACHES = 8  # of the device fit into the tensor at least
_CHECKED = 2**18  # elements, whole blocks: what the reference recomputes


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """The operations of one bit width on one dtype.

    Args:
        dtype: "float32" or "bfloat16".
        bit_width: of the codes.
        device: "cuda" or "cpu".
        numel: elements of the tensor; None for a size that no cache holds.
        rounds: timed calls of each operation.
    """

    dtype: str
    bit_width: int
    device: str
    numel: int | None
    rounds: int

    def __str__(self) -> str:
        return f"kernels, {self.dtype}, {self.bit_width} bits"

    def failed(self, error: str) -> list[Row]:
        """Rows of a case that could not be measured."""
        return [self._row(operation, numel=self.numel or "", error=error) for operation in OPERATIONS]

    def prepare(self) -> Callable[[], list[Row]]:
        """Allocate, compile, compare the results with the reference's, and return what measures."""
        device, dtype = torch.device(self.device), getattr(torch, self.dtype)
        limit_threads(device)
        torch.manual_seed(0)
        x = torch.randn(self.numel or _uncached_numel(device, dtype), device=device, dtype=dtype)
        operations = operations_of(x, self.bit_width)
        errors = {name: _error_of(operation.check) for name, operation in operations.items()}
        return lambda: self._measure(x, operations, errors)

    def _measure(self, x: Tensor, operations: Mapping[str, Operation], errors: Mapping[str, str]) -> list[Row]:
        buffer = torch.empty_like(x)
        calls = {name: operation.call for name, operation in operations.items() if not errors[name]}
        times = alternating_times({"copy": lambda: buffer.copy_(x), **calls}, self.rounds, x.device)
        copy_gb_s = _gb_s(_nbytes(x, buffer), statistics.median(times["copy"]))
        rows = []
        for name, operation in operations.items():
            if errors[name]:
                rows.append(self._row(name, numel=x.numel(), error=errors[name]))
                continue
            p20, *_, p80 = statistics.quantiles(times[name], n=5, method="inclusive")
            median = statistics.median(times[name])
            rows.append(
                self._row(
                    name,
                    numel=x.numel(),
                    moved_mib=f"{operation.moved / 2**20:.1f}",
                    median_us=f"{1e3 * median:.1f}",
                    p20_us=f"{1e3 * p20:.1f}",
                    p80_us=f"{1e3 * p80:.1f}",
                    gb_s=f"{_gb_s(operation.moved, median):.1f}",
                    copy_gb_s=f"{copy_gb_s:.1f}",
                    fraction_of_copy=f"{_gb_s(operation.moved, median) / copy_gb_s:.3f}",
                    threads=torch.get_num_threads(),
                )
            )
        return rows

    def _row(self, operation: str, **values: object) -> Row:
        goal = 0.75 if (operation, self.dtype) == ("stochastic", "bfloat16") else 0.85
        known = {"operation": operation, "dtype": self.dtype, "bit_width": self.bit_width, "goal": goal}
        return {**dict.fromkeys(COLUMNS, ""), **known, **values}


@dataclass(frozen=True)
class Operation:
    """One of `OPERATIONS`.

    Args:
        call: what is timed.
        moved: bytes that it reads and writes.
        check: raises ValueError if the results are wrong.
    """

    call: Callable[[], object]
    moved: int
    check: Callable[[], None]


def operations_of(x: Tensor, bit_width: int) -> dict[str, Operation]:
    """The operations on one tensor.

    Args:
        x: flat tensor.
        bit_width: of the codes.

    Returns:
        Each by its name.
    """
    nearest = UniformQuantizer(bit_width=bit_width, rounding=Rounding.NEAREST)
    stochastic = UniformQuantizer(bit_width=bit_width)
    seed = torch.zeros((), dtype=torch.int64, device=x.device)
    packed, buffer = stochastic.quantize(x, seed), torch.empty_like(x)
    head = x[:_CHECKED].cpu()
    to_nearest, _ = _expected(nearest, head)
    codes, values = _expected(stochastic, head)
    results = (to_nearest, codes, (values,), (values * head,))
    calls: tuple[Callable[[], PackedActivation | Tensor], ...] = (
        lambda: nearest.quantize(x),
        lambda: stochastic.quantize(x, seed),
        lambda: packed.dequantize(out=buffer),
        lambda: packed.dequantize_multiply(x, out=buffer),
    )
    moved = (
        _nbytes(x, packed.buffer),
        _nbytes(x, packed.buffer, seed),
        _nbytes(packed.buffer, buffer),
        _nbytes(packed.buffer, x, buffer),
    )
    return {
        name: Operation(call, count, lambda call=call, result=result: check(call(), result))
        for name, call, count, result in zip(OPERATIONS, calls, moved, results, strict=True)
    }


def _expected(quantizer: UniformQuantizer, head: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """What the plain-torch reference makes of the first elements on the CPU: the stored arrays, and their values."""
    spec = PackedSpec.of(quantizer, Layout.of(head))
    plan, buffer, values = plan_of(spec), spec.empty(head), torch.empty_like(head)
    kernel_ops.quantize_uniform.reference(head, plan, 0 if quantizer.is_stochastic else None, buffer)
    kernel_ops.dequantize_uniform.reference(buffer, plan, None, values)
    return plan.split(buffer), values


def check(result: PackedActivation | Tensor, expected: Sequence[Tensor]) -> None:
    """Compare a result with what the reference gives for the first elements.

    Args:
        result: packed activation or tensor of all elements.
        expected: the arrays of the packed activation, or the tensor, of the first elements.

    Raises:
        ValueError: the result begins with something else.
    """
    parts = result.tensors if isinstance(result, PackedActivation) else (result,)
    for part, want in zip(parts, expected, strict=True):
        if not torch.equal(part[: want.numel()].cpu(), want):
            raise ValueError("the result differs from that of the plain-torch reference")


def _error_of(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception as error:
        return message_of(error)
    return ""


def _uncached_numel(device: torch.device, dtype: torch.dtype) -> int:
    """A power of two: the tensor is at least eight times the last cache."""
    numel = _LEAST_NUMEL
    while numel * dtype.itemsize < _CACHES * l2_bytes(device):
        numel *= 2
    return numel


def _nbytes(*tensors: Tensor) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _gb_s(moved: int, milliseconds: float) -> float:
    return moved / milliseconds / 1e6
