"""Saved-tensor hooks in force: a region's, those of the region around it, and of checkpoints around both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from brevact.autograd.transforms import NO_TRANSFORMS
from brevact.private_names.of_torch import pop_hooks, push_hooks, top_hooks

#: Classes of torch.utils.checkpoint whose hooks are active in forward, and in recomputation.
_CHECKPOINT_HOOKS = ("_checkpoint_hook.", "_recomputation_hook.")


def is_checkpoint_innermost() -> bool:
    """Return whether the innermost hooks are a non-reentrant checkpoint's, in forward or recomputation."""
    return _are_of_checkpoint(top_hooks(True))


def _are_of_checkpoint(pair: tuple[Callable, Callable] | None) -> bool:
    return pair is not None and pair[0].__qualname__.startswith(_CHECKPOINT_HOOKS)


def checkpoints_around() -> tuple[Callable, ...]:
    """Return the active non-reentrant checkpoints' pack hooks, outermost first."""
    pairs = []
    while (pair := top_hooks(True)) is not None:
        pairs.append(pair)
        pop_hooks()
    for pair in reversed(pairs):
        push_hooks(*pair)
    return tuple(pair[0] for pair in reversed(pairs) if _are_of_checkpoint(pair))


class _Suspended(AbstractContextManager[None]):
    """Suspends a region's hooks, for tensors of our Functions, and ops whose gradient is singular in theirs."""

    def __init__(self, pair: tuple[Callable, Callable]) -> None:
        self._pair = pair

    def __enter__(self) -> None:
        pop_hooks()

    def __exit__(self, *exc_info: object) -> None:
        push_hooks(*self._pair)


class HookStack:
    """A region's hooks, in place of those of the region ``around``; a full-precision region ``is_empty``."""

    def __init__(self, pair: tuple[Callable, Callable], around: HookStack | None, *, is_empty: bool) -> None:
        self.pair, self._around, self.is_empty = pair, around, is_empty
        #: The innermost hooks, unless others are entered inside the region.
        self.innermost: tuple[Callable, Callable] | None = pair
        self._replaced: HookStack | None = None
        self._outer: tuple[Callable, Callable] | None = None
        #: The pack hook of the checkpoint around the hooks, which identifies it; None without one.
        self.scope: Any = None
        self.suspended: AbstractContextManager[None] = _Suspended(pair)

    def __enter__(self) -> None:
        around = self._around
        if around is not None and around.are_innermost():
            self._replaced = around
            around.pop()
        self._outer = top_hooks(True)
        self.scope = self._outer[0] if self._outer is not None and self.are_in_checkpoint() else None
        if self.is_empty:
            self.innermost = self._outer
            return
        try:
            self.push()
        except RuntimeError as error:
            if self._replaced is not None:
                self._replaced.push()
            raise NotImplementedError(NO_TRANSFORMS) from error

    def __exit__(self, *exc_info: object) -> None:
        if not self.is_empty:
            self.pop()
        if self._replaced is not None:
            self._replaced.push()

    def push(self) -> None:
        push_hooks(*self.pair)

    def pop(self) -> None:
        pop_hooks()

    def are_innermost(self) -> bool:
        return top_hooks(True) == self.pair

    def are_in_checkpoint(self) -> bool:
        return _are_of_checkpoint(self._outer)
