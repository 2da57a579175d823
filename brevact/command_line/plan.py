"""``python -m brevact plan MODEL``: the bytes of a language model's training, without its weights and without a GPU.

Steps of one and of two blocks run on the meta device, forward and backward, with the hooks of policies, or as graphs
that AOTAutograd makes of them. Further blocks keep as many bytes as the second.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import logging
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brevact.policy.attach import quantize_backward, region_of_step
from brevact.policy.compile import compile
from brevact.policy.presets import DEFAULT, RECOMPUTE
from brevact.policy.text import budget_of
from brevact.private_names.of_torch import DispatchMode, differentiate_composite_ops, flash_attention, tree_leaves
from brevact.tables import text_table

_FIGURES = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim"),
)
#: Figures of config.json by the model's name on huggingface.co, where each stands in the file of that name.
SIZES: dict[str, dict[str, Any]] = {
    name: dict(zip(_FIGURES, figures, strict=True))
    for name, *figures in (
        ("meta-llama/Meta-Llama-3-8B", "llama", 128256, 4096, 14336, 32, 32, 8, 128),
        ("mistralai/Mistral-7B-v0.3", "mistral", 32768, 4096, 14336, 32, 32, 8, 128),
        ("Qwen/Qwen3-8B", "qwen3", 151936, 4096, 12288, 36, 32, 8, 128),
        ("Qwen/Qwen3-32B", "qwen3", 151936, 5120, 25600, 64, 64, 8, 128),
        ("google/gemma-3-1b-pt", "gemma3_text", 262144, 1152, 6912, 26, 4, 1, 256),
        ("google/gemma-3-4b-pt", "gemma3_text", 262208, 2560, 10240, 34, 8, 4, 256),
        ("google/gemma-3-12b-pt", "gemma3_text", 262208, 3840, 15360, 48, 16, 8, 256),
        ("google/gemma-3-27b-pt", "gemma3_text", 262208, 5376, 21504, 62, 32, 16, 128),
    )
}
SIZES["mistralai/Mistral-7B-v0.3"]["sliding_window"] = None


def configuration(name: str) -> Any:
    """Return the configuration of a text model: of the table, of a path, or of a name in the local cache."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"MODEL {name}: transformers makes it; pip install transformers") from error
    found = _named(name)
    if found is not None:
        figures = dict(SIZES[found])
        return transformers.AutoConfig.for_model(figures.pop("model_type"), **figures)
    try:
        given = transformers.AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        text = copy.deepcopy(given.get_text_config(decoder=True))
        assert text.num_hidden_layers >= 1
    except (OSError, ValueError, KeyError, AttributeError, AssertionError) as error:
        near = difflib.get_close_matches(name, names(), n=1, cutoff=0.6)
        raise ValueError(
            f"MODEL {name}: {'no such file' if '.' in Path(name).name and '/' in name else 'not known'}"
            f"{f'; nearest: {near[0]}' if near else ''}. Accepted are {', '.join(names())}; the path of a "
            "config.json of a language model, or of its folder; and the name of a model in the local cache of "
            "huggingface.co (nothing is downloaded)"
        ) from error
    return text


def names() -> dict[str, str]:
    return {name.rpartition("/")[2]: name for name in SIZES}


def _named(name: str) -> str | None:
    small = {key.lower(): full for short, full in names().items() for key in (short, full)}
    return small.get(name.lower()) if not Path(name).exists() else None


class Allocated(NamedTuple):
    """Bytes of tensors above those at the start of a step: at the end of its forward pass, and at its peak."""

    kept: int
    peak: int


#: Tags of ops that compilers fuse; PyTorch 2.13 has one of reductions.
_FUSED = {torch.Tag.pointwise, getattr(torch.Tag, "reduction", torch.Tag.pointwise)}


class _Live(DispatchMode):
    """Counts the bytes of living storages that ops make; of those of fused ops, once others read them."""

    def __init__(self, before: Iterable[Tensor], fuses: bool = False) -> None:
        super().__init__()
        self.now = self.most = 0
        self._fuses, self.unwritten = fuses, dict[int, int]()
        self._storages: dict[int, Any] = {x.untyped_storage()._cdata: x for x in before}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled graphs run in the mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = ([x for x in tree_leaves(each) if isinstance(x, Tensor)] for each in ((args, kwargs), result))
        for x in made:
            storage = x.untyped_storage()
            if storage._cdata not in self._storages:
                self._watch(storage, storage._cdata, storage.nbytes())
        is_fused = not given or func.is_view or func is torch.ops.aten.scatter.value or not _FUSED.isdisjoint(func.tags)
        if not (self._fuses and is_fused):
            self.write(x.untyped_storage()._cdata for x in (*given, *made))
        return result

    def _watch(self, storage: torch.UntypedStorage, key: int, nbytes: int) -> None:
        def end(_: object) -> None:
            self.now -= nbytes if self.unwritten.pop(key, None) is None else 0
            del self._storages[key]

        self._storages[key], self.unwritten[key] = weakref.ref(storage, end), nbytes

    def write(self, keys: Iterable[int]) -> None:
        self.now += sum(self.unwritten.pop(key, 0) for key in keys)
        self.most = max(self.most, self.now)


