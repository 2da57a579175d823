"""A short form of any object, for the message of an error."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_LONGEST = 80


class _Brief(reprlib.Repr):
    """Cuts long texts; tensors, modules and classes by their kind, wherever they are nested."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _LONGEST
        self.maxlevel, self.maxdict = 3, 4
        self.maxlist = self.maxtuple = self.maxset = 4

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, Tensor):
            return f"<{str(x.dtype).removeprefix('torch.')} {type(x).__name__} of shape {tuple(x.shape)}>"
        if isinstance(x, nn.Module):
            return f"<{type(x).__name__} module>"
        if isinstance(x, type):
            return f"<class {x.__name__}>"
        if type(x) is torch.Size:
            return str(tuple(x))
        return super().repr1(x, level)


def brief(value: object) -> str:
    """Return a form of one line that names any object: tensors and modules by their kind, long texts cut.

    >>> brief(torch.nn.Sequential(torch.nn.Linear(8, 8)))
    '<Sequential module>'
    >>> brief([torch.zeros(8, 3), "text", 2])
    "[<float32 Tensor of shape (8, 3)>, 'text', 2]"
    """
    return " ".join(_Brief().repr(value).split())


def did_you_mean(name: str, accepted: Iterable[str]) -> str:
    """Return the beginning of a sentence that names the nearest accepted one; "" where none is near."""
    nearest = difflib.get_close_matches(name, list(accepted), n=1)
    return f"did you mean {nearest[0]}? " if nearest else ""
