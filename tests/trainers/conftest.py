"""Trainers of other libraries, where they are installed: `make test-all` installs them."""

import importlib.util

import pytest

collect_ignore = ["launched.py", "running.py", "sharded.py"]  # they import libraries, for seconds, and have no examples
PACKAGES = ("accelerate", "bitsandbytes", "lightning", "peft", "transformers", "trl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests of this folder that are marked `exhaustive` where a library is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    for item in items:
        if missing and "/tests/trainers/" in item.path.as_posix() and item.get_closest_marker("exhaustive"):
            item.add_marker(
                pytest.mark.skip(reason=f"not installed: {', '.join(missing)} (make test-all installs them)")
            )