def bytes_of_step(loss: Callable[[], Tensor], model: torch.nn.Module, *, fuses: bool = False) -> Allocated:
    """Count the bytes that a step on the meta device allocates; gradients of parameters exist before it."""
    weights = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    gradients = [x.grad for x in weights if x.grad is not None]
    with _Live([*weights, *gradients], fuses) as live:
        result = loss()
        live.write([*live.unwritten])
        kept = live.now
        result.backward()
    return Allocated(kept, live.most)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, p: float = 0, causal: bool = False, **rest: Any) -> Any:
    return flash_attention(q, k, v, p, causal, scale=rest.get("scale"))[0]


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let attention of meta tensors run as the GPU's flash kernel, and values that losses read be 1."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attend, "AutogradMeta")
    library.impl("item", lambda x: 1, "AutogradMeta")
    library.impl("equal", lambda x, y: True, "Meta")  # whether a loss's gradient is 1
    differentiate_composite_ops()
    try:
        yield
    finally:
        del library


@contextmanager
def without_launches() -> Iterator[None]:
    from brevact.private_names.of_triton import kernel_interface

    launch = kernel_interface.__getitem__
    kernel_interface.__getitem__ = lambda kernel, grid: lambda *args, **kwargs: None
    try:
        yield
    finally:
        kernel_interface.__getitem__ = launch


GIB = 2**30
#: Ways to train, and the policy of each.
WAYS: dict[str, Any] = {"plain": None, "checkpointed": None, "DEFAULT": DEFAULT, "RECOMPUTE": RECOMPUTE}
#: Budgets of compiled ways, which have the policy DEFAULT.
BUDGETS = {"compile:1+DEFAULT": 1.0, "compile:0.3+DEFAULT": 0.3}
WAYS |= dict.fromkeys(BUDGETS, DEFAULT)
#: Bytes of a weight of 4 bits (NF4), with a scale of 8 bits a block of 64, and one of 32 bits a block of 256 scales.
_QUARTER = 0.5 + 1 / 64 + 4 / (64 * 256)
#: Steps of a sequence's length and of a batch, and attempts to come near to the largest.
_STEPS, _TRIALS = {"sequence": 64, "batch": 1}, 3
_NOTES = (
    "Bytes are those of PyTorch's tensors; leave 1 GiB or more for CUDA and for gaps. Gradients stay allocated, as in "
    "accumulation; AdamW holds two tensors of each trained weight's size and dtype. checkpointed: each block.\n"
    "Attention counts as a flash kernel, which saves query, key, value, its result and a number a row; eager attention "
    "and masks of sliding windows in SDPA take more.\n"
    "compile:0.3+DEFAULT: brevact.compile(model, DEFAULT, budget=0.3), a graph of the whole step, by what Inductor "
    "fuses. It returns all gradients at once. Few blocks keep fewer bytes than the budget allows."
)


