"""A page of the documentation whose parts between marks are written anew from the rows; all else on it is left.

<!-- study: main -->
...
<!-- end -->
"""

import re
from pathlib import Path

from recipes.errors import RecipeError
from recipes.files import write_atomically

_PART = r"(<!-- study: {} -->\n).*?(<!-- end -->)"


def replace_part(page: Path, name: str, text: str) -> None:
    """Writes a part of a page anew.

    Args:
        page: in Markdown.
        name: of the part.
        text: that is to be between its marks.

    Raises:
        RecipeError: the page has no such part.
    """
    content = page.read_text("utf-8")
    changed, count = re.subn(
        _PART.format(re.escape(name)), lambda marks: f"{marks[1]}\n{text}\n\n{marks[2]}", content, flags=re.S
    )
    if not count:
        raise RecipeError(f"--page {page} has no part <!-- study: {name} --> ... <!-- end -->; add one")
    write_atomically(page, lambda file: file.write(changed.encode()))
