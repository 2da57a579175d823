"""A progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(name: str, total: int | None, is_shown: bool) -> Iterator[Callable[[], object]]:
    """Yield a function to call after each pass: it advances a tqdm bar, shown after 3 s, if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda: None
        return
    with tqdm(total=total, desc=name, unit="pass", delay=3, disable=not is_shown) as bar:
        yield bar.update
