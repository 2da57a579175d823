"""Attributes of injector classes, as Python and editors look them up."""

from __future__ import annotations

import copy
import pickle

import pytest
from brevitas.inject import ExtendedInjector
from dependencies.exceptions import DependencyError

import brevact.injectors
from brevact.injectors import BackwardQuantSolver, SaveQuantized, StochasticRounding, StochBackward2bit, UniformBuckets

EXPORTED = [
    found
    for name in brevact.injectors.__all__
    if isinstance(found := getattr(brevact.injectors, name), type) and issubclass(found, ExtendedInjector)
]


class Incomplete(StochasticRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
    """Lacks a bit width."""


@pytest.mark.parametrize("injector", EXPORTED, ids=lambda injector: injector.__name__)
def test_tools_see_a_class(injector):
    for name in ("__torch_function__", "_repr_html_", "__dataclass_fields__", "foo"):
        assert getattr(injector, name, 3) == 3
        with pytest.raises(AttributeError, match=rf"{injector.__name__} has no attribute"):
            getattr(injector, name)
    assert bool(injector)
    assert pickle.loads(pickle.dumps(injector)) is injector is copy.deepcopy(injector)


def test_an_incomplete_quantizer_names_what_it_lacks():
    with pytest.raises(DependencyError, match="'bit_width' while building 'quantizer'"):
        _ = Incomplete.quantizer
    assert not hasattr(Incomplete, "quantizer")


def test_an_unknown_attribute_names_the_nearest_setting():
    with pytest.raises(
        AttributeError, match=r"no attribute 'buket_size'; did you mean bucket_size\? Settings: .*save_"
    ):
        _ = StochBackward2bit.buket_size
