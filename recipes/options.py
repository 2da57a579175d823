"""Settings as fields of a dataclass, each an option of the command line with a help text and a limit.

Imports nothing of brevact: a process that trains without the package reads its settings, too.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import Field, field
from typing import Any

import torch

from recipes.errors import RecipeError

Limit = tuple[str, Callable[[Any], bool], str]
"""Name of a field, whether a value is accepted (None always is), and what to do where it is not."""


def setting(default: object, text: str, **argument: object) -> Any:
    """A field of settings: its default, its line of the help text and its arguments for argparse."""
    return field(default=default, metadata={"help": text, **argument})


def option(name: str) -> str:
    """The command-line option of a field."""
    return "--" + name.replace("_", "-")


def add_option(parser: argparse.ArgumentParser, item: Field) -> None:
    """Adds the option of a field that `setting` made, without its default."""
    argument = dict(item.metadata)
    shown = "none" if item.default in (None, ()) else item.default
    parser.add_argument(option(item.name), help=f"{argument.pop('help')} (default: {shown})", **argument)


def check_limits(settings: object, limits: Sequence[Limit]) -> None:
    """Finds out whether all values are accepted."""
    for name, accepted, text in limits:
        value = getattr(settings, name)
        if value is not None and not accepted(value):
            raise RecipeError(f"{option(name)} {value} is not possible: {text}")


def torch_device(name: str) -> torch.device:
    """The device of a name; "auto" takes CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # the meta device allocates but does not compute
    except (RuntimeError, AssertionError, ImportError) as error:
        raise RecipeError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error
    return device
