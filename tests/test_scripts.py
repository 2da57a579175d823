"""Scripts of the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import front_picture, recompute_picture, way_of_a_tensor
from scripts.check_links import broken_links, main
from scripts.figure_results import Results


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


def test_the_picture_of_the_way_of_a_tensor_is_that_of_a_run():
    forward, backward = way_of_a_tensor.ways()
    assert way_of_a_tensor.PICTURE.read_text("utf-8") == way_of_a_tensor.picture(forward, backward)
    assert len(forward.stack) <= 9 and len(backward.stack) <= 6


def test_the_way_of_a_tensor_has_the_functions_that_return_before_the_kernel_starts():
    for way in way_of_a_tensor.ways():
        assert {*way.stack} < {*way.files}
        asked = {name for file, name in way.calls if file not in way.stack}
        assert asked and not any(name.endswith(("comp>", "<genexpr>")) for name in asked)
    assert str(way_of_a_tensor.Way([("a.py", "f"), ("b.py", "g"), ("a.py", "f")], [])) == "  3 calls in  2 files"


@pytest.mark.parametrize("route", way_of_a_tensor.ROUTES)
def test_a_convolution_enters_no_more_functions_than_it_did(route: str):
    """Bounds that only go down: a call inside a region costs them."""
    forward, backward = way_of_a_tensor.ways(route)
    assert len(forward.calls) <= 51 and len(forward.files) <= 24, forward
    assert len(backward.calls) <= 18 and len(backward.files) <= 12, backward


def test_front_picture_has_the_rows_of_each_model(tmp_path: Path):
    header = "model,policy,noise,ratio\n"
    rows = [f"net,DitherBackward{bits}bit,{1 / bits},{12 / bits}\n" for bits in (4, 2)]
    rows += ["net,DEFAULT,0.2,9\n", "net,fit:bytes=DEFAULT,0.1,9\n", "net,L4Backward,0.9,1\n"]
    (tmp_path / "noise.csv").write_text(header + "".join(rows))
    (panel,) = front_picture.draw(Results(tmp_path)).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in panel.lines}
    assert lines["one width"] == [[6, 0.5], [3, 0.25]] and lines["DEFAULT"] == [[9, 0.2]]
    assert [text.get_text() for text in panel.texts] == ["2 bits", "4 bits"]


def test_recompute_picture_has_the_rows_of_each_model(tmp_path: Path):
    rows = ["net,checkpoint of each block,3,0,1.4", "net,RECOMPUTE,40,0.05,1.3", "net,fit 15x,15,0.01,1.2"]
    (tmp_path / "recompute.csv").write_text("\n".join(["model,policy,ratio,error,step", *rows, ""]))
    (panel,) = recompute_picture.draw(Results(tmp_path)).axes
    points = {line.get_label(): line.get_xydata().tolist() for line in panel.lines}
    assert points["RECOMPUTE"] == [[40, 0.05]] and points["checkpoint of each block"] == [[3, recompute_picture.EXACT]]
    assert sorted(text.get_text() for text in panel.texts) == ["1.20", "1.30", "1.40"]
