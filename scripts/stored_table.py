"""Write the table of stored tensors from the rows of ``brevact.autograd.ops``.

Run it in a checkout: ``python -m scripts.stored_table``.
"""

from __future__ import annotations

import re
from pathlib import Path

from brevact.autograd.ops import OPS
from brevact.autograd.ops.op import EXACT, Stored

PAGE = Path(__file__).parents[1] / "docs/how.md"
HEAD = "| op | kept for backward | gradient |\n|---|---|---|\n"
#: Rows that hold for all ops.
OF_ALL_OPS = (
    Stored(
        "weights made of weights (weight standardization, weight and spectral norm, LoRA products)",
        "the parameter, from which they are recomputed: change it, even by `.data`, only after the backward pass",
        EXACT,
    ),
    Stored(
        "Functions of Liger, Unsloth, flash-attn, xformers, fla, mamba-ssm, causal-conv1d, Transformer Engine, apex, "
        "torchao's float8 and spconv",
        "by a table (`brevact/autograd/interop/library_functions.py`) of tensors and library versions: activations "
        "packed, query and key of attention kernels at 8 bits, gradients at 6, statistics, logarithms of sums and "
        "compared tensors as in PyTorch; results of norms and gates derive from what these save. Other versions: as "
        "the next row",
        "as of the op that the kernel computes",
    ),
    Stored(
        "other people's `autograd.Function`s, scripted code, operators of other libraries",
        "as in PyTorch, masks 1 bit: their backward may compare the tensor. A rule packs it "
        "(`{MyFunction: StochBackward4bit}`)",
        EXACT,
    ),
    Stored(
        "logarithms, roots, other losses, decompositions of matrices, every other torch function",
        "as in PyTorch",
        EXACT,
    ),
)


def stored_table() -> str:
    """Return the table; ops with equal texts share a row."""
    names: dict[tuple[str, str], list[str]] = {}
    for stored in (*(op.stored for op in OPS if op.stored is not None), *OF_ALL_OPS):
        ops = names.setdefault((stored.kept, stored.gradient), [])
        if stored.op not in ops:
            ops.append(stored.op)
    return HEAD + "".join(f"| {', '.join(ops)} | {kept} | {gradient} |\n" for (kept, gradient), ops in names.items())


def with_table(page: str) -> str:
    return re.sub(re.escape(HEAD) + r"(\|.*\n)*", lambda _: stored_table(), page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
