"""Two processes of a distributed run: a module is started once a rank, and leaves in a folder what it measures."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

import torch
from torch import distributed

import brevact

WORLD = 2
_TIMEOUT = 240
"""Seconds that the processes may take."""


def run_ranks(module: str, folder: Path) -> None:
    """Start a module once for each rank, as ``python -m module RANK FOLDER``, and wait for all of them.

    Args:
        module: its name; it calls `join` first.
        folder: for what the processes leave.
    """
    root = Path(brevact.__file__).parents[1]
    command = [sys.executable, "-W", "ignore", "-m", module]
    processes = [
        subprocess.Popen([*command, str(rank), str(folder)], cwd=root, stderr=subprocess.PIPE, text=True)
        for rank in range(WORLD)
    ]
    try:
        errors = [process.communicate(timeout=_TIMEOUT)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)


def join(rank: int, folder: Path) -> None:
    """Make this process the one of a rank, with one thread.

    Args:
        rank: below `WORLD`.
        folder: the same for all.
    """
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=100),
    )


def load_ranks(folder: Path) -> list[dict[str, object]]:
    """What each process has saved as ``RANK.pt``."""
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]
