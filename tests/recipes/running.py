"""Run recipes, interrupt them, and compare their files."""

import itertools
from contextlib import contextmanager

from recipes.files import read_rows

PNG = b"\x89PNG\r\n\x1a\n"
#: Packs tensors of the smallest runs, too.
POLICY = "StochBackward4bit:min_numel=0"


@contextmanager
def interrupted_at_forward(kind, number):
    """Raises KeyboardInterrupt where the forward pass of a model of that kind starts for the `number`-th time.

    The class gets a forward of its own: a hook on all modules would have Brevitas' own quantizers run.
    """
    count, forward = itertools.count(1), kind.forward

    def stop(module, *inputs, **options):
        if next(count) == number:
            raise KeyboardInterrupt
        return forward(module, *inputs, **options)

    kind.forward = stop
    try:
        yield
    finally:
        kind.forward = forward


def values(folder, name="runs.csv", column="value"):
    """A column by variant and seed; of the last epoch, if there are several."""
    return {(row["variant"], int(row["seed"])): row[column] for row in read_rows(folder / name)}


def without_time(folder, name="epochs.csv"):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in read_rows(folder / name)]


def refused(main, arguments, message, capsys):
    """Finds out that a command line ends with status 2 and one line that has the message."""
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
