import csv

import pytest

from benchmarks.records import write_rows


def test_write_rows_appends_below_one_header(tmp_path, capsys):
    path = tmp_path / "rows.csv"
    write_rows([{"name": "a", "ms": 1}], str(path))
    write_rows([{"name": "b", "ms": 2}], str(path))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["ms"]) for row in rows] == [("a", "1"), ("b", "2")]
    assert {"device", "threads", "torch"} < rows[0].keys()
    assert capsys.readouterr().out.splitlines()[:2] == ["name  ms", "   a   1"]


def test_write_rows_writes_a_header_to_an_empty_file(tmp_path):
    path = tmp_path / "rows.csv"
    path.touch()
    write_rows([{"name": "a"}], str(path))
    assert path.read_text().startswith("name,")


@pytest.mark.parametrize("other", [{"name": "b"}, {"ms": 2, "name": "b"}, {"name": "b", "ms": 2, "extra": 3}])
def test_write_rows_refuses_a_file_with_other_columns(tmp_path, other):
    path = tmp_path / "rows.csv"
    write_rows([{"name": "a", "ms": 1}], str(path))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"rows.csv' has the columns name, ms, .*name another file"):
        write_rows([other], str(path))
    assert path.read_bytes() == before
