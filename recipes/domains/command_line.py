"""The command line of a recipe: measures, trains, searches, prints the table, and goes on where it stopped."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from recipes import files
from recipes.domains import processes, results, training
from recipes.domains.domain import Domain, check_libraries
from recipes.domains.variants import CHECKPOINT, DEFAULT_VARIANTS, PLAIN, is_packed, policy_words
from recipes.errors import RecipeError
from recipes.folders import open_folder
from recipes.options import add_option, option, torch_device

MEASURED, FITS = "measured.csv", "fits.csv"
_COLUMNS_OF_MEASURED = ("variant", "size", "round", "kept_mib", "peak_mib", "loaded_mib", "step_s", "cpu_s")
_COLUMNS_OF_FITS = ("variant", "memory_mib", "size", "peak_mib")


def run_command_line(domain: Domain, arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit status: 0, 2 for what the user can put right, 130 when stopped."""
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
    """Does what the command line asks for, prints the table and says where the files are.

    Args:
        domain: of the recipe.
        options: of the command line.

    Raises:
        RecipeError: something that the user can put right.
    """
    check_libraries(domain.libraries)
    settings = domain.settings(**{item.name: getattr(options, item.name) for item in fields(domain.settings)})
    device, folder = torch_device(options.device), options.out_dir
    memory_mib = _memory(domain, options.memory)
    open_folder(folder, asdict(settings), resume=options.resume)
    variants = list(dict.fromkeys([PLAIN, *options.variants]))
    at = domain.size.of(settings, options.measured) if domain.size and options.measured else settings
    measured = measure(domain, at, variants, options.rounds, device, folder)
    fits = search(domain, settings, variants, memory_mib, device, folder) if memory_mib else []
    seeds = list(dict.fromkeys(options.seeds))
    runs, epochs = training.train(domain, settings, variants, seeds, device, folder) if seeds else ([], [])
    rows = results.table_rows(domain, settings, device, variants, measured, runs, fits)
    files.write_rows(folder / results.TABLE, results.COLUMNS, rows)
    results.draw(domain, rows, epochs, folder)
    if options.csv:
        results.append(rows, options.csv)
    print(results.table(domain, rows))
    print(f"files are in {folder}")


def measure(
    domain: Domain, settings: Any, variants: Sequence[str], rounds: int, device: torch.device, folder: Path
) -> list[dict[str, Any]]:
    """Measures a step of each variant in fresh processes, in alternating rounds, those left out that are measured.

    Args:
        domain: of the recipe.
        settings: of the step.
        variants: to measure.
        rounds: how often.
        device: to train on.
        folder: receives the rows.

    Returns:
        Rows of these variants.

    Raises:
        RecipeError: a process failed.
    """
    path = folder / MEASURED
    size = str(getattr(settings, domain.size.field)) if domain.size else ""
    rows: list[dict[str, Any]] = [{"size": size, **row} for row in files.read_rows(path)] if path.exists() else []
    done = {(row["variant"], int(row["round"])) for row in rows if row["size"] == size}
    for number in range(1, rounds + 1):
        for variant in variants:
            if (variant, number) in done:
                continue
            case = processes.case_of(domain, settings, variant, device)
            if number == 1 and is_packed(variant):
                replace(case, steps=1).run()  # compiles kernels, once on a machine
            found = case.run()
            if "error" in found:
                raise RecipeError(f"a training step of {variant} failed: {found['error']}")
            rows.append({"variant": variant, "size": size, "round": number, **found})
            files.write_rows(path, _COLUMNS_OF_MEASURED, rows)
            text = f"kept {found['kept_mib']:.1f} MiB, peak {found['peak_mib']:.0f} MiB, step {found['step_s']:.2f} s"
            print(f"{variant}, round {number}: {text}", flush=True)
    own = [row for row in rows if row["size"] == size and int(row["round"]) <= rounds]
    return [row for row in own if row["variant"] in variants]


def search(
    domain: Domain, settings: Any, variants: Sequence[str], memory_mib: int, device: torch.device, folder: Path
) -> list[dict[str, Any]]:
    """Finds the largest size of each variant that fits, those left out that the folder has.

    Args:
        domain: with a size.
        settings: of the step.
        variants: to search.
        memory_mib: limit of a process.
        device: to train on.
        folder: receives the rows.

    Returns:
        Rows of these variants and this limit; a size of 0 where none fits.

    Raises:
        RecipeError: no size fits in any variant.
    """
    path, least = folder / FITS, {}
    rows: list[dict[str, Any]] = list(files.read_rows(path)) if path.exists() else []
    done = {row["variant"] for row in rows if int(row["memory_mib"]) == memory_mib}
    show = lambda line: print(line, flush=True)  # noqa: E731
    for variant in variants:
        if variant not in done:
            found = processes.fitting_size(domain, settings, variant, device, memory_mib, show)
            if not found["size"]:
                least[variant] = found["least_mib"]
            else:
                row = {"variant": variant, "memory_mib": memory_mib, "size": found["size"]}
                rows.append({**row, "peak_mib": found["peak_mib"]})
                files.write_rows(path, _COLUMNS_OF_FITS, rows)
    own = [row for row in rows if row["variant"] in variants and int(row["memory_mib"]) == memory_mib]
    if not own:
        assert domain.size is not None
        raise RecipeError(processes.too_little(domain.size, memory_mib, least))
    return own + [{"variant": variant, "memory_mib": memory_mib, "size": 0} for variant in least]


def _memory(domain: Domain, words: str | None) -> int:
    """The limit in MiB; 0 for none."""
    if words is None:
        return 0
    if domain.size is None:
        raise RecipeError(f"--memory {words} is not possible: {domain.module} has no size to search; leave it out")
    for unit, factor in (("GiB", 1024), ("MiB", 1)):
        number = words.removesuffix(unit)
        if number != words and number.replace(".", "", 1).isdigit() and float(number) * factor >= 1:
            return int(float(number) * factor)
    raise RecipeError(f"--memory {words} is not possible: use a size such as 2GiB or 1536MiB")


def variant_of(words: str) -> str:
    """Reads a variant; for argparse.

    Raises:
        argparse.ArgumentTypeError: it is neither plain nor checkpoint nor a policy.
    """
    if is_packed(words):
        from recipes.policy_names import named_policy

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
        default=list(DEFAULT_VARIANTS),
        metavar="NAME",
        help=f"{PLAIN}, {CHECKPOINT}, policies, {CHECKPOINT}+POLICY (default: {' '.join(DEFAULT_VARIANTS)})",
    )
    parser.add_argument(
        "--seeds", nargs="*", type=int, default=[0, 1, 2], help="a training of each variant for each; none: no training"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each variant (default: %(default)s)")
    if domain.size is not None:
        name = option(domain.size.field)
        text = f"search the largest {name} whose training fits, such as 2GiB"
        parser.add_argument("--memory", default=None, metavar="SIZE", help=text)
        text = f"{name} at which bytes, peak and step are measured (default: %(default)s; 0: that of the trainings)"
        default = domain.size.measured or 0
        parser.add_argument(
            option(f"measured_{domain.size.field}"), dest="measured", type=int, default=default, help=text
        )
    else:
        parser.set_defaults(memory=None, measured=0)
    parser.add_argument("--device", default="auto", help="torch device; auto takes CUDA where there is one")
    parser.add_argument("--out-dir", type=Path, default=Path("runs") / domain.name, help="default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="go on with the runs in the folder")
    parser.add_argument("--csv", type=Path, default=None, metavar="FILE", help="append the table's rows to a file")
    return parser.parse_args(arguments)
