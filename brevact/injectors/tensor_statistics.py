"""Brevitas' modules for one tensor of a forward pass, and when they may change."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from brevitas.config import JIT_ENABLED
from torch import Tensor, nn

from brevact.injectors.brevitas_formats import format_of
from brevact.injectors.seeded_rounding import SeededStochasticRound
from brevact.private_names.of_torch import current_graph_task

#: Parameters and buffers by name, and steps counted in Python.
State = tuple[dict[str, Tensor], dict[str, int]]


class TensorStatistics(nn.Module):
    """Computes a tensor's scale and zero point by Brevitas' rules; its state is that of Brevitas' modules.

    Learned scales are buffers here: no gradient reaches them, and parameters that appear with the first tensors would
    break optimizers, weight averages or flattened parameters built before. Scripted modules are only frozen.
    """

    def __init__(self, tensor_quant: nn.Module, name: str) -> None:
        super().__init__()
        self.tensor_quant = tensor_quant
        self.format = format_of(tensor_quant, name)
        self.roundings = tuple(m for m in tensor_quant.modules() if isinstance(m, SeededStochasticRound))
        self._counting = tuple(name for name, module in tensor_quant.named_modules() if hasattr(module, "counter"))
        self.has_state = bool(self._counting) or next(tensor_quant.parameters(), None) is not None
        self._awaited = 0
        _freeze(tensor_quant)

    def observe(self, x: Tensor, *, collects: bool) -> tuple[Tensor, Tensor | None]:
        """Take a tensor's statistics: scale and zero point, None for zero, as tensors of their own.

        The state changes only if ``collects``.
        """
        _, tensor = next(self._tensors(), (None, None))
        if tensor is not None and tensor.device != x.device:  # no layer holds this module and moves it
            self.tensor_quant.to(x.device)
        with self._changing(collects):
            scale, zero_point = self.format.observe(x)
        return scale.detach().clone(), None if zero_point is None else zero_point.detach().clone()

    def state(self) -> State:
        """Return a copy of the state."""
        tensors = {name: tensor.detach().clone() for name, tensor in self._tensors()}
        return tensors, {name: module.counter for name, module in self._counters()}

    def set_state(self, state: State) -> None:
        """Load a state, with its types and its device."""
        tensors, counters = state
        for name, tensor in self._tensors():
            stored = tensors[name]
            if (tensor.device, tensor.dtype) == (stored.device, stored.dtype):
                tensor.detach().copy_(stored)
            else:
                tensor.data = stored
        for name, module in self._counters():
            module.counter = counters[name]

    @contextmanager
    def _changing(self, collects: bool) -> Iterator[None]:
        """Let Brevitas take statistics as in a forward pass, changing them only if necessary."""
        if not self.has_state:
            yield
        elif not self.training and collects and all(module.counter for _, module in self._counters()):
            yield  # Brevitas' rule for evaluation: collected values
        elif self.training and collects and not self._is_recomputed():
            yield
        else:  # as a step of training on this tensor would, without a trace
            state = self.state()
            self.tensor_quant.train()
            try:
                yield
            finally:
                self.tensor_quant.train(self.training)
                self.set_state(state)

    def _is_recomputed(self) -> bool:
        """Whether a checkpoint recomputes a tensor already seen: during backward, once per forward.

        A reentrant checkpoint's first run has no gradients, hence no regions: nothing to await.
        """
        if current_graph_task() == -1:
            self._awaited += 1
            return False
        if self._awaited:
            self._awaited -= 1
            return True
        return False

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        return itertools.chain(self.tensor_quant.named_parameters(), self.tensor_quant.named_buffers())

    def _counters(self) -> Iterator[tuple[str, Any]]:
        return ((name, self.tensor_quant.get_submodule(name)) for name in self._counting)


def _freeze(tensor_quant: nn.Module) -> None:
    tensor_quant.requires_grad_(False)
    if JIT_ENABLED:
        return
    for module in tensor_quant.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach())
