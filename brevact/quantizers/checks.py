"""Arguments that quantizers accept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor

from brevact.private_names.of_torch import FakeTensor
from brevact.quantizers.brief import brief
from brevact.quantizers.rounding import Rounding

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

E = TypeVar("E", bound=Enum)


def check_input(x: Tensor) -> None:
    """Raise a TypeError unless it is a strided tensor of these types with a storage of its own."""
    if type(x) is Tensor and not x.is_nested and x.dtype in DTYPES and x.layout is torch.strided:
        return
    accepted = f"accepted are strided tensors of {', '.join(map(str, DTYPES))}"
    if not isinstance(x, Tensor) or x.is_nested:
        found = "a nested tensor" if isinstance(x, Tensor) else f"{brief(x)} of type {type(x).__name__}"
        fix = "pass torch.as_tensor(x), the .value of a QuantTensor, or each of x.unbind()"
        raise TypeError(f"x: got {found}; {accepted}; {fix}")
    if x.dtype not in DTYPES or x.layout is not torch.strided:
        raise TypeError(
            f"x: got a {x.dtype} tensor of layout {x.layout}; {accepted}; convert it, or leave it unquantized"
        )
    try:
        x.detach().as_strided((0,), (1,))
    except RuntimeError as error:  # NotImplementedError is one
        raise TypeError(
            f"x: got a {type(x).__name__}, which gives no access to its storage; {accepted}; pass the tensor it wraps"
        ) from error


def is_on_host(x: Tensor) -> bool:
    """Whether values can be read without waiting for a device; fake tensors have none."""
    return x.is_cpu and not isinstance(x, FakeTensor)


def check_number(name: str, value: Any, least: float, most: float = math.inf, kind: Any = int | float) -> None:
    """Raise a TypeError unless a value is a number of this kind, a ValueError unless it is within bounds."""
    noun = "an int" if kind is int else "a number"
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name}: got {brief(value)} of type {type(value).__name__}; accepted is {noun}")
    if not least <= value <= most:
        bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        raise ValueError(f"{name}: got {brief(value)}; accepted is {noun} {bounds}")


def check_int(name: str, value: object, least: float = -math.inf, most: float = math.inf) -> None:
    check_number(name, value, least, most, int)


def check_bit_width(name: str, value: object, accepted: Sequence[int]) -> None:
    check_int(name, value)
    if value not in accepted:
        raise ValueError(f"{name}: got {value}; accepted are {', '.join(map(str, accepted))}")


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {brief(value)}; accepted are True and False")


def check_bucket_size(name: str, value: object) -> None:
    if value is not None:  # the whole tensor
        check_int(name, value, 1)


def member_of(name: str, enum: type[E], value: object) -> E:
    """The member of an enum with this value; a ValueError where there is none."""
    try:
        return enum(value)
    except ValueError:
        accepted = ", ".join(f"{enum.__name__}.{member.name}" for member in enum)
        raise ValueError(f"{name}: got {brief(value)}; accepted are {accepted}") from None


def between_levels(rounding: object) -> Rounding:
    """The rounding with this value, to levels that are not spaced evenly, as a shift would not leave them."""
    found = member_of("rounding", Rounding, rounding)
    if found is Rounding.DITHERED:
        raise ValueError(
            f"rounding: got {found}, which shifts a grid of evenly spaced levels; accepted here are Rounding.NEAREST, "
            "Rounding.STOCHASTIC; DitherBackward4bit and its like have such a grid"
        )
    return found
