"""Look-ups by the permutations of each kind of processor, and by none, are those of the reference."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
from llvmlite import binding


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the features are those of x86")
@pytest.mark.exhaustive
@pytest.mark.parametrize("features", ["+sse2", "+avx2"])
def test_processors_with_other_permutations(features: str, tmp_path):
    if not binding.get_host_cpu_features().get(features[1:]):
        pytest.skip(f"this processor lacks {features[1:]}")
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "x86-64",
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    script = (
        "from brevact.cpu_kernels import intrinsics, launch\n"
        "from tests.quantizers.kernel_op_cases import check_kernel_op\n"
        "from numba.core.registry import cpu_target\n"
        f"assert intrinsics._lanes_of(cpu_target.target_context) == {8 if features == '+avx2' else 'intrinsics.NONE'}\n"
        "check_kernel_op('look_up', launch)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
