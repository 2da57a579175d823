"""Files of a run, each written whole or not at all."""

import csv
import json
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import torch

from recipes.errors import RecipeError


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Writes a file under another name and renames it, so that an interruption leaves the old content in place.

    Args:
        path: the file; its folder exists.
        write: writes the content to the binary file it is given.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: object) -> None:
    """Writes `content` as indented JSON."""
    text = json.dumps(content, indent=2) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def write_rows(path: Path, columns: Sequence[str], rows: Sequence[dict[str, object]]) -> None:
    """Writes a CSV file with a header."""

    def write(file: IO[bytes]) -> None:
        lines = [",".join(columns), *(",".join(_cell(row[column]) for column in columns) for row in rows)]
        file.write("".join(line + "\n" for line in lines).encode())

    write_atomically(path, write)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a header."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_checkpoint(path: Path, content: dict[str, object]) -> None:
    """Writes a checkpoint that `read_checkpoint` accepts: tensors, numbers, strings and containers of them."""
    write_atomically(path, lambda file: torch.save(content, file))


def read_checkpoint(path: Path) -> dict[str, object]:
    """Reads a checkpoint; it can hold no code.

    Args:
        path: of the file.

    Returns:
        Its content, with every tensor on the CPU.

    Raises:
        RecipeError: there is none, or it is damaged.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise RecipeError(f"no run to resume: there is no {path}; --resume takes the folder of a run") from error
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise RecipeError(f"{path} is not a readable checkpoint ({reason}); start a new run") from error


def _cell(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)
