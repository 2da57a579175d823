"""Changes of a process by the import, and those that wait for the first packed tensor: `docs/gpu.md`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VARIABLE = "THP_MEM_ALLOC_ENABLE"
#: Prints the changes at the import, in a region that packs nothing, and in one that packs.
CODE = """
import atexit, copyreg, gc, json, logging, os, signal, sys, threading, warnings
import brevitas, brevitas.nn, brevitas.quant, brevitas.core.quant, brevitas.core.stats, brevitas.proxy
import brevitas.inject.defaults, torch
from torch.nn.modules import module as modules

def everything():
    found = {f"environ {name}": value for name, value in os.environ.items()}
    found |= {f"pickler {kind.__module__}.{kind.__name__}": id(each) for kind, each in copyreg.dispatch_table.items()}
    found |= {f"hooks {name}": len(each) for name, each in vars(modules).items() if name.startswith("_global_")
              and isinstance(each, dict)}
    found |= {f"thread {each.name}": 1 for each in threading.enumerate()}
    found |= {f"signal {each}": str(signal.getsignal(each)) for each in signal.valid_signals()}
    found |= {f"sys {name}": repr(getattr(sys, name)) for name in ("excepthook", "displayhook", "meta_path", "path")}
    found |= {f"logger {name}": len(each.handlers) for name, each in logging.root.manager.loggerDict.items()
              if isinstance(each, logging.Logger)}
    found |= {"filters": len(warnings.filters), "threads": torch.get_num_threads(), "gc": gc.get_threshold(),
              "dtype": str(torch.get_default_dtype()), "random": torch.get_rng_state().sum().item()}
    for name, module in list(sys.modules.items()):
        if module is not None and name.split(".")[0] in ("brevitas", "torch", "dependencies"):
            for kind in list(vars(module).values()):
                if isinstance(kind, type) and kind.__module__ == name:
                    for attribute, each in list(vars(kind).items()):
                        if callable(each) or isinstance(each, (property, staticmethod, classmethod)):
                            found[f"class {name}.{kind.__qualname__}.{attribute}"] = id(each)
    return found

def changes(before, after):
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))

keep = everything()
import brevact
imported = everything()
x, weight = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
seen = everything()
with brevact.backward_quant(None):
    x.sin()
nothing = everything()
with brevact.backward_quant(brevact.StochBackward4bit):
    x.sin()
first = everything()
print(json.dumps([changes(keep, imported), changes(seen, nothing), changes(nothing, first)]))
"""
#: Classes of Brevitas whose forward asks for a region.
ASKING = {
    *(
        "BinaryQuant",
        "ClampedBinaryQuant",
        "DecoupledIntQuant",
        "FloatQuant",
        "IntQuant",
        "RescalingIntQuant",
        "TernaryQuant",
    ),
    *("FusedActivationQuantProxy", "_Stats"),
}


def _run(code: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "BREVITAS_JIT")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def changed() -> list[list[str]]:
    """Names changed by the import, in a region that packs nothing, and in the first one that packs."""
    return json.loads(_run(CODE))


def test_the_import_changes_what_the_page_lists(changed: list[list[str]]):
    own = [name for name in changed[0] if not re.search(r"^(class torch\.|logger (?!brevact))|brevact\.", name)]
    layers = [name for name in own if re.fullmatch(r"class brevitas\.nn\.\S+\.__init__", name)]
    assert len(layers) > 20
    assert set(own) - set(layers) == {
        f"environ {VARIABLE}",
        "logger brevact",
        "pickler brevitas.inject._ExtendedInjectorType",
        "class brevitas.inject._ExtendedInjectorType.__getattr__",
    }


def test_a_region_that_packs_nothing_changes_nothing(changed: list[list[str]]):
    assert changed[1] == []


def test_the_first_region_that_packs_replaces_what_the_page_lists(changed: list[list[str]]):
    replaced = {tuple(name.rsplit(".", 2)[1:]) for name in changed[2] if name.startswith("class ")}
    of_checkpoints = {("_checkpoint_hook", f"__{name}__") for name in ("enter", "exit")}
    assert replaced == {*of_checkpoints, *((kind, "forward") for kind in (*ASKING, "SyncBatchNorm"))}
    others = [name for name in changed[2] if not name.startswith(("class ", "thread brevact", "logger "))]
    assert set(others) <= {"random"}


def test_no_variable_of_the_environment_is_the_packages_own():
    for path in [*(ROOT / "brevact").rglob("*.py"), *(ROOT / "docs").glob("*.md")]:
        assert not re.search(r"BREVACT_[A-Z]", path.read_text("utf-8")), path
