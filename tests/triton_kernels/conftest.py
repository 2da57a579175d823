"""Triton is a dependency on Linux only."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["*.py"]
