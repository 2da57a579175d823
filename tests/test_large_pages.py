"""Large pages of large tensors: asked for by the import, unless the user has decided."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "brevact" / "large_pages.py"


@pytest.mark.parametrize(("set_before", "found"), [(None, "1"), ("0", "0"), ("1", "1")])
def test_importing_asks_for_large_pages_unless_the_user_has_decided(set_before: str | None, found: str):
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    if set_before is not None:
        environment["THP_MEM_ALLOC_ENABLE"] = set_before
    code = f"import os, runpy; runpy.run_path({str(SOURCE)!r}); print(os.environ['THP_MEM_ALLOC_ENABLE'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found


def test_the_package_imports_it_first():
    import brevact

    names = [name for name in sys.modules if name.startswith("brevact.")]
    assert brevact.__name__ and names[0] == "brevact.large_pages"


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="needs large pages of Linux"
)
def test_a_tensor_made_after_the_import_lies_in_large_pages():
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("large pages are off")
    code = "import torch, brevact; x = torch.ones(1 << 24); print(open('/proc/self/smaps_rollup').read())"
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("AnonHugePages"))
    assert int(line.split()[1]) > 32 * 1024  # KiB, of 64 MiB
