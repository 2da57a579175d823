"""The rows of finished runs: a CSV that several processes, and several commands, may add to at the same time."""

import csv
import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from recipes import files
from recipes.errors import RecipeError
from recipes.study.run import KEY, Key, Run
from recipes.study.training import COLUMNS, LISTS, NUMBERS, Row


def read(path: Path) -> dict[Key, Row]:
    """The rows of a file, by what tells runs apart; none where there is no such file.

    Args:
        path: of the CSV.

    Raises:
        RecipeError: it cannot be read, has other columns, or a row is damaged.
    """
    rows = read_of(path, COLUMNS)
    for number, row in enumerate(rows, start=2):
        if not _is_whole(row):
            raise RecipeError(f"--csv {path}: line {number} is damaged; delete it, and its run is trained again")
    return {tuple(row[name] for name in KEY): row for row in rows}


def read_of(path: Path, columns: Sequence[str]) -> list[Row]:
    """The rows of a file of any study; none where there is no such file.

    Args:
        path: of the CSV.
        columns: that it is to have.

    Raises:
        RecipeError: it cannot be read, or has other columns.
    """
    if not path.exists():
        return []
    try:
        rows = files.read_rows(path)
    except (OSError, UnicodeError, csv.Error) as error:
        raise RecipeError(f"--csv {path} is not readable ({error}); name another file") from error
    if rows and tuple(name for name in rows[0] if name is not None) != tuple(columns):
        raise RecipeError(
            f"--csv {path} has the columns {', '.join(map(str, rows[0]))}; studies write {', '.join(columns)}; name "
            "another file"
        )
    return rows


def _is_whole(row: Row) -> bool:
    """Whether a row has every column, with numbers in those of numbers."""
    if set(row) != set(COLUMNS) or None in row.values() or not row[COLUMNS[-1]]:
        return False
    try:
        for name in NUMBERS:
            float(row[name])
        for name in LISTS:
            list(map(float, row[name].split()))
    except ValueError:
        return False
    return True


def add(path: Path, row: Row) -> None:
    """Adds a row, unless the file has one of that run; the file is replaced as a whole.

    Args:
        path: of the CSV, made if it is missing.
        row: with the keys `COLUMNS`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path, "rows"):
        rows = read(path)
        rows.setdefault(tuple(row[name] for name in KEY), row)
        files.write_rows(path, COLUMNS, list(rows.values()))


@contextmanager
def claimed(path: Path, run: Run) -> Iterator[bool]:
    """A block that trains a run; whether it may: no other process is in such a block for the same run and file.

    Args:
        path: of the CSV.
        run: to be trained.
    """
    lock = locked(path, " ".join(run.key))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def locked(path: Path, words: str) -> FileLock:
    """A lock that ends with its process. Its file is not beside the CSV, which may be under version control."""
    digest = hashlib.sha256(f"{path.resolve()} {words}".encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / "brevact-studies"
    folder.mkdir(exist_ok=True)
    return FileLock(folder / f"{digest}.lock")
