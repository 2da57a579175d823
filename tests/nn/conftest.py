"""Fixtures of the layers' tests."""

from tests.injectors.conftest import saved_bytes as saved_bytes
