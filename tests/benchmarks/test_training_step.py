import pytest

from benchmarks.training_step import main


def test_main_names_the_nearest_quantizer(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--policies", "StochBackward2bt"])
    assert stopped.value.code == 2
    message = "StochBackward2bt is not a backward quantizer or policy of brevact; nearest: StochBackward2bit"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--rounds", "--batch-size"])
def test_main_refuses_numbers_below_1(option, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([option, "0"])
    assert stopped.value.code == 2 and f"{option} 0 is not possible: use at least 1" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_main_prints_a_row_for_each_variant(capsys):
    main(["--model", "efficientnetv2-nano", "--batch-size", "2", "--image-size", "32", "--rounds", "1"])
    title, *table = capsys.readouterr().out.splitlines()
    assert title.endswith("M parameters, batch 2, 32x32")
    header, *rows = [line.split() for line in table[-4:]]
    assert [row[header.index("stored")] for row in rows] == ["plain", "DEFAULT", "StochBackward2bit"]
    assert float(rows[1][header.index("kept_ratio")]) > 2
