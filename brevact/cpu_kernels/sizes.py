"""Sizes that kernels and what starts them agree on."""

LARGEST_BLOCK = 4096
"""Elements of the largest packing block: it bounds the scratch of a kernel, some 20 bytes an element."""

LANES = 16
"""Elements that `intrinsics.fill_lanes` writes."""

REGISTER = 16
"""Entries of a table that registers hold: those of codes of 4 bits."""
