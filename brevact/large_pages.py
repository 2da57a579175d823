"""Large pages for large tensors on the CPU: fewer page faults, and freed tensors that leave fewer gaps behind.

PyTorch asks Linux for large pages where `THP_MEM_ALLOC_ENABLE=1` is in the environment when it allocates its first
tensor of at least 2 MiB. Importing `brevact` sets it, unless it is set: the model's weights are there before anything
is packed. `THP_MEM_ALLOC_ENABLE=0` in the environment keeps small pages, and so does `brevact.set_heap_tuning(False)`
before that tensor.
"""

from __future__ import annotations

import os

VARIABLE = "THP_MEM_ALLOC_ENABLE"

_is_ours = VARIABLE not in os.environ


def ask_for_large_pages(enabled: bool) -> None:
    """Set the variable, or take it back; a value that the program has chosen stays.

    Args:
        enabled: whether PyTorch is to ask for large pages.
    """
    if _is_ours and enabled:
        os.environ.setdefault(VARIABLE, "1")
    elif _is_ours and os.environ.get(VARIABLE) == "1":
        del os.environ[VARIABLE]


ask_for_large_pages(True)
