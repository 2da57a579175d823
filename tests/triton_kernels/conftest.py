"""Triton is a dependency on Linux only."""

import importlib.util
import os

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["*.py"]

if os.environ.get("TRITON_INTERPRET") == "1" and not collect_ignore_glob:
    from tests.triton_kernels.interpreter import quicken

    quicken()
