from pathlib import Path

import pytest

from benchmarks.records import append_rows, read_rows
from benchmarks.scaling import COLUMNS, VARIANTS, cases, draw, main


def test_cases_grow_in_one_size_alone():
    over_depth = cases("depth", (2, 4), ("plain",))
    assert [(case.model, case.batch_size, case.depth) for case in over_depth] == [("mlp", 1024, 2), ("mlp", 1024, 4)]
    over_batch = cases("batch", (8, 16))
    assert {(case.batch_size, case.depth) for case in over_batch} == {(8, 1), (16, 1)}
    assert {case.variant for case in over_batch} == set(VARIANTS)


def test_draw_shows_the_last_row_of_each_case(tmp_path: Path):
    path = tmp_path / "rows.csv"
    for growth in (1000.0, 10.0):
        row = {**dict.fromkeys(COLUMNS, ""), "part": "batch", "variant": "plain", "batch_size": 8, "depth": 1}
        append_rows([{**row, "kept_mib": 1.0, "growth_mib": growth, "cpu_s": 0.5}], str(path))
    append_rows([{**row, "variant": "DEFAULT", "error": "exit code 1"}], str(path))
    draw(read_rows(str(path)), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_main_names_the_allocators_that_are_there(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(["--allocator", "glibcc", "--draw"])
    assert stopped.value.code == 2
    assert "no glibcc here; found: glibc, glibc-learning, glibc-small-pages, glibc-mapped" in capsys.readouterr().err
