"""Reads pickled dictionaries of arrays without letting the file run code."""

import codecs
import pickle
from pathlib import Path

import numpy as np


def _dtype(kind: str | bytes, align: object = False, copy: object = False) -> np.dtype:
    """A type of numbers or bytes; one that holds objects is refused. Old files give the flags as 0 and 1."""
    dtype = np.dtype(kind.decode() if isinstance(kind, bytes) else kind, align=bool(align), copy=bool(copy))
    if dtype.hasobject:
        raise pickle.UnpicklingError(f"it holds an array of type {dtype}, expected numbers")
    return dtype


# All that an array, or the byte strings of another Python version, need. NumPy moved `_reconstruct` between releases.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("_codecs", "encode"): codecs.encode,
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no data set needs")
        return _ALLOWED[module, name]


def load_arrays(path: Path) -> object:
    """Loads a pickle of dictionaries, lists, numbers, byte strings and NumPy arrays.

    Args:
        path: a file written by Python 2 or 3; strings of Python 2 become bytes.

    Returns:
        The object.

    Raises:
        pickle.UnpicklingError: the file is not a pickle, is damaged, or names anything else than arrays.
    """
    try:
        with path.open("rb") as file:
            return _ArrayUnpickler(file, encoding="bytes").load()
    except (pickle.UnpicklingError, OSError):
        raise
    except Exception as error:  # a damaged stream of opcodes can raise nearly anything
        raise pickle.UnpicklingError(str(error)) from error
