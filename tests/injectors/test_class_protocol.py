"""What Python, editors and notebooks ask of any class, asked of every injector class of `brevact.injectors`."""

from __future__ import annotations

import copy
import inspect
import pickle
import pydoc

import pytest
from brevitas.inject import ExtendedInjector
from dependencies.exceptions import DependencyError

import brevact.injectors
import brevact.quant
from brevact.injectors import (
    BackwardQuantSolver,
    LosslessBackward,
    SaveQuantized,
    StochasticRounding,
    StochBackward2bit,
    UniformBuckets,
)

EXPORTED = [
    found
    for name in brevact.injectors.__all__
    if isinstance(found := getattr(brevact.injectors, name), type) and issubclass(found, ExtendedInjector)
]
LEAVES = [found for found in EXPORTED if found.__name__.endswith(("Backward", "bit", "Mix"))]
OTHER_TOOLS = (
    "__wrapped__",
    "__code__",
    "__len_hint__",
    "__torch_function__",
    "__get_pydantic_core_schema__",
    "_partialmethod",
    "_ipython_display_",
    "_ipython_canary_method_should_not_exist_",
    "_repr_html_",
    "_repr_mimebundle_",
    "__dataclass_fields__",
    "__array__",
    "foo",
)
every_class = pytest.mark.parametrize("injector", EXPORTED, ids=lambda injector: injector.__name__)
every_leaf = pytest.mark.parametrize("injector", LEAVES, ids=lambda injector: injector.__name__)


class Incomplete(StochasticRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """Lacks a bit width."""


@every_class
def test_names_that_are_no_dependency_raise_attribute_errors(injector):
    for name in OTHER_TOOLS:
        assert not hasattr(injector, name)
        assert getattr(injector, name, 3) == 3
        with pytest.raises(AttributeError, match=rf"{injector.__name__} (has no attribute|wraps)"):
            getattr(injector, name)


@every_class
def test_tools_see_a_class(injector):
    assert bool(injector) and injector is (injector or None)
    assert inspect.unwrap(injector) is injector
    assert inspect.getmodule(injector).__name__ == injector.__module__
    assert repr(injector) == f"<class '{injector.__module__}.{injector.__name__}'>"
    assert copy.copy(injector) is injector and copy.deepcopy(injector) is injector
    assert pickle.loads(pickle.dumps(injector)) is injector
    assert dict(inspect.getmembers(injector)).keys() >= {"let"}
    assert pydoc.render_doc(injector)


@every_class
def test_calling_says_to_pass_the_class(injector):
    name = injector.__name__
    with pytest.raises(TypeError, match=rf"{name}\(\): .* pass the class itself: quantize_backward\(model, {name}\)"):
        injector()
    with pytest.raises(TypeError, match=rf"pass the class, with these settings: {name}\.let\(bucket_size=128\)"):
        injector(bucket_size=128)
    with pytest.raises(TypeError, match=rf"brevact\.quantizer\({name}\)\.quantize\(x\)"):
        injector(3)


def test_what_is_incomplete_can_be_looked_at():
    with pytest.raises(DependencyError, match="'bit_width' while building 'quantizer'"):
        _ = Incomplete.quantizer
    assert not hasattr(Incomplete, "quantizer")
    assert "Lacks a bit width" in pydoc.render_doc(Incomplete)
    assert "quantizer" not in dict(inspect.getmembers(Incomplete))


def test_an_unknown_attribute_names_the_nearest_setting():
    with pytest.raises(
        AttributeError, match=r"no attribute 'buket_size'; did you mean bucket_size\? Settings: .*save_"
    ):
        _ = StochBackward2bit.buket_size


def test_repr_shows_what_let_changed():
    changed = StochBackward2bit.let(bucket_size=128).let(min_numel=0, bucket_size=64)
    assert repr(changed) == "StochBackward2bit.let(bucket_size=64, min_numel=0)"
    assert pickle.loads(pickle.dumps(changed)).bucket_size == 64

    class StochBackward2bit_(StochBackward2bit):
        bucket_size = 64

    assert repr(StochBackward2bit_).startswith("<class ")
    assert repr(LosslessBackward.let(min_numel=0)) == "LosslessBackward.let(min_numel=0)"
