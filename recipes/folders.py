"""A folder of runs that all have the same settings, and go on where they stopped."""

from collections.abc import Mapping
from pathlib import Path

from recipes import files
from recipes.errors import RecipeError
from recipes.options import option

SETTINGS = "settings.json"


def open_folder(folder: Path, settings: Mapping[str, object], *, resume: bool) -> None:
    """Writes down which settings the runs of a folder have, or finds out that they have these."""
    files.check_writable(folder)
    path = folder / SETTINGS
    if not path.exists():
        if resume:
            raise RecipeError(f"no runs to resume: there is no {path}; leave --resume out")
        folder.mkdir(parents=True, exist_ok=True)
        files.write_json(path, settings)
    elif not resume:
        raise RecipeError(f"{folder} already holds runs; go on with --resume, or name another folder with --out-dir")
    elif (found := files.read_json(path)) != settings:
        names = [name for name in settings if not isinstance(found, dict) or found.get(name) != settings[name]]
        raise RecipeError(
            f"the runs in {folder} have other settings ({', '.join(map(option, names))}): give theirs, which are in "
            f"{path}, or name another folder with --out-dir"
        )
