"""The bytes that a training step may store, from what a user says of them."""

from __future__ import annotations

import math
from typing import Any

from brevact.bit_widths.allocation import ROUNDING
from brevact.bit_widths.layers import BIT_WIDTHS, Plan
from brevact.quantizers.brief import brief


def budget_of(plan: Plan, plain_bytes: int, ratio: float | None, bit_width: float | None) -> int:
    """Return the bytes that a ratio or a uniform width stand for.

    Args:
        plan: what widths are chosen from.
        plain_bytes: of a training step at full precision; read where ``ratio`` is given.
        ratio: how many times less than that; or None.
        bit_width: width of all layers, between integers in proportion; or None.

    Raises:
        ValueError: the narrowest widths store more.
    """
    least = plan.bytes_of([min(group.costs) for group in plan.groups])
    if bit_width is not None:
        low = int(bit_width)
        above = plan.uniform_bytes[min(low + 1, BIT_WIDTHS[-1])]
        found = plan.uniform_bytes[low] + (bit_width - low) * (above - plan.uniform_bytes[low])
        wanted, nearest = f"bit_width={bit_width}", f"a larger bit_width, or a ratio that gives {least} bytes"
    else:
        assert ratio is not None
        found, wanted = plain_bytes / ratio * (1 + ROUNDING), f"ratio={ratio}"
        nearest = f"ratio={math.floor(100 * plain_bytes / least) / 100:.2f} or less"
    if found < least:
        raise ValueError(
            f"{wanted}: that is {int(found)} bytes of a training step, and the model stores {least} at the least; "
            f"accepted is {nearest}, or policies that store less beside (rules, act_quant=, min_numel=)"
        )
    return int(found)


def check_numbers(*, ratio: float | None, bit_width: float | None, every: int, samples: int | None) -> None:
    """Raise for a number that is out of range, or of another type, and for two budgets or none."""
    if (ratio is None) == (bit_width is None):
        raise ValueError(
            f"ratio={brief(ratio)}, bit_width={brief(bit_width)}; accepted is exactly one of the two: ratio=24 for 24 "
            "times less than at full precision, or bit_width=2 for the bytes of that width"
        )
    accepted: dict[str, tuple[Any, Any, float, float]] = {
        "ratio": (ratio, int | float, 1, float("inf")),
        "bit_width": (bit_width, int | float, BIT_WIDTHS[0], BIT_WIDTHS[-1]),
        "every": (every, int, 1, float("inf")),
        "samples": (samples, int, 1, float("inf")),
    }
    for name, (value, kind, least, most) in accepted.items():
        if value is None and name != "every":
            continue
        if isinstance(value, bool) or not isinstance(value, kind):
            raise TypeError(f"{name}: got {brief(value)} of type {type(value).__name__}; accepted is a number")
        if not least <= value <= most:
            up_to = "" if most == float("inf") else f" to {most}"
            raise ValueError(f"{name}={brief(value)}; accepted is a number from {least}{up_to}")
