import pytest

from benchmarks.scaling import VARIANTS, cases, main


def test_cases_grow_in_one_size_alone():
    over_depth = cases("depth", (2, 4), ("plain",))
    assert [(case.model, case.batch_size, case.depth) for case in over_depth] == [("mlp", 1024, 2), ("mlp", 1024, 4)]
    over_batch = cases("batch", (8, 16))
    assert {(case.batch_size, case.depth) for case in over_batch} == {(8, 1), (16, 1)}
    assert {case.variant for case in over_batch} == set(VARIANTS)


def test_main_names_the_allocators_that_are_there(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(["--allocator", "glibcc", "--draw"])
    assert stopped.value.code == 2
    assert "no glibcc here; found: glibc, glibc-learning, glibc-small-pages, glibc-mapped" in capsys.readouterr().err
