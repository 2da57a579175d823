"""What a torch function costs inside a region, in nets of many small ops.

    python -m benchmarks.dispatch                                    # seven models, three policies
    python -m benchmarks.dispatch --models qwen3 --policies DEFAULT --rounds 40

Two models with the same weights take training steps in turns in one process, with one thread, whose processor time is
counted: what other processes take does not enter. One is plain, the other packs. The difference of their steps
(forward and backward passes), divided by the torch functions that a forward pass calls, is what a function costs;
the ratio of their steps is what a user feels. Figures are medians of the rounds.

"nothing packed" has a region whose tensors are all below `min_numel`. "PyTorch's mechanism" has no region: a mode that
passes functions on, and saved-tensor hooks that pass tensors on, both of a line of Python. No region can cost less.

Of compiled steps, "packing ms" is what a step spends in the ops that pack and decode, by PyTorch's profiler: a ratio
cannot be lower than that of the plain step and these together.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

import brevact
from benchmarks.records import write_rows
from recipes.torchvision_ops import declare_missing_ops

Step = Callable[[], Any]

#: Vocabulary, and tokens of the batch.
_WORDS, _TOKENS = 512, (8, 64)


def _language(name: str, **changes: Any) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """A small Hugging Face model of random weights, and its loss: three layers of width 128."""
    import transformers

    config = getattr(transformers, f"{name}Config")(vocab_size=_WORDS, **changes)
    model = getattr(transformers, _CLASSES.get(name, f"{name}ForCausalLM"))(config)
    model.loss_type = model.loss_type or "ForCausalLM"  # the default, without a warning, which Dynamo does not trace
    tokens = torch.randint(5, _WORDS, _TOKENS)
    return model, lambda model: model(input_ids=tokens, labels=tokens).loss


_CLASSES = {"GPT2": "GPT2LMHeadModel", "T5": "T5ForConditionalGeneration", "Esm": "EsmForMaskedLM"}
_SIZES: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}


def _qwen3() -> tuple[nn.Module, Callable]:
    return _language("Qwen3", **_SIZES, intermediate_size=256, num_key_value_heads=2, head_dim=32)


def _gpt2() -> tuple[nn.Module, Callable]:
    return _language("GPT2", n_embd=128, n_layer=3, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0)


def _t5() -> tuple[nn.Module, Callable]:
    return _language("T5", d_model=128, d_kv=32, d_ff=256, num_layers=3, num_heads=4, decoder_start_token_id=0)


def _esm2() -> tuple[nn.Module, Callable]:
    names = {"mask_token_id": 4, "pad_token_id": 1, "position_embedding_type": "rotary"}
    return _language("Esm", **_SIZES, intermediate_size=256, max_position_embeddings=128, **names)


def _mamba2() -> tuple[nn.Module, Callable]:
    sizes = {"hidden_size": 128, "num_hidden_layers": 3, "head_dim": 32, "num_heads": 8, "state_size": 16}
    return _language("Mamba2", **sizes, n_groups=1, chunk_size=32)


def _dinov2() -> tuple[nn.Module, Callable]:
    import transformers

    config = transformers.Dinov2Config(**_SIZES, image_size=56, patch_size=7, num_labels=10)
    images, labels = torch.randn(8, 3, 56, 56), torch.randint(0, 10, (8,))
    return transformers.Dinov2ForImageClassification(config), lambda m: m(pixel_values=images, labels=labels).loss


def _efficientnet() -> tuple[nn.Module, Callable]:
    from recipes.models import FloatLayers, efficientnetv2

    images, labels = torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))
    model = efficientnetv2("s", image_size=32, classes=10, layers=FloatLayers())
    return model, lambda model: nn.functional.cross_entropy(model(images), labels)


#: Eight sequences of 64 tokens, eight images of 64 patches; of EfficientNetV2-S four images of 32x32.
MODELS: dict[str, Callable[[], tuple[nn.Module, Callable]]] = {
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "dinov2": _dinov2,
    "t5": _t5,
    "esm2": _esm2,
    "mamba2": _mamba2,
    "efficientnetv2-s": _efficientnet,
}
_MECHANISM = "PyTorch's mechanism"
POLICIES: dict[str, Any] = {
    _MECHANISM: None,
    "nothing packed": brevact.StochBackward4bit.let(min_numel=2**40),
    "LosslessBackward": brevact.LosslessBackward,
    "DEFAULT": brevact.DEFAULT,
}


class _PassingOn(TorchFunctionMode):
    """Passes torch functions on, those that ask for sizes included."""

    def __torch_function__(
        self, func: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class _Counting(_PassingOn):
    """Counts them."""

    calls = 0

    def __torch_function__(
        self, func: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        return super().__torch_function__(func, types, args, kwargs)


def functions_of(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> int:
    """Torch functions that a forward pass calls, the loss included."""
    with _Counting() as counting:
        loss(model)
    return counting.calls


def _passed_on(loss: Callable[[nn.Module], torch.Tensor]) -> Callable[[nn.Module], torch.Tensor]:
    """The loss, computed under a mode and hooks that do nothing else."""

    def run(model: nn.Module) -> torch.Tensor:
        with _PassingOn(), saved_tensors_hooks(lambda x: x, lambda x: x):
            return loss(model)

    return run


def _step_of(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> Step:
    def step() -> None:
        loss(model).backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def packing_ms(step: Step, steps: int = 10) -> float:
    """Milliseconds that a compiled step spends in the package's ops, in the mean."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(steps):
            step()
    ours = (event.self_cpu_time_total for event in profile.key_averages() if event.key.startswith("brevact::"))
    return sum(ours) / steps / 1e3


