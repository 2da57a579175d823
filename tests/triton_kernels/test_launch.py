"""Programs hand compiled kernels what Triton would, without Triton's look at each argument."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from brevact.quantizers import Layout, PackedSpec, UniformQuantizer
from brevact.quantizers.formats.uniform.quantizer import plan_of
from brevact.triton_kernels.launch import TENSOR, Launch, Program, parts_of
from brevact.triton_kernels.masks import pack_mask_kernel


class Compiled:
    """A kernel that notes how it is called, by a grid or at once."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, stream: self.calls.append(("by Triton", grid, stream, args))

    def launch(self, x: int, y: int, z: int, stream: int, *args: Any) -> None:
        self.calls.append(("at once", (x, y, z), stream, args))


@pytest.fixture
def compiled(monkeypatch):
    """What Triton is to return, on the device that a CPU tensor names."""
    found = Compiled()
    monkeypatch.setattr(Launch, "run_by_triton", lambda launch: found)
    return found


def program_of(compiled: Compiled, *tensors: torch.Tensor) -> Program:
    program = Program(pack_mask_kernel, (7,), (TENSOR, TENSOR, 96), {"ROWS": 4})
    key = (-1, *(each for x in tensors for each in (x.dtype, x.data_ptr() % 16)))
    program._compiled[key] = compiled, compiled.launch, "function", "metadata", operator.index
    return program


def test_a_program_gives_addresses_numbers_and_constants_to_the_compiled_kernel(compiled):
    x, packed = torch.zeros(96), torch.zeros(12, dtype=torch.uint8)
    program_of(compiled, x, packed).run(x, packed)
    (call,) = compiled.calls
    assert call[:3] == ("at once", (7, 1, 1), -1)
    assert call[3] == ("function", "metadata", None, None, None, x.data_ptr(), packed.data_ptr(), 96, 4)


def test_a_program_leaves_the_launch_to_triton_where_a_profiler_listens(compiled, monkeypatch):
    x, packed = torch.zeros(96), torch.zeros(12, dtype=torch.uint8)
    listening = SimpleNamespace(
        launch_enter_hook=SimpleNamespace(calls=[print]), launch_exit_hook=SimpleNamespace(calls=[])
    )
    monkeypatch.setattr("brevact.triton_kernels.launch.hooks", listening)
    program_of(compiled, x, packed).run(x, packed)
    assert compiled.calls == [("by Triton", (7, 1, 1), -1, (x.data_ptr(), packed.data_ptr(), 96, 4))]


def test_a_program_compiles_anew_for_other_types_and_alignments(compiled, monkeypatch):
    x, packed = torch.zeros(96), torch.zeros(12, dtype=torch.uint8)
    program, launches = program_of(compiled, x, packed), []
    monkeypatch.setattr(Launch, "run_by_triton", lambda launch: launches.append(launch.arguments[0]))
    for other in (x.bfloat16(), torch.zeros(97)[1:]):
        program.run(other, packed)
    assert not compiled.calls and [each.dtype for each in launches] == [torch.bfloat16, torch.float32]


def test_parts_are_views_of_the_bytes_of_a_plan():
    spec = PackedSpec.of(UniformQuantizer(bit_width=3, bucket_size=64), Layout.of(torch.zeros(1000)))
    buffer = torch.arange(spec.nbytes, dtype=torch.uint8)
    for part, expected in zip(parts_of(plan_of(spec)), plan_of(spec).split(buffer), strict=True):
        found = part.of(buffer)
        assert found.dtype is expected.dtype and found.data_ptr() == expected.data_ptr() and len(found) == len(expected)
