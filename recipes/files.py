"""Files of a run, each written whole or not at all."""

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

from recipes.errors import RecipeError


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Writes a file under another name and renames it, so that an interruption leaves the old content in place."""

    def write_file(temporary: Path) -> None:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())

    write_path_atomically(path, write_file)


def write_path_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Like `write_atomically`, for a function that takes a path; the one it is given has the suffix of `path`."""
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(folder: Path, option: str = "--out-dir") -> None:
    """Finds out whether files can be written to a folder, which need not exist yet, and leaves nothing there."""
    missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RecipeError(
            f"cannot write to {folder} ({error.strerror or error}); name another folder with {option}"
        ) from error
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def write_json(path: Path, content: object) -> None:
    text = json.dumps(content, indent=2) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def read_json(path: Path) -> object:
    """Reads a file of `write_json`."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path} is not readable ({error}); start a new run") from error


def write_rows(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row[column]) for column in columns] for row in rows)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_checkpoint(path: Path, content: dict[str, object]) -> None:
    """Writes a checkpoint that `read_checkpoint` accepts: tensors, numbers, strings and containers of them."""
    write_atomically(path, lambda file: torch.save(content, file))


def read_checkpoint(path: Path) -> dict[str, object]:
    """Reads a checkpoint; it can hold no code."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise RecipeError(f"no run to resume: there is no {path}; --resume takes the folder of a run") from error
    except Exception as error:  # a damaged stream of opcodes can raise nearly anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise RecipeError(f"{path} is not a readable checkpoint ({reason}); start a new run") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{path} is not a checkpoint: it holds a {type(content).__name__}; start a new run")
    return content


def _cell(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)
