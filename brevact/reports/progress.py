"""A progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(name: str, total: int | None, is_shown: bool) -> Iterator[Callable[[], object]]:
    """Yield a function to call after each pass; it moves a bar of tqdm's, where that is installed, after some seconds.

    The number of passes is None if nobody knows.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda: None
        return
    with tqdm(total=total, desc=name, unit="pass", delay=3, disable=not is_shown) as bar:
        yield bar.update
