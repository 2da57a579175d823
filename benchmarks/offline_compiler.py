"""Triton launches compiled for an absent GPU, and the resources of their machine code."""

from __future__ import annotations

import collections
import contextlib
import heapq
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from brevact.triton_kernels.launch import WARP, Program

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
ALIGNMENT = 16  # of allocations, in bytes, that Triton compiles for


class Launch(NamedTuple):
    """A program and the arguments that its kernel gets."""

    program: Program
    arguments: list[Any]


@contextlib.contextmanager
def collected() -> Iterator[list[Launch]]:
    """Collect the launches that would run, in order: there is no device."""
    launches: list[Launch] = []
    run = Program.run_by_triton
    Program.run_by_triton = lambda program, arguments: launches.append(Launch(program, arguments))
    try:
        yield launches
    finally:
        Program.run_by_triton = run


def compile_launch(launch: Launch, target: GPUTarget) -> CompiledKernel:
    """Compile a launch as Triton does when its tensors are aligned."""
    signature, constants, attributes = {}, {}, {}
    values = iter(launch.arguments)
    for index, parameter in enumerate(launch.program.kernel.params):
        name = parameter.name
        value = launch.program.constants[name] if parameter.is_constexpr else next(values)
        if isinstance(value, Tensor):
            signature[name] = _POINTERS[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", ALIGNMENT]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif parameter.is_constexpr or value is None or (value == 1 and not parameter.do_not_specialize):
            signature[name], constants[(index,)] = "constexpr", value
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % ALIGNMENT == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", ALIGNMENT]]
    source = ASTSource(launch.program.kernel, signature, constants, attributes)
    options = {"num_warps": launch.program.threads // WARP, "enable_fp_fusion": False}
    if launch.program.registers and target.backend == "cuda":
        options["maxnreg"] = launch.program.registers
    return triton.compile(source, target=target, options=options)


def resources(kernel: CompiledKernel, target: GPUTarget) -> dict[str, Any]:
    """Resources of a compiled kernel, from its machine code.

    Args:
        kernel: Result of `compile_launch`.
        target: GPU that it is for.

    Returns:
        Registers of a thread, spills, bytes of shared memory, barriers; loads and stores of global memory as counts by
        width in bits; `path`, instructions of the shortest path as counts by kind (see `shortest_path`), NVIDIA alone.
    """
    found = _of_assembly(kernel.asm["amdgcn"]) if target.backend == "hip" else _of_cubin(kernel.asm["cubin"])
    return {**found, "shared": kernel.metadata.shared}


def _of_assembly(assembly: str) -> dict[str, Any]:
    fields = {name: int(count) for name, count in re.findall(r"\.(\w+_count|\w+_fixed_size):\s+(\d+)", assembly)}
    # Scalar registers that are spilled go to lanes of vector registers, which costs no memory.
    scratch = len(re.findall(r"^\s+scratch_(?:load|store)", assembly, re.MULTILINE))
    bits = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32}
    accesses = {"load": collections.Counter(), "store": collections.Counter()}
    for kind, size in re.findall(r"^\s+(?:global|buffer|flat)_(load|store)_(\w+)", assembly, re.MULTILINE):
        accesses[kind][bits.get(size, 8 if "byte" in size else 16)] += 1
    return {
        "registers": fields["vgpr_count"],
        "spills": max(scratch, fields["vgpr_spill_count"], int(fields["private_segment_fixed_size"] > 0)),
        "barriers": len(re.findall(r"^\s+s_barrier", assembly, re.MULTILINE)),
        "loads": accesses["load"],
        "stores": accesses["store"],
    }


def _of_cubin(cubin: bytes) -> dict[str, Any]:
    usage, listing = _dump(cubin)
    accesses = {"LDG": collections.Counter(), "STG": collections.Counter()}
    for kind, modifiers in re.findall(r"\b(LDG|STG)((?:\.\w+)*)", listing):
        bits = re.search(r"\.[US]?(8|16|64|128)\b", modifiers)
        accesses[kind][int(bits.group(1)) if bits else 32] += 1
    return {
        "registers": int(re.search(r"REG:(\d+)", usage).group(1)),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", listing)),
        "barriers": len(re.findall(r"\bBAR\.", listing)),
        "loads": accesses["LDG"],
        "stores": accesses["STG"],
        "path": shortest_path(listing),
    }


_KINDS = {
    "alu": r"IADD3?|VIADD\w*|P?LOP3|SHF|LEA|PRMT|SGXT|BMSK|IABS|MOV|F?SEL|FCHK|P2R|R2P|VOTE|"
    r"[FIDH]SETP?2?|V?[FI]MNMX3?|HMNMX2|VABSDIFF\w*",
    "wide": r"IMAD\.(WIDE|HI)\S*",
    "float": r"FADD|FMUL|FFMA|HADD2|HMUL2|HFMA2|IMAD",
    "slow": r"FRND|I2FP?|F2IP?|F2FP?|I2I|MUFU|POPC|FLO|BREV|IDP",
    "shuffles": r"SHFL|REDUX|LDS|STS|BAR",
}
"""Opcodes by the unit of the GPU that runs them; those of `alu` have half the rate of `float`."""


def shortest_path(listing: str, accesses: int = 8) -> collections.Counter[str]:
    """Instructions by kind on the shortest path from a kernel's start to an end that has 128-bit accesses of memory.

    It is what a program runs that holds whole blocks without anything rare: other code lies behind branches, and calls
    are those of divisions of subnormal numbers. Empty if no path has that many accesses.
    """
    code = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\d+ )?([A-Z][\w.]*)([^;]*);", listing, re.MULTILINE)
    place_of = {int(at, 16): place for place, (at, *_) in enumerate(code)}
    queue, before = [(0, 0, 0, ())], {}  # length of the path, place, accesses so far, and the state before
    while queue:
        length, place, count, previous = heapq.heappop(queue)
        if (place, count) in before or place == len(code):
            continue
        before[place, count] = previous
        _, guard, operation, operands = code[place]
        if operation == "EXIT" and count == accesses:
            break
        following = [] if operation in ("EXIT", "BRA", "RET") and not guard else [place + 1]
        target = re.search(r"0x([0-9a-f]+)", operands) if operation == "BRA" else None
        if target and place_of[int(target.group(1), 16)] > place:
            following.append(place_of[int(target.group(1), 16)])
        after = min(count + bool(re.match(r"(LDG|STG)\S*\.(64|128)", operation)), accesses)
        for other in following:
            heapq.heappush(queue, (length + 1, other, after, (place, count)))
    else:
        return collections.Counter()
    state, operations = (place, count), []
    while state:
        operations.append(code[state[0]][2])
        state = before[state]
    return collections.Counter(_kind(operation) for operation in operations)


def _kind(operation: str) -> str:
    head = operation.split(".")[0]
    if re.fullmatch(_KINDS["wide"], operation):
        return "wide"
    return next((kind for kind, opcodes in _KINDS.items() if re.fullmatch(opcodes, head)), "other")


def _dump(cubin: bytes) -> tuple[str, str]:
    """Resource usage and machine code of a cubin, by the cuobjdump in Triton's wheel."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(cubin)
        commands = ([tool, flag, path] for flag in ("--dump-resource-usage", "--dump-sass"))
        usage, listing = (subprocess.run(c, check=True, capture_output=True, text=True).stdout for c in commands)
    return usage, listing
