"""Triton's interpreter, without work that takes most of its time and changes no result."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """Take three pieces of work from the interpreter of this process.

    Functions of the interpreter go into `triton.language` at each launch, not at each call of a function; sums and
    products of integers are not repeated in 64 bits for a dropped assertion; each NumPy type is looked up once.
    """
    put, both = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda function: put(both)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    look_up, known = interpreter._get_np_dtype, {}

    def numpy_type(dtype):  # types of the same name are equal
        return known[dtype.name] if dtype.name in known else known.setdefault(dtype.name, look_up(dtype))

    interpreter._get_np_dtype = numpy_type
