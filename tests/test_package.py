"""The package as pip builds it: contents of the wheel and the sdist, and the wheel outside of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import brevact

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
#: The formats whose tables are files, without a compiler: a fresh folder has no compiled kernels.
USE = """
import importlib.metadata, pathlib, sys, warnings
warnings.simplefilter("ignore")
import torch, brevact, brevact.nn
home = pathlib.Path(sys.argv[1])
assert home in pathlib.Path(brevact.__file__).parents, brevact.__file__
assert importlib.metadata.version("brevact") == brevact.__version__ == sys.argv[2]
x = torch.randn(64, 128, requires_grad=True)
for quantizer in (brevact.StochBackward2bit, brevact.WeibullBackward2bit, brevact.DualPrecisionBackward2bit):
    with brevact.backward_quant(quantizer):
        out = x.sin()
    out.sum().backward()
    assert x.grad.isfinite().all()
"""


def _run(*args: object, cwd: Path, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        env={**os.environ, **environment},
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()[-1] if run.stdout else ""


def _beside_the_package(folder: str, names: list[str]) -> set[str]:
    """Names that a copy of the checkout leaves out: caches, results, and a build's folders."""
    kept = {"brevact", "recipes", *(name for name in names if Path(folder, name).is_file())}
    return set(names) - kept if Path(folder) == ROOT else {"__pycache__"} & set(names)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist, which is built from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("package")
    checkout = folder / "checkout"
    shutil.copytree(ROOT, checkout, ignore=_beside_the_package)
    sdist = folder / _run("-c", BUILD.format(kind="sdist"), folder, cwd=checkout)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    source = folder / sdist.name.removesuffix(".tar.gz")
    return folder / _run("-c", BUILD.format(kind="wheel"), folder, cwd=source)


@pytest.mark.exhaustive
def test_wheel_from_the_sdist_has_every_file_of_the_package_and_no_other(wheel: Path):
    expected = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "brevact").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"brevact-{brevact.__version__}.dist-info/METADATA").decode()
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "brevact/py.typed" in names and any(name.endswith("formats/weibull_levels.bin") for name in names)
    assert f"brevact-{brevact.__version__}.dist-info/licenses/LICENSE" in names
    assert re.search(r"^Requires-Dist: torch<[\d.]+,>=2\.11$", metadata, re.M)


@pytest.mark.exhaustive
def test_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path):
    home = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home)
    _run("-c", USE, home, brevact.__version__, cwd=tmp_path, PYTHONPATH=str(home), NUMBA_DISABLE_JIT="1")


def test_the_citation_and_the_changelog_name_the_version():
    assert f"\nversion: {brevact.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{brevact.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
