"""``python -m brevact doctor``: whether all that brevact needs works here, and fixes."""

from __future__ import annotations

import ctypes.util
import importlib.util
import itertools
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from packaging.requirements import Requirement
from torch import Tensor, nn

from brevact import injectors
from brevact.cpu_kernels.kernels import folders, writable_folder
from brevact.policy.attach import quantize_backward, quantizer
from brevact.quantizers.backends import kernels_for, without_kernels
from brevact.reports.memory import memory_report
from brevact.version import __version__

OK, NOTE, WRONG = "ok", "note", "WRONG"
#: Fix if torchvision does not import.
TORCHVISION = (
    "pip uninstall torchvision, which language models do not need; or install the one of this torch: "
    "https://pytorch.org/get-started/locally"
)


class Finding(NamedTuple):
    """Result of a check: `OK`, `NOTE` if something works less well, or `WRONG`; finding; and fix, "" for none."""

    state: str
    text: str
    fix: str = ""


#: Libraries by the names of their allocators.
ALLOCATORS = {"mimalloc": "mimalloc", "jemalloc": "jemalloc", "tcmalloc": "tcmalloc_minimal"}


def mimalloc() -> str | None:
    """Return the path or name of mimalloc's shared library for LD_PRELOAD; None if there is none here."""
    try:
        files = metadata.files("cmeel-mimalloc") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "libmimalloc.so":
            return str(Path(str(file.locate())).resolve())
    return ctypes.util.find_library("mimalloc")


