"""Quantizers as text, by the place of their class."""

from dataclasses import dataclass

import pytest

from brevact.autograd import BackwardSettings
from brevact.quantizers import UniformQuantizer, from_text, to_text


@pytest.mark.parametrize("module", ["builtins", "no_module_of_this_name", __name__])
def test_a_class_that_is_not_where_it_says_has_no_text_form(module: str):
    """As one that was defined by `exec`, by `runpy`, or in a cell of a notebook that was sent elsewhere."""

    @dataclass(frozen=True)
    class Mine(UniformQuantizer):
        pass

    Mine.__qualname__, Mine.__module__ = "Mine", module
    with pytest.raises(TypeError, match=f"Mine is not in the module {module}; define it at the top level of one"):
        from_text(to_text(Mine()))
    assert BackwardSettings(Mine()).text is None
