"""Two processes of a distributed run: a module runs once per rank and writes its measurements to a folder."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from torch import distributed

import brevact

WORLD = 2
_TIMEOUT = 240
"""Seconds that the processes may take."""
_FORKS = """
import importlib, os, sys
from pathlib import Path
main = importlib.import_module(sys.argv[1]).main
children = []
for rank in range(int(sys.argv[2])):
    if not (child := os.fork()):
        main(rank, Path(sys.argv[3]))
        os._exit(0)  # the end of an interpreter that has imported torch takes a second
    children.append(child)
os._exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def run_ranks(module: str, folder: Path) -> None:
    """Import a module, run its ``main(RANK, FOLDER)`` in a fork per rank, and wait; `main` calls `join` first."""
    command = [sys.executable, "-W", "ignore", "-c", _FORKS, module, str(WORLD), str(folder)]
    root = Path(brevact.__file__).parents[1]
    process = subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        errors = process.communicate(timeout=_TIMEOUT)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors


def join(rank: int, folder: Path) -> None:
    """Make this process one rank of `WORLD`, with one thread; all ranks have the same folder."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=100),
    )


def load_ranks(folder: Path) -> list[dict[str, object]]:
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]
