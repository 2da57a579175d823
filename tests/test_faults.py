"""The faults that the suite is to find can be put in, and the tests that are to find them exist."""

from scripts.faults import FAULTS, ROOT


def test_faults_are_of_this_tree():
    for fault in FAULTS:
        assert (ROOT / "brevact" / fault.file).read_text("utf-8").count(fault.old) == 1, fault.name
        assert fault.new != fault.old and all((ROOT / "tests" / test).exists() for test in fault.tests), fault.name
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