def measure(name: str, policies: Sequence[str], rounds: int, compiled: bool = False) -> list[dict[str, Any]]:
    """Rows of one model: microseconds of processor time a torch function, and the ratio of the steps.

    Args:
        name: key of `MODELS`.
        policies: keys of `POLICIES`.
        rounds: that are timed, after two that are not.
        compiled: both by `torch.compile(fullgraph=True)`.
    """
    torch.manual_seed(0)
    plain, loss = MODELS[name]()
    calls = functions_of(plain, loss)
    models = {"plain": plain, **{policy: copy.deepcopy(plain) for policy in policies}}
    for policy in policies:
        if policy != _MECHANISM:
            brevact.quantize_backward(models[policy], POLICIES[policy])
    run = {kind: torch.compile(model, fullgraph=True) if compiled else model for kind, model in models.items()}
    losses = {kind: _passed_on(loss) if kind == _MECHANISM else loss for kind in run}
    steps = {kind: _step_of(model, losses[kind]) for kind, model in run.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for index in range(rounds + 2):
        for kind, step in steps.items():
            gc.collect(0)
            start = time.thread_time()
            step()
            if index >= 2:
                seconds[kind].append(time.thread_time() - start)
    rows = []
    for policy in policies:
        pairs = list(zip(seconds["plain"], seconds[policy], strict=True))
        more = statistics.median(packed - plain for plain, packed in pairs)
        rows.append(
            {
                "model": name,
                "policy": policy,
                "compiled": compiled,
                "functions": calls,
                "plain ms": f"{1e3 * statistics.median(seconds['plain']):.1f}",
                "us a function": f"{1e6 * more / calls:.1f}",
                "ratio": f"{statistics.median(packed / plain for plain, packed in pairs):.2f}",
                "packing ms": f"{packing_ms(steps[policy]):.1f}" if compiled else "",
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--compiled", action="store_true", help="compare steps that torch.compile has compiled")
    parser.add_argument("--csv", help="append the rows to this file")
    args = parser.parse_args(arguments)
    if args.compiled and _MECHANISM in args.policies:
        args.policies = [policy for policy in args.policies if policy != _MECHANISM]  # of eager steps
    torch.set_num_threads(1)
    declare_missing_ops()
    rows = [row for name in args.models for row in measure(name, args.policies, args.rounds, args.compiled)]
    write_rows(rows, args.csv)


if __name__ == "__main__":
    main()
