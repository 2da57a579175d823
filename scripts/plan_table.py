"""Write `docs/plan.csv`: the longest sequences of language models in memories, as `python -m brevact plan` finds them.

python -m scripts.plan_table && python -m scripts.figures
"""

from __future__ import annotations

from benchmarks.records import append_rows
from brevact.command_line.plan import BUDGETS, GIB, Training, configuration, most, on_the_meta_device
from recipes.torchvision_ops import declare_missing_ops
from scripts.figures import DOCS

MODELS = ("Mistral-7B-v0.3", "Meta-Llama-3-8B", "Qwen3-8B", "Qwen3-32B", "gemma-3-4b-pt", "gemma-3-12b-pt")
MEMORIES = 24, 48, 80
WRITTEN = "plain", "checkpointed", "DEFAULT", "RECOMPUTE", "compile:0.3+DEFAULT"


def main() -> None:
    """Write a row a model and way: adapters of rank 16 on weights of 4 bits, a batch of 1, Liger's kernels if eager."""
    declare_missing_ops()
    rows = {}
    for has_liger in (False, True):  # whose patches stay in a process
        for name in MODELS:
            training = Training(configuration(name), 1, 4096, has_quarters=True, rank=16, has_liger=has_liger)
            with on_the_meta_device(training):
                weights, gradients, largest = training.sizes()
                for way in (each for each in WRITTEN if (each in BUDGETS) is not has_liger):
                    found, fixed = training.allocated(way), weights + 3 * gradients + largest
                    rooms = {each: each * GIB - fixed for each in MEMORIES}
                    longest = {each: most(training, way, "sequence", found.peak, room) for each, room in rooms.items()}
                    sizes = {"kept_gib": f"{found.kept / GIB:.2f}", "peak_gib": f"{found.peak / GIB:.2f}"}
                    rows[name, way] = {"model": name, "way": way, **sizes, **longest}
                    print(rows[name, way], flush=True)
    (DOCS / "plan.csv").unlink(missing_ok=True)
    append_rows([rows[name, way] for name in MODELS for way in WRITTEN], DOCS / "plan.csv")


if __name__ == "__main__":
    main()
