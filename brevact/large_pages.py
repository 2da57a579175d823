"""Large pages for large tensors on the CPU: fewer page faults, and freed tensors that leave fewer gaps behind.

PyTorch asks Linux for large pages where `THP_MEM_ALLOC_ENABLE=1` is in the environment when it allocates its first
tensor of at least 2 MiB. Importing `brevact` sets it, unless it is set: `THP_MEM_ALLOC_ENABLE=0` keeps small pages.
"""

from __future__ import annotations

import os

VARIABLE = "THP_MEM_ALLOC_ENABLE"

os.environ.setdefault(VARIABLE, "1")
