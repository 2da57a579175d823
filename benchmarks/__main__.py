"""One bench: bytes, peak, times and noise of training steps of models under policies, a row of a CSV for each.

    python -m benchmarks "GPT-2 small" --policies plain checkpoint compile DEFAULT --measure bytes,peak,time
    python -m benchmarks qat --policies plain LosslessBackward DEFAULT --csv docs/bench.csv
    python -m benchmarks --all                   # the rows of the pages, hours on two cores; goes on

MODEL is a name or a group (`--list` has both). A policy is "plain" or "checkpoint" (of each block),
"checkpoint:2+DEFAULT" (of each second block, with a policy), "compile" or
"compile:0.3" (torch.compile, with that part of the memory that it would keep), "compile+DEFAULT" or
"compile:0.3+DEFAULT" (with a policy; its step is a multiple of the compiled one), "fit:30x" (brevact.fit), or words
such as DEFAULT, StochBackward2bit and DitherBackward8bit:recompute=1024.

bytes: distinct storages that autograd keeps, without weights; of checkpoints and compiled steps without the batch, too.
peak: the most bytes that PyTorch allocates in a step, and the growth of a fresh process over four steps.
time: of a step as a multiple of the plain one, median and quartiles of pairs that take turns; one thread a process,
    whose processor time is counted.
compile: time to compile a step as a multiple of plain `torch.compile`'s; processor time, without caches.
noise: relative error of the gradient; its variance and squared bias in units of the variance between batches.
"""

from __future__ import annotations

import argparse
import difflib
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.measure import CHECKPOINT, COMPILED, PLAIN, Row
from benchmarks.models import GROUPS, MODELS, models_of
from benchmarks.records import append_rows, commit, print_table, read_rows

MEASURES = ("bytes", "peak", "time", "compile", "noise")
FIGURES = (
    *("kept_mib", "kept_less", "peak_mib", "growth_mib", "step_ms", "step", "step_low", "step_high"),
    "compile",
    *("error", "noise", "noise_se", "bias", "bias_se"),
)
ROWS = Path(__file__).parents[1] / "docs" / "bench.csv"
_ROUNDS, _DRAWS = 9, 3

