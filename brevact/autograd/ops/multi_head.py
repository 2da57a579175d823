"""Multi-head attention: its projections, products, softmax and dropout save their tensors as they do outside of it."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch.nn import functional as F

from brevact.autograd.keeper import Keeper
from brevact.autograd.ops.attention import STORED
from brevact.autograd.ops.op import Op

_whole = F.multi_head_attention_forward


def _multi_head_attention_forward(region: Keeper, func: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run torch's own code under the region's mode, skipping its check, which would dispatch the function again."""
    names = {**_whole.__globals__, "has_torch_function": lambda tensors: False}
    inside = FunctionType(_whole.__code__, names, _whole.__name__, _whole.__defaults__)
    with region.mode:
        return inside(*args, **kwargs)


OPS = (
    Op(
        *((F.multi_head_attention_forward,), _multi_head_attention_forward, STORED, _multi_head_attention_forward),
        is_bit_exact=False,
        is_layer=True,
    ),
)
