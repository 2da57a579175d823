"""Files of a folder of runs, each written whole or not at all."""

import csv
import io
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import torch

from recipes.recipe import RecipeError, option

SETTINGS, RUNS, EPOCHS, CHECKPOINT = "settings.json", "runs.csv", "epochs.csv", "checkpoint.pt"


def open_folder(folder: Path, settings: Mapping[str, object], *, resume: bool, overwrite: bool = False) -> None:
    """Writes down which settings the runs of a folder have, or finds out that they have these."""
    _check_writable(folder)
    path = folder / SETTINGS
    if overwrite:
        for name in (SETTINGS, RUNS, EPOCHS, CHECKPOINT):
            (folder / name).unlink(missing_ok=True)
    if not path.exists():
        if resume:
            raise RecipeError(f"no runs to resume: there is no {path}; leave --resume out")
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(json.dumps(settings, indent=2).encode() + b"\n"))
    elif not resume:
        raise RecipeError(
            f"{folder} already holds runs; go on with --resume, replace them with --overwrite, or name another folder "
            "with --out-dir"
        )
    else:
        found = json.loads(path.read_bytes())
        if names := [option(name) for name in settings if found.get(name) != settings[name]]:
            raise RecipeError(
                f"the runs in {folder} have other settings ({', '.join(names)}): give theirs, which are in {path}, or "
                "name another folder with --out-dir"
            )


def leave_folder(folder: Path) -> None:
    """Forgets the settings of a folder without runs, so that a mended command starts there."""
    if not any((folder / name).exists() for name in (RUNS, CHECKPOINT)):
        (folder / SETTINGS).unlink(missing_ok=True)


def _check_writable(folder: Path) -> None:
    """Finds out whether files can be written to a folder, which need not exist yet, and leaves nothing there."""
    missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RecipeError(
            f"cannot write to {folder} ({error.strerror or error}); name another folder with --out-dir"
        ) from error
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Writes a file under another name and renames it, so that an interruption leaves the old content in place."""
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_rows(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row[column]) for column in columns] for row in rows)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV; none where there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_checkpoint(path: Path, content: dict[str, object]) -> None:
    """Writes a checkpoint that `read_checkpoint` accepts: tensors, numbers, strings and containers of them."""
    write_atomically(path, lambda file: torch.save(content, file))


def read_checkpoint(path: Path) -> dict[str, object]:
    """Reads a checkpoint; it can hold no code."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged stream of opcodes can raise nearly anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise RecipeError(
            f"{path} is not a readable checkpoint ({reason}); remove it to start that run anew"
        ) from error
    if not isinstance(content, dict):
        raise RecipeError(f"{path} holds a {type(content).__name__}, no checkpoint; remove it to start that run anew")
    return content


def _cell(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)
