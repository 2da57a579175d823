"""Check that every link and picture of a built site leads somewhere: to a page, a file, a place on a page.

Run it on the folder that ``make docs`` writes: ``python -m scripts.check_links site``. Addresses of other sites are not
asked for.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The places of a page, and what it links to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note ids, addresses of links and sources of pictures."""
        for name, value in attrs:
            if value and (name == "id" or (tag == "a" and name == "name")):
                self.places.add(value)
            if value and name in ("href", "src"):
                self.links.append(value)


def broken_links(folder: Path) -> list[str]:
    """Return what leads nowhere.

    Args:
        folder: the built site.

    Returns:
        A line each: the page and the link.

    Raises:
        FileNotFoundError: The folder has no page.
    """
    pages = {path.resolve(): Page(path.read_text("utf-8")) for path in sorted(folder.rglob("*.html"))}
    if not pages:
        raise FileNotFoundError(f"folder: {folder} has no page; accepted is what make docs has built: site")
    broken = []
    for path, page in pages.items():
        for link in page.links:
            address = urlsplit(link)
            if address.scheme or address.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            if target.is_dir():
                target /= "index.html"
            place = unquote(address.fragment)
            known = pages[target].places if target in pages else set()
            if not target.exists() or (place and target in pages and place not in known):
                broken.append(f"{path.relative_to(folder.resolve())}: {link}")
    return broken


def main(folder: str = "site") -> int:
    """Print what leads nowhere; return the exit status."""
    broken = broken_links(Path(folder))
    print("\n".join(broken) if broken else "all links lead somewhere")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
