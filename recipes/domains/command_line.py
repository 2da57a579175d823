"""The command line of a recipe: trains, prints the table, and goes on where it stopped."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from recipes import files
from recipes.domains import results, training
from recipes.domains.domain import Domain, check_libraries
from recipes.domains.variants import CHECKPOINT, PLAIN, is_packed, policy_words
from recipes.errors import RecipeError
from recipes.folders import open_folder
from recipes.options import add_option, torch_device
from recipes.policy_names import named_policy


def run_command_line(domain: Domain, arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit status: 0, 2 for an error of the user, 130 when stopped."""
    options = _parse(domain, arguments)
    try:
        run(domain, options)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; what is finished is kept, and --resume goes on after it", file=sys.stderr)
        return 130
    return 0


def run(domain: Domain, options: argparse.Namespace) -> None:
    """Trains, prints the table and the folder of the files; raises RecipeError for errors that the user can fix."""
    check_libraries(domain.libraries)
    settings = domain.settings(**{item.name: getattr(options, item.name) for item in fields(domain.settings)})
    device, folder = torch_device(options.device), options.out_dir
    open_folder(folder, asdict(settings), resume=options.resume)
    variants = list(dict.fromkeys([PLAIN, *options.variants]))
    runs, epochs = training.train(domain, settings, variants, list(dict.fromkeys(options.seeds)), device, folder)
    rows = results.table_rows(domain, variants, runs)
    files.write_rows(folder / results.TABLE, results.COLUMNS, rows)
    results.draw(domain, epochs, folder)
    print(results.table(domain, rows))
    print(f"files are in {folder}")


def variant_of(words: str) -> str:
    """Reads a variant; for argparse."""
    if is_packed(words):
        named_policy(policy_words(words))
    return words


def _parse(domain: Domain, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        f"python -m {domain.module}",
        description=domain.description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for item in fields(domain.settings):
        add_option(parser, item)
        parser.set_defaults(**{item.name: item.default})
    parser.add_argument(
        "--variants",
        nargs="+",
        type=variant_of,
        default=list(domain.variants),
        metavar="NAME",
        help=f"{PLAIN}, {CHECKPOINT}, policies, {CHECKPOINT}+POLICY (default: {' '.join(domain.variants)})",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="a training of each variant for each")
    parser.add_argument("--device", default="auto", help="torch device; auto takes CUDA where there is one")
    parser.add_argument("--out-dir", type=Path, default=Path("runs") / domain.name, help="default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="go on with the runs in the folder")
    return parser.parse_args(arguments)
