"""ActNN's optimization levels as presets: `actnn_level`."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from brevact.bit_widths.adaptive import Adaptive
from brevact.injectors import StochBackward2bitPerSample, StochBackward4bit
from brevact.policy.attach import quantize_backward
from brevact.policy.predicates import CONVOLUTIONS
from brevact.policy.presets import Policy
from brevact.quantizers.brief import brief
from brevact.reports.gradient_passes import Loss
from brevact.user_lines import warn

_EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True)
class ActnnLevel:
    """One of ActNN's levels: higher ones save fewer bytes, and take more time.

    Source: ActNN, arXiv:2104.14129, section 5.2 and table 2, and its published code. Differs: layers of every kind
    pack, not those of a list; L1 packs only convolutions, as in the paper (the code leaves norms unpacked); widths
    follow a measured sensitivity (`Adaptive`); swapping moves all tensors that autograd saves, including weights.

    >>> import torch, brevact
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    >>> level, x = brevact.actnn_level("L4"), torch.randn(256, 64)
    >>> loss = lambda model, batch: model(batch).square().mean()
    >>> adaptive = level.quantize(model, x, loss, samples=1000)
    >>> with level.saving(), adaptive.batch(range(256)), brevact.backward_quant(model):
    ...     value = loss(model, x)
    >>> value.backward()
    >>> adaptive.step(x)

    Args:
        name: "L0" to "L5".
        policy: policy of the layers; each packs its own tensors, in buckets of 256 elements, as in ActNN.
        bit_width: byte budget of layers and samples, as the bytes of this width everywhere. None for fixed widths.
        swaps: whether saved tensors move to host memory.
        defragments: whether the GPU allocator should join free segments.
    """

    name: str
    policy: Policy
    bit_width: float | None = None
    swaps: bool = False
    defragments: bool = False

    def quantize(
        self, model: nn.Module, batch: Any, loss: Loss, *, every: int = 500, samples: int | None = None
    ) -> Adaptive | None:
        """Attach the level's policy to a model, in place.

        Args:
            model: module without a policy.
            batch: see :class:`Adaptive`.
            loss: see :class:`Adaptive`.
            every: see :class:`Adaptive`.
            samples: see :class:`Adaptive`.

        Returns:
            The object that adapts the widths; None for L0, L1 and L2.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: the model has a policy, or an argument is out of range.
        """
        quantize_backward(model, self.policy)
        allocator = (os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
        if self.defragments and torch.cuda.is_available() and not any(_EXPANDABLE in each for each in allocator):
            warn(
                f"{self.name}: the allocator is told to join free segments before torch starts: "
                f"PYTORCH_ALLOC_CONF={_EXPANDABLE}; without it this level is L4"
            )
        if self.bit_width is None:
            return None
        return Adaptive(model, batch, loss, bit_width=self.bit_width, every=every, samples=samples)

    def saving(self) -> AbstractContextManager[Any]:
        """Return a context for forward passes: at L4 and L5 saved tensors move to host memory, pinned with CUDA."""
        if self.swaps:
            return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())
        return nullcontext()


_4_BITS = StochBackward4bit.let(bucket_size=256, derive_min_bits=0)
_2_BITS = Policy({"*": StochBackward2bitPerSample.let(bucket_size=256, derive_min_bits=0)})

_LEVELS = {
    level.name: level
    for level in (
        ActnnLevel("L0", Policy({"*": None})),
        ActnnLevel("L1", Policy({CONVOLUTIONS: _4_BITS, "*": None})),
        ActnnLevel("L2", Policy({"*": _4_BITS})),
        ActnnLevel("L3", _2_BITS, 2),
        ActnnLevel("L4", _2_BITS, 2, swaps=True),
        ActnnLevel("L5", _2_BITS, 2, swaps=True, defragments=True),
    )
}


def actnn_level(name: str) -> ActnnLevel:
    """Return one of ActNN's optimization levels.

    | level | here |
    |---|---|
    | L0 | full precision |
    | L1 | convolutions at 4 bits |
    | L2 | all layers at 4 bits |
    | L3 | 2 bits on average over layers and samples, by their sensitivities |
    | L4 | L3, and saved tensors move to host memory |
    | L5 | L4, with an allocator that joins free segments (`PYTORCH_ALLOC_CONF=expandable_segments:True`) |

    >>> actnn_level("L2").policy.rules.keys()
    dict_keys(['*'])

    Args:
        name: "L0" to "L5".

    Returns:
        The level.

    Raises:
        ValueError: there is no such level.
    """
    if not isinstance(name, str) or name not in _LEVELS:
        raise ValueError(f"name={brief(name)}; accepted are {', '.join(_LEVELS)}")
    return _LEVELS[name]
