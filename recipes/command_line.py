"""The command line of a recipe: one run, a comparison, or the continuation of either."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from brevact.command_line.launcher import restart_with_mimalloc
from recipes.comparison import begin, begun, compare, make_cases
from recipes.errors import RecipeError
from recipes.files import check_writable
from recipes.quantizers import find_quantizers
from recipes.recipe import Recipe
from recipes.runs import COMPARISON, MIB, holds_results, saved_settings, train
from recipes.settings import Command, Settings, parse


def main(recipe: Recipe, arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit status: 0, 2 for an error of the user, 130 when stopped."""
    try:
        prog = f"python -m recipes.{recipe.module}"
        command = parse(arguments, prog=prog, description=recipe.description, settings=recipe.settings)
        if arguments is None:
            restart_with_mimalloc()
        run(recipe, command)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; every finished epoch is kept, and --resume DIR goes on after it", file=sys.stderr)
        return 130
    return 0


def run(recipe: Recipe, command: Command) -> None:
    """Trains the run or comparison of a command, prints the outcome and says where the files are."""
    resume = command.resume is not None
    settings, quantizers = resumed(recipe, command) if resume else (recipe.settings(**command.given), command.compare)
    folder = command.resume or command.out_dir or default_folder(recipe, settings, quantizers)
    if quantizers is None:
        check_settings(settings)
        check_folder(folder, command)
        result = train(recipe, settings, recipe.load_data(settings), folder, resume=resume)
        value = format(result.final, recipe.metric.spec)
        print(f"test {recipe.metric.words} {value}, {result.saved_bytes / MIB:.2f} MiB stored for backward")
    else:
        cases = make_cases(settings, quantizers)
        for name, case in cases.items():
            check_settings(case)
            check_folder(folder / name, command)
        check_folder(folder, command)
        data = recipe.load_data(settings)
        if not resume:
            begin(settings, quantizers, folder)
        print(compare(recipe, cases, data, folder, resume=resume))
    print(f"files are in {folder}")


def resumed(recipe: Recipe, command: Command) -> tuple[Settings, tuple[str, ...] | None]:
    """Settings of the run or the comparison in the folder to resume, and the quantizers that it compares."""
    folder, names = command.resume, command.compare
    if not (folder / COMPARISON).exists():
        if names is not None:
            raise RecipeError(f"{folder} holds no comparison (there is no {folder / COMPARISON}); start a new one")
        return saved_settings(recipe, folder).resumed(command.given), None
    settings, quantizers = begun(recipe, folder)
    if names is not None and names != quantizers:
        raise RecipeError(
            f"the comparison to resume was started with --compare {' '.join(quantizers)} (now {' '.join(names)}); "
            "leave the option out, or start a new one"
        )
    return settings.resumed(command.given), quantizers


def default_folder(recipe: Recipe, settings: Settings, quantizers: Sequence[str] | None) -> Path:
    """The default folder of a run or comparison, named after its settings."""
    kind = (
        "comparison" if quantizers else settings.reference_folder if settings.is_reference else settings.backward_name
    )
    name = "-".join([recipe.folder(settings), kind, *settings.quantizer_changes])
    return Path("runs") / re.sub(r"[^\w.,=+-]+", "_", name)


def check_settings(settings: Settings) -> None:
    """Finds out before any training whether the quantizers and the device can be used."""
    find_quantizers(settings)
    settings.torch_device()


def check_folder(folder: Path, command: Command) -> None:
    """Finds out before any training whether results can be written to a folder, and whether they may."""
    check_writable(folder)
    if command.resume is None and not command.overwrite and holds_results(folder):
        raise RecipeError(f"{folder} already holds a run; continue it with --resume, or replace it with --overwrite")


if __name__ == "__main__":
    sys.exit(main())
