"""Ops that move elements: if their inputs are known by fewer bits, so are their results (``derived.track_moved``)."""

from __future__ import annotations

from brevact.autograd.ops.op import EXACT, NOTHING, Op, Saves, Stored, everywhere

OPS = (
    Op(
        everywhere(
            *("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "clone", "contiguous", "reshape"),
            *("flatten", "repeat", "tile", "flip", "roll", "rot90", "repeat_interleave", "pixel_shuffle"),
            *("pixel_unshuffle", "channel_shuffle"),
        ),
        stored=Stored("cat, stack, pixel shuffle", NOTHING, EXACT),
        saves=Saves.PLACES,
        moves=True,
    ),
)
