"""``python -m brevact report MODEL``: what a training step of a model stores."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from brevact.bit_widths.spec import parse_policy
from brevact.reports.batches import tensors_of
from brevact.reports.memory import memory_report

#: Batches of random numbers on which the policy of a budget is fitted.
_BATCHES = 4


def report(options: argparse.Namespace) -> str:
    """Return the report of a command line, and write its files.

    Args:
        options: what the parser found.

    Raises:
        ImportError: there is no such module.
        OSError: there is no such file or folder.
        TypeError: MODEL makes no module, or the model does not take the batch.
        ValueError: an argument is not possible.
    """
    spec = parse_policy(options.policy)
    shape = _shape(options.shape)
    folder = Path(options.model)
    model = _from_folder(folder) if folder.is_dir() else _made(options.model)
    model = model.to(_device(options.device))
    batch = _batch(model, shape, options)
    batches = [batch, *(_batch(model, shape, options) for _ in range(_BATCHES - 1))] if spec.needs_fit else [batch]
    try:
        spec.attach(model, batches, _loss)
        found = memory_report(model, batch)
    except RuntimeError as error:  # of the model, which the arguments do not suit
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


def _made(words: str) -> nn.Module:
    """Import a callable, and return the model that it makes."""
    module, separator, name = words.partition(":")
    if not separator or not name:
        raise ValueError(
            f"MODEL {words} is no folder, and not of the form package.module:callable, such as "
            "torchvision.models:resnet18"
        )
    try:
        make = operator.attrgetter(name)(importlib.import_module(module))
    except AttributeError as error:
        raise ImportError(f"MODEL {words}: {error}") from error
    model = make() if callable(make) and not isinstance(make, nn.Module) else make
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"MODEL {words} makes a {type(model).__name__}; accepted is a callable that makes a torch module"
        )
    return model


def _from_folder(folder: Path) -> nn.Module:
    """Return a model of Hugging Face with random weights; no code of the folder runs."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"MODEL {folder} is a folder, which transformers reads: pip install transformers") from error
    with open(folder / "config.json", encoding="utf-8") as file:
        names = json.load(file).get("architectures") or []
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    kind: Any = getattr(transformers, names[0], None) if names else transformers.AutoModel
    if kind is None:
        raise ValueError(
            f"MODEL {folder}: transformers has no {names[0]}, which config.json names; import it by a callable"
        )
    return kind(config) if names else kind.from_config(config)


def _batch(model: nn.Module, shape: tuple[int, ...], options: argparse.Namespace) -> Any:
    """Return random numbers as what a model is called with; labels, too, of a language model, for its loss."""
    name = getattr(model, "main_input_name", None)
    config = getattr(model, "config", None)
    default = "int64" if name == "input_ids" else "float32"
    dtype = getattr(torch, options.dtype or default, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"--dtype {options.dtype}: accepted is a dtype of torch, such as float32, bfloat16 or int64")
    device = next((x.device for x in model.parameters()), torch.device("cpu"))
    if dtype.is_floating_point:
        x = torch.randn(shape, dtype=dtype, device=device)
        model.to(dtype)
    else:
        x = torch.randint(options.ids or getattr(config, "vocab_size", 2), shape, dtype=dtype, device=device)
    if name is None:
        return x
    is_causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return {name: x, "labels": x} if is_causal else {name: x}


def _loss(model: nn.Module, batch: Any) -> Tensor:
    """The model's loss, or the mean square of what it returns."""
    found = model(**batch) if isinstance(batch, Mapping) else model(batch)
    loss = getattr(found, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    outputs = [x.float() for x in tensors_of(found) if x.requires_grad]
    return sum((x.square().sum() for x in outputs), torch.zeros(())) / max(
        1, sum(map(math.prod, (x.shape for x in outputs)))
    )
