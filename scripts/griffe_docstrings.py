"""Docstrings as Markdown: roles become code, and ``>>>`` examples become blocks of code. For the API reference."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:func|class|meth|data|attr|mod):`~?\.?([^`]+)`")
_PATTERN = re.compile(r'(?<!`)"[^"`\n]*\*[^"`\n]*"(?!`)')
_EXAMPLE = re.compile(r"(^>>> .*(?:\n.+)*)", re.M)


class Markdown(Extension):
    """Rewrites each docstring once, before it is parsed."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Return a docstring as Markdown."""
    text = _ROLE.sub(lambda found: f"`{found[1]}`", text).replace("``", "`")
    parts = _EXAMPLE.split(text)
    prose = [_PATTERN.sub(lambda found: f"`{found[0]}`", part) for part in parts[::2]]
    examples = [f"```pycon\n{part}\n```" for part in parts[1::2]]
    return "".join(part for pair in zip(prose, [*examples, ""], strict=True) for part in pair)
