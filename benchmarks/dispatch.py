"""Cost of a torch function and of small models in a region: microseconds, and Python calls of brevact.

    python -m benchmarks.dispatch                    # functions, then steps of models
    python -m benchmarks.dispatch --only models --rounds 40

Functions: microseconds of a forward and a backward, plain, in a region that packs nothing, and under DEFAULT, with
brevact's Python functions entered (exact) in brackets, and their files, by a call that is not the first of its region,
which would draw the base of its seeds, too. Models: a step as a multiple of the plain one, with the
microseconds that each torch function of a step takes longer. Processor time of one thread, medians of turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import brevact
from benchmarks.small_models import images, of_transformers, tokens
from benchmarks.step import Model

_PACKAGE = str(Path(brevact.__file__).parent)
_ROUNDS = 15
_CALLS = 20
_PARTS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
#: Policies of regions; None: no region.
REGIONS: dict[str, Any] = {
    "plain": None,
    "nothing packed": brevact.DitherBackward4bit.let(min_numel=2**40),
    "DEFAULT": brevact.DEFAULT,
}
_SIZES = {"vocab_size": 200, "hidden_size": 128, "num_hidden_layers": 3, "use_cache": False}
_HEADS = {"num_attention_heads": 4}
MODELS: dict[str, Model] = {
    "Qwen3": of_transformers(
        *("Qwen3ForCausalLM", "Qwen3Config", tokens),
        **{**_SIZES, **_HEADS, "intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 32},
    ),
    "GPT-2": of_transformers(
        *("GPT2LMHeadModel", "GPT2Config", tokens),
        **{"vocab_size": 200, "n_embd": 128, "n_layer": 3, "n_head": 4, "use_cache": False},
    ),
    "DINOv2": of_transformers(
        *("Dinov2ForImageClassification", "Dinov2Config", partial(images, 8, 32)),
        **{"hidden_size": 128, "num_hidden_layers": 3, **_HEADS, "image_size": 32, "patch_size": 4, "num_labels": 10},
    ),
    "Mamba-2": of_transformers(
        *("Mamba2ForCausalLM", "Mamba2Config", tokens),
        **{**_SIZES, "num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 32},
    ),
}


def functions() -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Return torch functions with arguments, the activations first: of 32 x 256 elements, 4 bits large enough."""
    x, y = (torch.randn(32, 256, requires_grad=True) * 1.0 for _ in range(2))
    weight, bias = nn.Parameter(torch.randn(256, 256)), nn.Parameter(torch.randn(256))
    return {
        "linear": (F.linear, [x, weight, bias]),
        "conv2d": (F.conv2d, [x.view(2, 16, 16, 16), nn.Parameter(torch.randn(16, 16, 3, 3))]),
        "relu": (F.relu, [x]),
        "gelu": (F.gelu, [x]),
        "layer_norm": (lambda x, w, b: F.layer_norm(x, (256,), w, b), [x, bias, nn.Parameter(torch.randn(256))]),
        "mul": (torch.mul, [x, y]),
        "softmax": (lambda x: torch.softmax(x, -1), [x]),
        "matmul": (lambda x, y: x @ y.mT, [x, y]),
        "add": (torch.add, [x, y]),
        "view": (lambda x: x.view(16, 512), [x]),
    }


def entered(policy: Any) -> AbstractContextManager[Any]:
    return nullcontext() if policy is None else brevact.backward_quant(policy)


def calls_of(run: Callable[[], Any]) -> tuple[int, int]:
    """Return how many Python functions of brevact a call enters, and of how many files; comprehensions are none."""
    files: list[str] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE) and code.co_name not in _PARTS:
            files.append(code.co_filename)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(files), len(set(files))


def costs_of(function: Callable[..., Tensor], given: list[Tensor], policy: Any, rounds: int) -> str:
    """Return microseconds of a forward and a backward, and brevact's calls in each, of so many files."""
    wanted = [x for x in given if x.requires_grad]
    times: tuple[list[float], ...] = [], []
    for _ in range(rounds):
        with entered(policy):
            start = time.process_time()
            results = [function(*given) for _ in range(_CALLS)]
            times[0].append((time.process_time() - start) / _CALLS)
        grad = torch.ones_like(results[0])
        start = time.process_time()
        for out in results:
            torch.autograd.grad(out, wanted, grad)
        times[1].append((time.process_time() - start) / _CALLS)
    found: list[Tensor] = []
    unpacked = [x if x.is_leaf else x * 1.0 for x in given]
    with entered(policy):
        function(*(x if x.is_leaf else x * 1.0 for x in given))
        forward = calls_of(lambda: found.append(function(*unpacked)))
    calls, files = zip(forward, calls_of(lambda: torch.autograd.grad(found[0], unpacked, grad)), strict=True)
    shown = *(1e6 * statistics.median(each) for each in times), *calls, *files
    return "{:6.1f} + {:6.1f} ({:3} + {:2} of {:2} + {:2})".format(*shown)


class _Counting(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def steps_of(model: Model, rounds: int) -> list[tuple[str, float, float, int]]:
    """Return each region's step as a multiple of the plain one, microseconds more a function, and brevact's calls."""
    step = model.build()

    def run(policy: Any) -> None:
        with entered(policy):
            loss = step.loss(step.model, step.batch)
        loss.backward()
        step.model.zero_grad(set_to_none=True)

    with _Counting() as counting:
        step.loss(step.model, step.batch)
    times: dict[str, list[float]] = {name: [] for name in REGIONS}
    for count in range(rounds + 2):
        for name, policy in REGIONS.items():
            start = time.process_time()
            run(policy)
            times[name] += [time.process_time() - start] if count > 1 else []
    plain = times.pop("plain")
    return [
        (
            f"{name}, {counting.count} functions",
            statistics.median(own / other for own, other in zip(of_region, plain, strict=True)),
            1e6 * statistics.median(a - b for a, b in zip(of_region, plain, strict=True)) / counting.count,
            calls_of(partial(run, REGIONS[name]))[0],
        )
        for name, of_region in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dispatch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=("functions", "models"))
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="turns (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only != "models":
        print(f"{'function':12}" + "".join(f"{name:>38}" for name in REGIONS))
        for name, given in functions().items():
            cells = [costs_of(*given, policy, options.rounds) for policy in REGIONS.values()]
            print(f"{name:12}" + "".join(f"{cell:>38}" for cell in cells), flush=True)
    if options.only != "functions":
        for name, model in MODELS.items():
            for region, ratio, more, calls in [] if model.missing() else steps_of(model, options.rounds):
                print(f"{name:8} {region:32} {ratio:5.2f}  {more:6.1f} us  {calls:6} calls", flush=True)


if __name__ == "__main__":
    main()