@dataclass(frozen=True)
class Training:
    """What is trained: a configuration of transformers, and options of the command line."""

    config: Any
    batch: int
    sequence: int
    dtype: torch.dtype = torch.bfloat16
    has_quarters: bool = False
    rank: int = 0
    targets: tuple[str, ...] = ()
    has_liger: bool = False

    def model(self, blocks: int) -> nn.Module:
        import transformers

        transformers.AttentionInterface.register("brevact_plan", _attention)
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(
                _with_blocks(self.config, blocks), dtype=self.dtype, attn_implementation="brevact_plan"
            )
            if self.has_liger:
                _liger_of(self.config.model_type)(model=model)
            return self._adapted(model).train()

    def _adapted(self, model: nn.Module) -> nn.Module:
        if not self.rank:
            return model
        try:
            import peft
        except ImportError as error:
            raise ImportError("--lora: peft adds adapters; pip install peft") from error
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        linear = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and each is not head]
        names = dict.fromkeys(name.rpartition(".")[2] for name in linear)
        if not names:
            raise ValueError(f"--lora: {type(self.config).__name__} has no torch.nn.Linear in its blocks")
        for target in self.targets:
            if target not in names:
                raise ValueError(f"--lora {target}: no linear layer of that name; accepted are {', '.join(names)}")
        settings = peft.LoraConfig(r=self.rank, target_modules=list(self.targets or names))
        found: nn.Module = peft.get_peft_model(model, settings, autocast_adapter_dtype=False).to(self.dtype)
        return found

    def most_positions(self) -> int | None:
        """Return the longest sequence of a model with a table of positions (GPT-2, OPT); None for others.

        On the meta device a lookup beyond the end of the table raises no error.
        """
        model, most = self.model(1), getattr(self.config, "max_position_embeddings", None)
        words = model.get_input_embeddings()  # type: ignore[operator]
        tables = [each for each in model.modules() if isinstance(each, nn.Embedding) and each is not words]
        return most if most and any(each.num_embeddings >= most for each in tables) else None

    def sizes(self) -> tuple[int, int, int]:
        """Return the bytes of weights and of gradients, and those of the largest weight when it is decoded."""
        blocks = self.config.num_hidden_layers
        one, two, found = self._sizes(1), self._sizes(2), self._sizes(blocks)
        if any(whole != a + (blocks - 1) * (b - a) for whole, a, b in zip(found[:2], one, two, strict=False)):
            raise self._differ()
        return found

    def _differ(self) -> ValueError:
        name = type(self.config).__name__
        return ValueError(f"MODEL: blocks of {name} differ; only models of equal blocks can be planned")

    def _sizes(self, blocks: int) -> tuple[int, int, int]:
        model = self.model(blocks)
        in_quarters = set()
        if self.has_quarters:
            layers = [
                each for name, each in model.named_modules() if isinstance(each, nn.Linear) and ".layers." in name
            ]
            in_quarters = {id(each.weight) for each in layers if not each.weight.requires_grad}
        weights = gradients = largest = 0
        for parameter in model.parameters():
            if id(parameter) in in_quarters:
                weights += math.ceil(parameter.numel() * _QUARTER)
                largest = max(largest, parameter.nbytes)
            else:
                weights += parameter.nbytes
            gradients += parameter.nbytes if parameter.requires_grad else 0
        return weights, gradients, largest

    def step(self, way: str, blocks: int, budget: float = 1.0) -> Allocated:
        model: Any = self.model(blocks)
        if way == "checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
            if self.rank:
                model.enable_input_require_grads()
        policy, is_compiled = WAYS[way], way in BUDGETS
        if is_compiled:
            torch.compiler.reset()
            model = compile(model, policy, budget=budget, backend="aot_eager", fullgraph=True, dynamic=False)
        elif policy is not None:
            quantize_backward(model, policy)
        ids = torch.zeros(self.batch, self.sequence, dtype=torch.int64, device="meta")

        def loss() -> Tensor:
            with nullcontext() if policy is None or is_compiled else region_of_step(model):
                found: Tensor = model(input_ids=ids, labels=ids, use_cache=False, return_dict=True).loss
                return found

        if is_compiled:
            loss()
        return bytes_of_step(loss, model, fuses=is_compiled)

    def allocated(self, way: str) -> Allocated:
        blocks, budget = self.config.num_hidden_layers, BUDGETS.get(way, 1.0)
        if blocks == 1:
            return self.step(way, 1, budget)
        one, two = self.step(way, 1), self.step(way, 2)
        of_block = two.kept - one.kept
        if way == "plain" and self.step(way, 3).kept != two.kept + of_block:
            raise self._differ()
        if budget < 1:  # as much of a block as the whole model's budget leaves beside the head and the loss
            rest = one.kept - of_block
            of_block = int((budget * (rest + blocks * of_block) - rest) / blocks)
            if of_block <= 0:
                raise ValueError(f"the head and the loss keep more than a part of {budget}")
            two = self.step(way, 2, (rest + 2 * of_block) / two.kept)
        # The last block's backward pass, or the loss, is the peak: all other blocks are kept then. Compiled ones return
        # their gradients together, so that the first block's may be.
        of_peak = max(of_block, self._sizes(2)[1] - self._sizes(1)[1]) if way in BUDGETS else of_block
        return Allocated(two.kept + (blocks - 2) * of_block, two.peak + (blocks - 2) * of_peak)


