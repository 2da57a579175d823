"""The commands of ``python -m brevact``, and their options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from brevact.command_line.doctor import doctor
from brevact.command_line.plan import names, plan
from brevact.version import __version__

_DESCRIPTION = "Train PyTorch and Brevitas models with a fraction of the activation memory."
_EXIT = "Exit status: 0 for success, 1 for what does not work here, 2 for arguments that are not possible."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's; return the exit status: 0, 1 for failures, 2 for user errors."""
    options = _parser().parse_args(arguments)
    if options.command == "doctor":
        return doctor()
    try:
        print(plan(options))
    except (ImportError, OSError, TypeError, ValueError) as error:
        hint = "; python -m brevact doctor finds libraries that do not import" * isinstance(error, ImportError)
        print(f"error: {error}{hint}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m brevact", description=_DESCRIPTION, epilog=_EXIT)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    words = "check what brevact needs here: versions, kernels and their bytes, caches, optional libraries"
    commands.add_parser("doctor", help=words, description=words, epilog=_EXIT)
    words = "size a language model's training, eager and compiled, without its weights, downloads or a GPU"
    found = commands.add_parser("plan", help=words, description=words, epilog=_EXIT)
    found.add_argument("model", metavar="MODEL", help=f"{', '.join(names())}; the path of a config.json; a cached name")
    found.add_argument("--batch", type=int, default=1, help="sequences in a step (default: 1)")
    found.add_argument("--sequence", type=int, default=4096, help="tokens in a sequence (default: 4096)")
    found.add_argument(
        "--lora", nargs="?", const="16", help="adapters: rank, and layers: 16:q_proj,v_proj (default: 16, all)"
    )
    found.add_argument("--liger", action="store_true", help="with Liger's kernels")
    found.add_argument("--weights", default="bfloat16", choices=("bfloat16", "float32", "4bit"), help="of the model")
    found.add_argument("--memory", help="of the device, such as 24GiB: adds the longest sequence and largest batch")
    return parser
