"""Write `docs/plan.csv`: the longest sequences of language models in memories, as `python -m brevact plan` finds them.

python -m scripts.plan_table && python -m scripts.figures
"""

from __future__ import annotations

from benchmarks.records import append_rows
from brevact.command_line.plan import GIB, Training, configuration, most, on_the_meta_device
from recipes.torchvision_ops import declare_missing_ops
from scripts.figures import DOCS

MODELS = ("Mistral-7B-v0.3", "Meta-Llama-3-8B", "Qwen3-8B", "Qwen3-32B", "gemma-3-4b-pt", "gemma-3-12b-pt")
MEMORIES = 24, 48, 80
WRITTEN = "plain", "checkpointed", "DEFAULT"


def main() -> None:
    """Write a row a model and way: adapters of rank 16 on weights of 4 bits, Liger's kernels, a batch of 1."""
    declare_missing_ops()
    rows = []
    for name in MODELS:
        training = Training(configuration(name), 1, 4096, has_quarters=True, rank=16, has_liger=True)
        with on_the_meta_device(training):
            weights, gradients, largest = training.sizes()
            for way in WRITTEN:
                found, fixed = training.allocated(way), weights + 3 * gradients + largest
                longest = {each: most(training, way, "sequence", found.peak, each * GIB - fixed) for each in MEMORIES}
                sizes = {"kept_gib": f"{found.kept / GIB:.2f}", "peak_gib": f"{found.peak / GIB:.2f}"}
                rows.append({"model": name, "way": way, **sizes, **longest})
    (DOCS / "plan.csv").unlink(missing_ok=True)
    append_rows(rows, DOCS / "plan.csv")


if __name__ == "__main__":
    main()
