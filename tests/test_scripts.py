"""Scripts of the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.check_links import broken_links, main


def test_broken_links_finds_what_leads_nowhere(tmp_path: Path, capsys):
    (tmp_path / "other.html").write_text('<h2 id="here">x</h2>', "utf-8")
    (tmp_path / "index.html").write_text(
        '<a href="other.html#here">1</a><a href="https://example.org/x">2</a><a href="#there">3</a>'
        '<a href="missing.html">4</a><img src="gone.png"><a href="other.html#nowhere">5</a><i id="there"></i>',
        "utf-8",
    )
    expected = [f"index.html: {link}" for link in ("missing.html", "gone.png", "other.html#nowhere")]
    assert broken_links(tmp_path) == expected
    assert main(str(tmp_path)) == 1 and capsys.readouterr().out.splitlines() == expected


def test_broken_links_refuses_a_folder_without_pages(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="has no page; accepted is what make docs has built"):
        broken_links(tmp_path / "sight")
