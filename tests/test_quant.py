"""Modules of the backward quantizers, and the names that `brevact` lists."""

from __future__ import annotations

import copy
import inspect
import pickle
import types

import brevitas.quant
import pytest
import torch

import brevact
import brevact.api
import brevact.quant
from brevact.policy.files import LEAVES
from scripts import leaf_stub

LEADING = {
    "DualPrecisionBackward2bit",
    "L4Backward",
    "LosslessBackward",
    "NearestBackward4bit",
    "StochBackward2bit",
    "StochBackward2bit4bitMix",
    "WeibullBackward3bit",
}
NAMES = {name: found for name, found in vars(brevact.api).items() if not name.startswith("_")}


def test_quant_has_the_leaves_and_nothing_else():
    public = {name for name in dir(brevact.quant) if not name.startswith("_")}
    assert public == set(LEAVES) and len(public) >= 67
    widths = {f"{word}Backward{bits}bit" for word in ("Stoch", "Nearest", "Dither") for bits in range(1, 9)}
    assert widths <= public
    assert not public & set(dir(brevitas.quant))


@pytest.mark.parametrize("name", LEAVES)
def test_leaves_are_found_by_name_and_pickled_by_name(name: str):
    leaf = getattr(brevact.quant, name)
    assert leaf is getattr(brevact, name) is getattr(brevact.injectors, name) is LEAVES[name]
    assert leaf.__name__ == leaf.__qualname__ == name and inspect.getmodule(leaf).__name__ == leaf.__module__
    assert pickle.loads(pickle.dumps(leaf)) is leaf is copy.deepcopy(leaf)
    other = pickle.loads(pickle.dumps(leaf.let(min_numel=3)))
    assert other.backward_settings == leaf.let(min_numel=3).backward_settings and issubclass(other, leaf)


def test_package_lists_verbs_policies_and_the_leading_leaves():
    listed = {name for name in dir(brevact) if not name.startswith("__")}
    modules = {name for name in listed if isinstance(getattr(brevact, name), types.ModuleType)}
    assert modules == {"distributed", "nn", "quant", "quantizers"}
    assert listed - modules - {"compile"} == set(brevact.__all__)  # `import *` leaves Python's function alone
    assert listed & set(LEAVES) == LEADING
    policies = {name for name, found in NAMES.items() if isinstance(found, brevact.Policy)}
    verbs = {name for name, found in NAMES.items() if inspect.isfunction(found)}
    assert {"CONV_NET", "DEFAULT", "TRANSFORMER"} <= policies <= listed
    assert {"fit", "memory_report", "quantize_backward"} <= verbs <= listed
    assert len(listed - policies - verbs - modules - LEADING) <= 8  # classes that are written in policies


def test_star_import_leaves_the_names_of_others_alone():
    names = {"nn": torch.nn, "__version__": "1"}
    exec("from brevact import *", names)
    assert names["nn"] is torch.nn and names["__version__"] == "1" and names["fit"] is brevact.fit


def test_every_name_of_the_interface_is_importable():
    for name, found in NAMES.items():
        assert getattr(brevact, name) is found


def test_declarations_for_type_checkers_are_those_of_the_classes():
    assert leaf_stub.STUB.read_text("utf-8") == leaf_stub.stub(), "run python -m scripts.leaf_stub"
