"""Programs pass Triton's arguments to compiled kernels, without Triton's inspection of each one."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from brevact.quantizers import Layout, PackedSpec, UniformQuantizer
from brevact.quantizers.formats.uniform.quantizer import plan_of
from brevact.triton_kernels.launch import Program, parts_of
from brevact.triton_kernels.packing import pack_codes_kernel

CONSTANTS = {"BIT_WIDTH": 1, "BLOCK": 512, "ROWS": 4, "COLUMNS_2": 64}


class Compiled:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, stream: self.calls.append(("by Triton", grid, stream, args))

    def launch(self, x: int, y: int, z: int, stream: int, *args: Any) -> None:
        self.calls.append(("at once", (x, y, z), stream, args))


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_program_gives_addresses_numbers_and_constants_to_the_compiled_kernel(is_measured, monkeypatch):
    """A profiler that listens gets the launch by Triton; other types and alignments are compiled anew."""
    x, packed, compiled = torch.zeros(96), torch.zeros(12, dtype=torch.uint8), Compiled()
    calls = [print] * is_measured
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=calls), launch_exit_hook=SimpleNamespace(calls=[]))
    monkeypatch.setattr("brevact.triton_kernels.launch.hooks", hooks)
    program, anew = Program(pack_codes_kernel, (7,), numel=96, **CONSTANTS), []
    key = (-1, *(each for tensor in (x, packed) for each in (tensor.dtype, tensor.data_ptr() % 16)))
    program._compiled[key] = compiled, compiled.launch, "function", "metadata", operator.index
    program.run(x, packed)
    arguments = (x.data_ptr(), packed.data_ptr(), 96, *CONSTANTS.values())
    at_once = ("at once", (7, 1, 1), -1, ("function", "metadata", None, None, None, *arguments))
    assert compiled.calls == [("by Triton", (7, 1, 1), -1, arguments) if is_measured else at_once]
    monkeypatch.setattr(Program, "run_by_triton", lambda program, arguments: anew.append(arguments[0].dtype))
    for other in (x.bfloat16(), torch.zeros(97)[1:]):
        program.run(other, packed)
    assert anew == [torch.bfloat16, torch.float32] and len(compiled.calls) == 1


def test_parts_are_views_of_the_bytes_of_a_plan():
    spec = PackedSpec.of(UniformQuantizer(bit_width=3, bucket_size=64), Layout.of(torch.zeros(1000)))
    buffer = torch.arange(spec.nbytes, dtype=torch.uint8)
    for part, expected in zip(parts_of(plan_of(spec)).values(), plan_of(spec).split(buffer), strict=True):
        found = part.of(buffer)
        assert found.dtype is expected.dtype and found.data_ptr() == expected.data_ptr() and len(found) == len(expected)
