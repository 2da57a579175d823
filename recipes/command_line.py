"""The command line of a recipe: trains, prints the table, and goes on where it stopped."""

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from brevact.command_line.doctor import allocator_in_use, mimalloc
from brevact.heap import is_left_alone
from recipes import files, results, training
from recipes.policies import CHECKPOINT, PLAIN, variant_of
from recipes.recipe import Recipe, RecipeError, check_libraries, option, torch_device


def main(recipe: Recipe, arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit status: 0, 2 for an error of the user, 130 when stopped."""
    options = _parse(recipe, arguments)
    try:
        if arguments is None:
            restart_with_mimalloc()
        run(recipe, options)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; what is finished is kept, and the same command with --resume goes on", file=sys.stderr)
        return 130
    return 0


def run(recipe: Recipe, options: argparse.Namespace) -> None:
    """Trains, prints the table and the folder of the files; raises RecipeError for errors that the user can fix."""
    check_libraries(recipe.libraries)
    settings = recipe.settings(**{item.name: getattr(options, item.name) for item in fields(recipe.settings)})
    device, folder = torch_device(options.device), options.out_dir
    files.open_folder(folder, asdict(settings), resume=options.resume, overwrite=options.overwrite)
    variants = list(dict.fromkeys([PLAIN, *options.compare] if options.compare else options.variants))
    try:
        runs, epochs = training.train(recipe, settings, variants, list(dict.fromkeys(options.seeds)), device, folder)
    except RecipeError:
        files.leave_folder(folder)
        raise
    rows = results.table_rows(recipe, settings, variants, runs)
    files.write_rows(folder / results.TABLE, results.COLUMNS, rows)
    results.draw(recipe, rows, epochs, folder)
    print(results.table(recipe, rows))
    print(f"files are in {folder}")


def _parse(recipe: Recipe, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        f"python -m {recipe.module}",
        description=recipe.description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for item in fields(recipe.settings):
        text = f"{item.metadata['help']} (default: {'none' if item.default is None else item.default})"
        parser.add_argument(option(item.name), help=text, default=item.default, **item.metadata["argument"])
    words = {"nargs": "+", "type": variant_of, "metavar": "NAME"}
    trained = parser.add_mutually_exclusive_group()
    trained.add_argument("--compare", **words, help=f"train {PLAIN} and these")
    trained.add_argument(
        *("--variants", "--act-quant"),
        **words,
        default=list(recipe.variants),
        help=f"train these: {PLAIN}, {CHECKPOINT}, policies, {CHECKPOINT}+POLICY, budgets such as 24x; python -m pydoc "
        f"recipes.policies has all words (default: {' '.join(recipe.variants)})",
    )
    seeds = recipe.seeds
    parser.add_argument("--seeds", "--seed", nargs="+", type=int, default=list(seeds), help="a training for each")
    parser.add_argument("--device", default="auto", help="torch device; auto takes CUDA where there is one")
    parser.add_argument("--out-dir", type=Path, default=Path("runs") / recipe.name, help="default: %(default)s")
    found = parser.add_mutually_exclusive_group()
    found.add_argument("--resume", action="store_true", help="go on with the runs in the folder")
    found.add_argument("--overwrite", action="store_true", help="replace the runs in the folder")
    return parser.parse_args(arguments)


def restart_with_mimalloc() -> None:
    """Restart this process's program with mimalloc, if that is installed; otherwise return."""
    is_decided = "LD_PRELOAD" in os.environ or is_left_alone(os.environ) or bool(allocator_in_use())
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc" or is_decided:
        return
    library = mimalloc()
    if library is None or any(each in library for each in " :"):  # LD_PRELOAD takes no such path
        return
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {"THP_MEM_ALLOC_ENABLE": "1", **os.environ, "LD_PRELOAD": library}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
