"""Optional libraries that examples and pages need, which `make test-all` installs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest


def marks_of(libraries: Sequence[str]) -> list[pytest.MarkDecorator]:
    """Return the marks of a test that needs libraries, skipped where one is missing; none without libraries."""
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    reason = f"not installed: {', '.join(missing)} (make test-all installs them)"
    return [pytest.mark.exhaustive, pytest.mark.skipif(bool(missing), reason=reason)] if libraries else []
