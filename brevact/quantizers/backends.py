"""The one place that chooses the backend of a kernel op: Numba's kernels, Triton's, or its reference in plain torch.

`brevact.cpu_kernels.launch` and `brevact.triton_kernels` define launchers, functions of the names and parameters of the
references in `kernel_ops`. Where one is missing, or returns `NotImplemented` because it cannot take its arguments, the
reference runs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor

from brevact.heap import Tuning, look, tune_heap
from brevact.private_names.of_torch import is_functional_tensor, is_functorch_tensor
from brevact.quantizers.checks import check_bool
from brevact.user_lines import warn

_log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
_disabled: list[bool] = []


class KernelOp(Protocol, Generic[P, R]):
    """An op on arrays, run by kernels where there are some for it; `reference` is its definition in plain torch."""

    reference: Callable[P, R]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the op."""


def run_by_kernels(reference: Callable[P, R]) -> KernelOp[P, R]:
    """Run a reference's kernels in its place if they take its arrays; arguments are given by position.

    Arrays are the parameters annotated `Tensor` or `Tensor | None`; the first is never None. Ops that write into their
    arguments and return None do nothing on the meta device.
    """
    name, signature = reference.__name__, inspect.signature(reference)
    kinds = [parameter.annotation for parameter in signature.parameters.values()]
    places = [place for place, kind in enumerate(kinds) if kind in ("Tensor", "Tensor | None")]
    if len(places) == 1:
        places *= 2  # a tuple, then, too
    arrays_of: Any = operator.itemgetter(*places)

    @functools.wraps(reference)
    def run(*args: Any) -> Any:
        arrays = arrays_of(args)
        first, last = arrays[0], arrays[-1]
        kernels = None if _disabled else _launchers(first.is_cuda)
        if kernels is not None and kernels.can_run(arrays):
            launch = getattr(kernels, name, None)
            if launch is not None and (result := launch(*args)) is not NotImplemented:
                if first.is_cpu:
                    Tuning.passed += first.numel() if last is None else max(first.numel(), last.numel())
                    if Tuning.passed >= Tuning.next_look:
                        look()
                return result
        if first.is_meta and signature.return_annotation == "None":
            return None
        _log.debug("%s runs in plain torch: no kernel takes its arguments", name)
        with torch.no_grad():
            return cast(Any, reference)(*args)

    op: Any = run
    op.reference = reference
    return op


def kernels_for(arrays: tuple[Tensor | None, ...]) -> ModuleType | None:
    """Launchers of kernels that take all arrays (ROCm is "cuda", too), if any.

    Results count as arrays: under torch.func and FakeTensorMode, memory allocated for a plain tensor may be none.
    """
    kernels = None if _disabled else _launchers(arrays[0].is_cuda)  # type: ignore[union-attr]
    return kernels if kernels is not None and kernels.can_run(arrays) else None


@contextmanager
def without_kernels() -> Iterator[None]:
    """Run a block without kernels, in all threads: to compare their results with the references'."""
    _disabled.append(True)
    try:
        yield
    finally:
        _disabled.pop()


@functools.cache
def _launchers(on_gpu: bool) -> ModuleType | None:
    """Launchers of compiled kernels, imported when first needed; None where their compiler does not work."""
    if on_gpu:
        has_triton = importlib.util.find_spec("triton") is not None
        _log.info("GPU tensors are quantized by %s", "Triton's kernels" if has_triton else "plain torch")
        return importlib.import_module("brevact.triton_kernels") if has_triton else None
    try:
        found = importlib.import_module("brevact.cpu_kernels.launch")
        _log.info("CPU tensors are quantized by kernels, which Numba compiles once on a machine")
    except (ImportError, OSError, SystemError) as error:  # of a shared library that does not load, as well
        warn(
            f"CPU kernels cannot be compiled here ({type(error).__name__}: {error}); plain torch quantizes CPU "
            "tensors, to the same bytes in several times the time. Check `python -c 'import numba'`",
            RuntimeWarning,
        )
        return None
    if Tuning.is_on:
        tune_heap()
    return found


def refuse_wrapped(x: Tensor) -> None:
    """Raise for the tensors of torch.func transforms: in-place arithmetic on their codes mixes levels."""
    if is_functorch_tensor(x) and not is_functional_tensor(x):
        raise TypeError(
            "x: got a tensor of a torch.func transform (vmap, grad, jacrev, ...), which has no memory of its own; "
            "accepted are plain tensors, fake and functional ones; quantize outside the transform"
        )


def set_heap_tuning(enabled: bool) -> bool:
    """Turn the package's tuning of process memory on (the default) or off.

    Only glibc's heap is tuned, never another allocator (`LD_PRELOAD`, musl, macOS). Call this function right after the
    import: sizes that the first training step sets stay set.

    >>> import brevact
    >>> before = brevact.set_heap_tuning(False)
    >>> brevact.set_heap_tuning(before)
    False

    Args:
        enabled: False sets no sizes (`mallopt`), and returns no free memory to the system (`malloc_trim`).

    Returns:
        The former setting.

    Raises:
        TypeError: `enabled` is no bool.
    """
    check_bool("enabled", enabled)
    before, Tuning.is_on = Tuning.is_on, enabled
    return before
