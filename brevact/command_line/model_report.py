"""``python -m brevact report MODEL``: the tensors that a model's training step saves."""

from __future__ import annotations

import argparse
import importlib
import json
import operator
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from brevact.bit_widths.spec import parse_policy
from brevact.command_line.doctor import TORCHVISION
from brevact.reports.batches import tensors_of
from brevact.reports.memory import memory_report

#: Random batches on which a budget's policy is fitted.
_BATCHES = 4


def report(options: argparse.Namespace) -> str:
    """Return a command line's report, and write its files."""
    spec = parse_policy(options.policy)
    shape = _shape(options.shape)
    folder = Path(options.model)
    with _short_errors(options.model):
        model = _from_folder(folder) if folder.is_dir() else _made(options.model)
    model = model.to(_device(options.device))
    dtype = _dtype(model, options.dtype)
    try:
        batches = [_batch(model, shape, dtype, options.ids) for _ in range(_BATCHES if spec.needs_fit else 1)]
        spec.attach(model, batches, _loss)
        found = memory_report(model, batches[0])
    except (RuntimeError, LookupError, AssertionError, AttributeError) as error:  # the batch does not fit the model
        raise ValueError(
            f"--shape {options.shape}: {type(model).__name__} does not run on such a batch: {error}"
        ) from error
    if options.plot:
        found.plot(options.plot)
    if options.csv:
        found.to_csv(options.csv)
    fitted = f"\n\n{options.policy} is fitted to random batches here; fit it to yours: brevact.fit" * spec.needs_fit
    return f"{found}\n\n{found.explain()}{fitted}" if options.explain else f"{found}{fitted}"


def _shape(words: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(each) for each in words.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ValueError(f"--shape {words}: accepted are integers of at least 1 with commas, such as 16,3,32,32")
    return shape


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


@contextmanager
def _short_errors(words: str) -> Iterator[None]:
    """Turn errors of a module that is imported, or makes a model, into a one-line ImportError with a fix."""
    try:
        yield
    except Exception as error:  # the module may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        is_of_torchvision = any("torchvision" in Path(frame.filename).parts for frame in frames)
        if isinstance(error, ImportError | OSError | TypeError | ValueError) and not is_of_torchvision:
            raise
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        fix = f"; torchvision does not work here: {TORCHVISION}" if is_of_torchvision else ""
        raise ImportError(
            f"MODEL {words} cannot be made: {said} ({frames[-1].filename}, line {frames[-1].lineno}){fix}"
        ) from error


def _made(words: str) -> nn.Module:
    module, _, name = words.partition(":")
    if not (module and name):
        raise ValueError(
            f"MODEL {words} is no folder, and not of the form package.module:callable, such as "
            "torchvision.models:resnet18"
        )
    imported = importlib.import_module(module)
    try:
        make = operator.attrgetter(name)(imported)
    except AttributeError as error:
        raise ImportError(f"MODEL {words}: {error}") from error
    model = make() if callable(make) and not isinstance(make, nn.Module) else make
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"MODEL {words} makes a {type(model).__name__}; accepted is a callable that makes a torch module"
        )
    return model


def _from_folder(folder: Path) -> nn.Module:
    """Return a Hugging Face model with random weights; no code of the folder runs."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"MODEL {folder} is a folder, which transformers reads: pip install transformers") from error
    with open(folder / "config.json", encoding="utf-8") as file:
        content = json.load(file)
    names = (content.get("architectures") or []) if isinstance(content, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"MODEL {folder}: config.json is not that of a Hugging Face model; save_pretrained writes one")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    kind: Any = getattr(transformers, names[0], None) if names else transformers.AutoModel
    if names and not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(
            f"MODEL {folder}: transformers has no model {names[0]}, which config.json names; import it by a callable"
        )
    return kind(config) if names else kind.from_config(config)


def _dtype(model: nn.Module, name: str | None) -> torch.dtype:
    """Return a batch's dtype; without a name the model parameters' one, or that of token ids."""
    if name is None:
        if getattr(model, "main_input_name", None) == "input_ids":
            return torch.int64
        return next((x.dtype for x in model.parameters() if x.is_floating_point()), torch.float32)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"--dtype {name}: accepted is a dtype of torch, such as float32, bfloat16 or int64")
    return dtype


def _batch(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, ids: int | None) -> Any:
    """Return random numbers as a model's arguments; with labels for a language model's loss."""
    name = getattr(model, "main_input_name", None)
    config = getattr(model, "config", None)
    if ids is not None and ids < 1:
        raise ValueError(f"--ids {ids}: accepted is an integer of at least 1")
    device = next((x.device for x in model.parameters()), torch.device("cpu"))
    if dtype.is_floating_point:
        x = torch.randn(shape, dtype=dtype, device=device)
        model.to(dtype)
    else:
        x = torch.randint(ids or int(getattr(config, "vocab_size", 2)), shape, dtype=dtype, device=device)
    if name is None:
        return x
    is_causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return {name: x, "labels": x} if is_causal else {name: x}


def _loss(model: nn.Module, batch: Any) -> Tensor:
    found = model(**batch) if isinstance(batch, Mapping) else model(batch)
    loss = getattr(found, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    outputs = [x.float() for x in tensors_of(found) if x.requires_grad]
    return sum((x.square().sum() for x in outputs), torch.zeros(())) / max(1, sum(x.numel() for x in outputs))
