"""`python -m benchmarks.dispatch`: a row for each function, with brevact's calls."""

from benchmarks import dispatch


def test_plain_functions_call_nothing_of_brevact(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["dispatch", "--only", "functions", "--rounds", "1"])
    dispatch.main()
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == list(dispatch.functions())
    assert all("(  0 +  0 of  0 +  0)" in row and row.count("(") == len(dispatch.REGIONS) for row in rows)
