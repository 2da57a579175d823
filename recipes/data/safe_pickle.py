"""Reads pickled dictionaries of arrays without letting the file run code."""

import codecs
import pickle
from pathlib import Path

import numpy as np

# All that an array, or the byte strings of a Python 2 pickle, need. NumPy moved `_reconstruct` between releases.
_ALLOWED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): np.ndarray(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.ndarray(0).__reduce__()[0],
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
        pickle.UnpicklingError: the file is not a pickle, or names anything else than arrays.
    """
    with path.open("rb") as file:
        return _ArrayUnpickler(file, encoding="bytes").load()