def _attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: Any = None, dropout: float = 0.0, **others: Any
) -> tuple[Tensor, None]:
    out = F.scaled_dot_product_attention(q, k, v, None, dropout, True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def _with_blocks(config: Any, blocks: int) -> Any:
    given = config.to_dict()
    names = [name for name, each in given.items() if "layer" in name and isinstance(each, list)]
    return type(config).from_dict(
        given | {name: given[name][:blocks] for name in names} | {"num_hidden_layers": blocks}
    )


def _liger_of(kind: str) -> Callable[..., None]:
    try:
        import liger_kernel.transformers as liger
    except ImportError as error:
        raise ImportError("--liger: pip install liger-kernel") from error
    found: Callable[..., None] | None = getattr(liger, f"apply_liger_kernel_to_{kind.removesuffix('_text')}", None)
    found = getattr(liger, f"apply_liger_kernel_to_{kind}", found)
    if found is None:
        raise ValueError(f"--liger: Liger has no kernels for models of the type {kind}")
    return found


def plan(options: argparse.Namespace) -> str:
    memory = _memory(options.memory)
    for name in ("batch", "sequence"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: accepted is an integer of at least 1")
    rank, targets = _adapters(options.lora)
    has_quarters = options.weights == "4bit"
    if has_quarters and not rank:
        raise ValueError("--weights 4bit: weights of 4 bits are frozen, and need adapters: add --lora")
    training = Training(
        *(configuration(options.model), options.batch, options.sequence),
        dtype=torch.float32 if options.weights == "float32" else torch.bfloat16,
        **{"has_quarters": has_quarters, "rank": rank, "targets": targets, "has_liger": options.liger},
    )
    with on_the_meta_device(training):
        try:
            return _planned(training, memory, options)
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            line = (str(error).splitlines() or [""])[0]
            raise ValueError(
                f"MODEL {options.model}: a step of {type(training.config).__name__}, of batch {options.batch} and "
                f"sequence {options.sequence}, fails on the meta device with {type(error).__name__}: {line}"
            ) from error


@contextmanager
def on_the_meta_device(training: Training) -> Iterator[None]:
    """Let steps run as on a GPU, without the advice of libraries on how to run models, which do not run."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with as_on_a_gpu(), without_launches() if training.has_liger else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logging.disable(before)


def _planned(training: Training, memory: int | None, options: argparse.Namespace) -> str:
    positions = training.most_positions()
    if positions is not None and training.sequence > positions:
        raise ValueError(
            f"--sequence {training.sequence}: {type(training.config).__name__} has a table of {positions} positions; "
            f"accepted is at most {positions}, or a configuration with a larger max_position_embeddings (GPT-2: "
            "n_positions)"
        )
    weights, gradients, largest = training.sizes()
    fixed = weights + 3 * gradients + largest
    rows, left_out = [], []
    for way in WAYS:
        try:
            found = training.allocated(way)
        except (AttributeError, RuntimeError, ValueError) as error:
            if way not in BUDGETS:
                raise
            kind = "" if isinstance(error, ValueError) else "its step is no single graph: "
            left_out.append(f"{way} is left out: {kind}{(str(error).splitlines() or [''])[0]}")
            continue
        row = [way, _gib(found.kept), _gib(found.peak), _gib(fixed + found.peak)]
        if memory is not None:
            room = memory - fixed
            row += [f"{most(training, way, name, found.peak, room):,}" for name in _STEPS]
        rows.append(row)
    header = ["activations", "kept", "peak", "in all"]
    if memory is not None:
        header += [f"longest sequence, batch {training.batch}", f"largest batch, sequence {training.sequence}"]
    trained = f"LoRA of rank {training.rank}" if training.rank else "all weights trained"
    lines = [
        f"{options.model}: {training.config.num_hidden_layers} blocks, batch {training.batch}, sequence "
        f"{training.sequence}, {options.weights} weights, {trained}{', Liger' * training.has_liger}",
        f"weights {_gib(weights)}, gradients {_gib(gradients)}, AdamW {_gib(2 * gradients)}"
        + f", the largest decoded weight {_gib(largest)}" * bool(largest),
        "",
        text_table(header, rows, numbers=len(header) - 1),
        "",
        *(*left_out, _NOTES),
    ]
    return "\n".join(lines)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"


def most(training: Training, way: str, name: str, peak: int, room: int) -> int:
    """Return the largest batch or length of a sequence whose peak fits, 0 for none; peaks are nearly proportional."""
    step = _STEPS[name]
    limit = training.most_positions() if name == "sequence" else None
    number, trials = getattr(training, name), 1 if way in BUDGETS else _TRIALS  # graphs take seconds
    while trials > 0 or peak > room:
        near = min(int(number * room / peak), limit or sys.maxsize) // step * step
        number, trials = near if trials > 0 else min(near, number - step), trials - 1
        if number < step:
            return 0
        peak = replace(training, **{name: number}).allocated(way).peak  # type: ignore[arg-type]
    return int(number)


def _memory(words: str | None) -> int | None:
    if words is None:
        return None
    with suppress(ValueError):
        budget = budget_of(words)
        if budget and budget.keys() == {"saved_bytes"}:
            return int(budget["saved_bytes"])
    raise ValueError(f"--memory {words}: accepted is a number with its unit (B, KiB, MiB, GiB), such as 24GiB")


def _adapters(words: str | None) -> tuple[int, tuple[str, ...]]:
    if words is None:
        return 0, ()
    rank, _, targets = words.partition(":")
    if not rank.isdecimal() or int(rank) < 1 or words.endswith(":"):
        raise ValueError(
            f"--lora {words}: accepted is a rank of at least 1, and perhaps layers, such as 16 or 16:q_proj,v_proj"
        )
    return int(rank), tuple(filter(None, targets.split(",")))
