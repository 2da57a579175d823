import sys

import torch

from benchmarks.process_memory import resident_bytes


def test_resident_bytes_grow_with_a_tensor_in_use():
    before = resident_bytes()
    x = torch.ones(1 << 24)  # 64 MiB
    after = resident_bytes()
    if sys.platform == "linux":
        assert after - before > x.nbytes / 2
    else:
        assert before is None and after is None
