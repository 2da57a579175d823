"""The rows of finished runs: a CSV that several processes, and several commands, may add to at the same time."""

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from recipes import files
from recipes.errors import RecipeError
from recipes.study.run import KEY, Key, Run
from recipes.study.training import COLUMNS, Row


def read(path: Path) -> dict[Key, Row]:
    """The rows of a file, by what tells runs apart; none where there is no such file.

    Args:
        path: of the CSV.

    Raises:
        RecipeError: it has other columns.
    """
    if not path.exists():
        return {}
    rows = files.read_rows(path)
    if rows and tuple(rows[0]) != COLUMNS:
        raise RecipeError(
            f"--csv {path} has the columns {', '.join(rows[0])}; studies write {', '.join(COLUMNS)}; name another file"
        )
    return {tuple(row[name] for name in KEY): row for row in rows}


def add(path: Path, row: Row) -> None:
    """Adds a row, unless the file has one of that run; the file is replaced as a whole.

    Args:
        path: of the CSV, made if it is missing.
        row: with the keys `COLUMNS`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path, "rows"):
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
    lock = _lock(path, " ".join(run.key))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _lock(path: Path, words: str) -> FileLock:
    """A lock that ends with its process. Its file is not beside the CSV, which may be under version control."""
    digest = hashlib.sha256(f"{path.resolve()} {words}".encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / "brevact-studies"
    folder.mkdir(exist_ok=True)
    return FileLock(folder / f"{digest}.lock")