_FORMATS = tuple(f"{rounding}Backward{bits}bit" for rounding in ("Stoch", "Dither", "Nearest") for bits in (2, 4))
_COMPILED = (":1", "+DEFAULT", ":0.3+DitherBackward8bit", ":0.3+DEFAULT")
_RESIDUALS = "LosslessBackward:residual_bit_width=2"
_EVERY = (f"{CHECKPOINT}:2+DEFAULT", f"{CHECKPOINT}:4+DEFAULT")
_COMPARED = ("EfficientNetV2-S", "ResNet-50", "ViT-S", "3-D U-Net")
_LARGE = tuple(name for name in GROUPS["large"] if name not in _COMPARED)
_LONGEST = tuple(GROUPS["longest"])
#: Rows of the pages: models, policies and measures; no model has a policy in two of them.
PLAN: tuple[tuple[str | tuple[str, ...], tuple[str, ...], str], ...] = (
    (_COMPARED, (PLAIN, CHECKPOINT, "DEFAULT", "RECOMPUTE"), "bytes,peak,time,noise"),
    (_LARGE, (PLAIN, CHECKPOINT, "DEFAULT", "RECOMPUTE"), "bytes,peak,time"),
    (_COMPARED, (COMPILED, "LosslessBackward:recompute=1024"), "bytes,peak,time,noise"),
    ("compiled", tuple(f"{COMPILED}{each}" for each in _COMPILED), "bytes,time,noise"),
    ("qat", (PLAIN, "LosslessBackward", _RESIDUALS, "StochBackward2bit", "DEFAULT"), "bytes,peak,time"),
    ("trained", ("DEFAULT", "RECOMPUTE", "L4Backward", *_FORMATS), "bytes,noise"),
    ("domains", (PLAIN, "DEFAULT"), "bytes,time"),
    ("lengths", (PLAIN, CHECKPOINT, "DEFAULT", "RECOMPUTE", *_EVERY), "bytes,peak"),
    (_LONGEST[:1], (PLAIN,), "peak"),
    (_LONGEST[1:], ("DEFAULT",), "peak"),
    ("small", (PLAIN, "DEFAULT", "StochBackward2bit"), "bytes,noise"),
    ("images", (PLAIN, "DEFAULT", "StochBackward2bit"), "bytes"),
    ("kernels", (PLAIN, "DEFAULT"), "bytes"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", type=_names)
    parser.add_argument("--policies", nargs="+", default=[PLAIN, "DEFAULT"], metavar="POLICY")
    parser.add_argument("--measure", default="bytes,peak,time", help=f"of {','.join(MEASURES)}")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="pairs of steps (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=_DRAWS, help="of random rounding (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: %(default)s)")
    parser.add_argument("--csv", type=Path, help=f"append the rows to this file; with --all {ROWS.name} of docs/")
    parser.add_argument("--all", action="store_true", help="measure what the pages show and this commit lacks")
    parser.add_argument("--list", action="store_true", help="list models")
    options = parser.parse_args(arguments)
    if unknown := set(options.measure.split(",")) - set(MEASURES):
        parser.error(f"--measure: got {', '.join(sorted(unknown))}; accepted are {', '.join(MEASURES)}")
    for name in ("rounds", "draws"):
        if getattr(options, name) < 2:
            parser.error(f"--{name} {getattr(options, name)}: use at least 2")
    if options.list or not (options.models or options.all):
        for group, models in GROUPS.items():
            print(f"{group}: {'; '.join(models)}")
        return 0
    cases = [(name, tuple(options.policies), options.measure) for names in options.models for name in names]
    if options.all:
        options.csv = options.csv or ROWS
        cases += _left(options.csv)
    return _measure_all(cases, options)


def _names(text: str) -> list[str]:
    """The models of a name or a group; for argparse."""
    if text in GROUPS or text in MODELS:
        return list(GROUPS.get(text, [text]))
    near = difflib.get_close_matches(text, [*GROUPS, *MODELS], cutoff=0.4) or list(GROUPS)
    raise argparse.ArgumentTypeError(f"{text!r} is not a model or a group; near are {', '.join(near)}; see --list")


def _left(path: Path) -> list[tuple[str, tuple[str, ...], str]]:
    """Cases of the plan whose policies have no row of this commit."""
    now = commit()
    done = {(row["model"], row["policy"]) for row in read_rows(path) if row["commit"] == now}
    cases = []
    for names, policies, measures in PLAN:
        for name in models_of(names):
            wanted = (PLAIN,) if name.endswith(", float") else policies
            if left := tuple(policy for policy in wanted if (name, policy) not in done):
                cases.append((name, left, measures))
    return cases


def _measure_all(cases: Sequence[tuple[str, tuple[str, ...], str]], options: argparse.Namespace) -> int:
    """Measure models in processes of their own; print, and append, the rows of each when it ends."""
    rows, failed = [], 0
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        waiting = {pool.submit(_rows_of, *case, options.rounds, options.draws): case[0] for case in cases}
        for done in as_completed(waiting):
            found, errors = done.result()
            failed += len(errors)
            print(*errors, sep="\n", end="\n" if errors else "", file=sys.stderr, flush=True)
            if found and options.csv:
                append_rows(found, options.csv)
            if found:
                print_table(found)
            rows += found
    return int(failed > 0 or not rows)


def _rows_of(name: str, policies: Sequence[str], measures: str, rounds: int, draws: int) -> tuple[list[Row], list[str]]:
    """The rows of a model, and lines about failed measurements."""
    if missing := MODELS[name].missing():
        return [], [f"{name}: left out, needs {', '.join(missing)}"]
    wanted, rows, errors = measures.split(","), [], []
    found: dict[str, Row] = {policy: {} for policy in policies}
    of_model = [each for each in wanted if each != "peak"]
    if of_model:
        answers, problems = _in_fresh_process(measure.measure_model, name, policies, of_model, rounds, draws)
        errors += problems
        for policy, row in answers.items():
            found[policy] |= row
    for policy in policies if "peak" in wanted else ():
        row, problems = _in_fresh_process(measure.measure_peak, name, policy)
        errors += [each for each in problems if each not in errors]
        found[policy] |= row
    for policy, row in found.items():
        if row:
            rows.append({"model": name, "policy": policy, **dict.fromkeys(FIGURES, ""), **row})
    return rows, errors


def _in_fresh_process(function: Callable[..., Any], *arguments: Any) -> tuple[dict[str, Any], list[str]]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(function, *arguments).result()
        except Exception as error:
            return {}, [f"{arguments[0]}: {measure.line_of(error)}"]


if __name__ == "__main__":
    sys.exit(main())
