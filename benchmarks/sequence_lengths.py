"""Bytes that a small Llama keeps at each length of a sequence, by way to save memory: rows of docs/lengths.csv.

    python -m benchmarks.sequence_lengths docs/lengths.csv

The model is that of `python -m recipes.finetune --size small`, 8 blocks of width 512, on the meta device: nothing is
computed. "checkpoint/4+DEFAULT" checkpoints every fourth block, and packs the others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from recipes.domains.variants import prepare

import brevact
from benchmarks.records import append_rows, print_table
from recipes.finetune import FineTuneSettings, FineTuning

LENGTHS = 1024, 4096, 16384
WAYS = "plain", "checkpoint", "DEFAULT", "checkpoint+DEFAULT", "checkpoint/2+DEFAULT", "checkpoint/4+DEFAULT"
_GIB = 2**30


def kept(tokens: int, way: str) -> int:
    """Bytes that a step keeps for backward, with its loss."""
    first, _, policy = way.partition("+")
    every = int(first.partition("/")[2] or 1)
    task = FineTuning(FineTuneSettings(size="small", checkpoint_every=every), 0, torch.device("meta"))
    prepare(task, way.replace(f"/{every}", ""))
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    report = brevact.memory_report(task.model, batch, lambda model, batch: model(**batch, use_cache=False).loss)
    return report.saved_bytes if policy or way == "DEFAULT" else report.plain_bytes


def main(arguments: Sequence[str]) -> None:
    rows = []
    for way in WAYS:
        found = {tokens: kept(tokens, way) for tokens in LENGTHS}
        a_token = (found[LENGTHS[-1]] - found[LENGTHS[-2]]) / (LENGTHS[-1] - LENGTHS[-2])
        row = {f"kept_mib_{tokens}": f"{nbytes / 2**20:.1f}" for tokens, nbytes in found.items()}
        longest = int((2 * _GIB - found[LENGTHS[-1]]) / a_token) + LENGTHS[-1]
        rows.append({"way": way, **row, "tokens_in_2_gib": longest // 256 * 256})
    print_table(rows)
    for path in arguments:
        append_rows(rows, path)


if __name__ == "__main__":
    main(sys.argv[1:])
