"""Kernel of random words for choices that are made once a bucket."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.memory import advance, i64_at, kernel, load, store, u32_scratch
from brevact.cpu_kernels.philox import column_words, halves_of
from brevact.cpu_kernels.teams import share

BLOCK = 1024


@kernel
def random_word_blocks(seed, words_at, count, start, stop):
    k0, k1 = halves_of(seed)
    columns = BLOCK // 4
    w0, w1, w2, w3 = u32_scratch(columns), u32_scratch(columns), u32_scratch(columns), u32_scratch(columns)
    for index in range(start, stop):
        first = index * BLOCK
        words = advance(i64_at(words_at), first)
        column_words(first // 4, columns, k0, k1, w0, w1, w2, w3)
        for i in range(min(BLOCK, count - first)):
            word = w0 if i & 3 == 0 else w1 if i & 3 == 1 else w2 if i & 3 == 2 else w3
            store(words, i, np.int64(load(word, i >> 2)))


def random_words(seed: int | Tensor, words: Tensor) -> None:
    block, count = BLOCK, words.numel()
    arguments = (int(seed), words.data_ptr(), count)
    share(random_word_blocks, arguments, -(-count // block), block, torch.get_num_threads())
