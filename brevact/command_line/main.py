"""The commands of ``python -m brevact``, and their options."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from brevact.command_line.doctor import doctor
from brevact.command_line.launcher import ALLOCATORS, run
from brevact.command_line.model_report import report
from brevact.command_line.plan import names, plan
from brevact.version import __version__

_DESCRIPTION = "Train PyTorch and Brevitas models with a fraction of the activation memory."
_EXIT = "Exit status: 0 for success, 1 for what does not work here, 2 for arguments that are not possible."
_MODEL = (
    "what makes the model, as package.module:callable, imported and called without arguments; or a folder with the "
    "config.json of a Hugging Face model, whose weights are random then"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's; return the exit status: 0, 1 for failures, 2 for user errors."""
    options = _parser().parse_args(arguments)
    if options.verbose:
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("brevact").setLevel(logging.INFO)
    if options.command == "doctor":
        return doctor()
    try:
        if options.command == "run":
            run(options.program, is_module=options.module, allocator=options.allocator)
        print(plan(options) if options.command == "plan" else report(options))
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m brevact", description=_DESCRIPTION, epilog=_EXIT)
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--verbose", action="store_true", help="show the log of what is decided")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    words = "check what brevact needs here: versions, kernels and their bytes, caches, optional libraries"
    commands.add_parser("doctor", help=words, description=words, epilog=_EXIT)
    words = "measure what a training step of a model stores for backward, with a policy and without"
    found = commands.add_parser("report", help=words, description=words, epilog=_EXIT)
    found.add_argument("model", metavar="MODEL", help=_MODEL)
    found.add_argument("--shape", required=True, help="of the batch, such as 16,3,32,32; of token ids, such as 8,128")
    found.add_argument(
        "--dtype", help="of the batch: float32, bfloat16, ..., int64 (default: the model's; int64 for token ids)"
    )
    found.add_argument(
        "--ids", type=int, help="token ids are below this number (default: the model's vocabulary, or 2)"
    )
    found.add_argument("--policy", default="default", help='as brevact.parse_policy reads it (default: "default")')
    found.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    found.add_argument("--plot", metavar="FILE", help="write the bytes of the layers as a picture, such as memory.png")
    found.add_argument("--csv", metavar="FILE", help="write a line a layer")
    found.add_argument("--explain", action="store_true", help="add how each op of each layer stores its tensors")
    words = "size a language model's training, without its weights, downloads or a GPU"
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
    words = "run a Python program with an allocator whose freed memory serves again: a lower peak of the process"
    found = commands.add_parser("run", help=words, description=words, epilog="Exit status: the program's.")
    found.add_argument(
        "--allocator", default="auto", help=f"auto, none, {', '.join(ALLOCATORS)} or a path (default: auto)"
    )
    found.add_argument("-m", dest="module", action="store_true", help="PROGRAM is the name of a module")
    found.add_argument("program", metavar="PROGRAM", nargs=argparse.REMAINDER, help="a script, and its arguments")
    return parser