def allocator_in_use() -> str:
    """Return the name of this process's preloaded allocator; "" for the C library's own."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return next((name for name, library in ALLOCATORS.items() if f"lib{library}" in maps), "")


def doctor() -> int:
    checks: list[Callable[[], Iterator[Finding]]] = [_versions, _kernels, _step, _compiler, _caches, _memory, _optional]
    is_wrong = False
    for check in checks:
        try:
            findings = list(check())
        except Exception as error:  # whatever is broken here, the other checks run
            findings = [Finding(WRONG, f"{check.__name__.strip('_')}: {type(error).__name__}: {error}")]
        for each in findings:
            is_wrong |= each.state == WRONG
            print(f"{each.state:5}  {each.text}" + f"\n       fix: {each.fix}" * bool(each.fix))
    print("\nSomething is wrong; see above." if is_wrong else "\nbrevact works here.")
    return int(is_wrong)


def _versions() -> Iterator[Finding]:
    yield Finding(OK, f"brevact {__version__}, Python {platform.python_version()}, {platform.machine()}")
    try:
        lines = metadata.requires("brevact") or []
    except metadata.PackageNotFoundError:
        yield Finding(
            NOTE, "brevact is not installed, so that versions cannot be checked", "pip install . in a checkout"
        )
        return
    for requirement in map(Requirement, lines):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield Finding(WRONG, f"{requirement.name} is not installed", f"pip install '{requirement}'")
            continue
        if requirement.specifier.contains(version, prereleases=True):
            yield Finding(OK, f"{requirement.name} {version}")
        else:
            yield Finding(NOTE, f"{requirement.name} {version} was not tried", f"pip install '{requirement}'")


def _kernels() -> Iterator[Finding]:
    """Run kernels of each kind, and compare their results with the plain torch references, byte by byte."""
    for device in ("cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))):
        where = device if device == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"
        name = "Numba" if device == "cpu" else "Triton"
        if kernels_for((torch.zeros(64, device=device),)) is None:
            fix = "python -c 'import numba', and unset NUMBA_DISABLE_JIT" if device == "cpu" else "pip install triton"
            yield Finding(NOTE, f"{where}: plain torch quantizes, to the same bytes in several times the time", fix)
            continue
        wrong, count = differing(torch.device(device))
        if wrong:
            yield Finding(
                WRONG,
                f"{where}: {name} writes other bytes than plain torch: {', '.join(wrong)}",
                "empty Triton's cache, and the folder of compiled kernels; if it stays, report it with this output",
            )
        else:
            yield Finding(OK, f"{where}: kernels of {name}, {count} cases with the bytes of plain torch")
    if not torch.cuda.is_available():
        yield Finding(OK, "no GPU that torch can use")


def _step() -> Iterator[Finding]:
    model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 256))
    x = torch.randn(64, 256)
    exact = model(x)
    quantize_backward(model)
    found = model(x)
    found.square().mean().backward()
    report = memory_report(model, x)
    if not torch.equal(found, exact):
        yield Finding(WRONG, "a training step: the forward pass is not the one without brevact", "report it")
    elif report.ratio < 2 or not all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()):
        yield Finding(
            WRONG, f"a training step: {report.ratio:.1f} times less is stored, or gradients are lost", "report it"
        )
    else:
        yield Finding(OK, f"a training step stores {report.ratio:.1f} times less; its forward pass is unchanged")


def _compiler() -> Iterator[Finding]:
    found = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))), None)
    if found is None:
        yield Finding(NOTE, "no C++ compiler: torch.compile on CPU tensors does not work", "install g++, or set CXX")
    else:
        yield Finding(OK, f"torch.compile finds {found}")
    if torch.cuda.is_available() and not any(map(shutil.which, (os.environ.get("CC", "gcc"), "clang"))):
        yield Finding(WRONG, "no C compiler: Triton builds its driver with one, and raises", "install gcc, or set CC")


def _caches() -> Iterator[Finding]:
    if (folder := writable_folder()) is not None:
        yield Finding(OK, f"compiled kernels are kept in {folder}")
    else:
        places = ", ".join(map(str, folders()))
        yield Finding(NOTE, f"{places} cannot be written: each process compiles kernels", "set NUMBA_CACHE_DIR")


def _memory() -> Iterator[Finding]:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = path.read_text().partition("[")[2].partition("]")[0] if path.exists() else "unknown"
    if chosen == "never":
        yield Finding(NOTE, "no huge pages: decoding large tensors takes longer", f"echo madvise > {path}, as root")
    else:
        yield Finding(OK, f"{torch.get_num_threads()} threads; huge pages: {chosen}")
    allocator = allocator_in_use()
    if allocator:
        yield Finding(OK, f"memory of the process: {allocator}")
    elif platform.libc_ver()[0] == "glibc":
        library = mimalloc()
        fix = f"LD_PRELOAD={library} python SCRIPT ..." if library else "pip install cmeel-mimalloc, and ask again"
        yield Finding(NOTE, "memory of the process: glibc, whose heap keeps gaps", fix)
    if torch.cuda.is_available():
        settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "its defaults"
        yield Finding(OK, f"torch's allocator on the GPU: {settings}")


def _optional() -> Iterator[Finding]:
    if importlib.util.find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except (RuntimeError, OSError, ImportError) as error:
            yield Finding(NOTE, f"torchvision does not import ({error}), nor do models of transformers", TORCHVISION)


#: Quantizers whose kernels differ, by name; other formats run in plain torch.
_NAMES = "StochBackward1bit StochBackward2bit StochBackward3bit StochBackward4bit StochBackward8bit NearestBackward4bit"
_NAMES += " StochBackward2bit4bitMix L4Backward StochU5Backward"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def differing(device: torch.device) -> tuple[list[str], int]:
    """Return the cases that kernels quantize, or decode, to other bytes than plain torch, and the number of all."""
    wrong, cases = [], [*itertools.product(_NAMES.split(), _DTYPES)]
    for name, dtype in cases:
        x = torch.randn(4, 8, 24, 24, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        found = _written(name, x)
        with without_kernels():
            expected = _written(name, x)
        if not all(map(torch.equal, found, expected)):
            wrong.append(f"{name} of {str(dtype).removeprefix('torch.')}")
    return wrong, len(cases)


def _written(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    packed = quantizer(getattr(injectors, name)).quantize(x, seed=7)
    return packed.buffer, packed.dequantize().contiguous().view(torch.uint8)
