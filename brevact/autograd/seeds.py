"""Seeds for the stochastic quantizers, drawn from torch's generators without disturbing the forward pass.

Within a root region seeds come from a *fork* of torch's default generator, and the default generator moves on by a
single draw when the region ends. So ``torch.manual_seed`` fixes every code, no two tensors and no two steps share
noise, and the random numbers that the model itself draws inside the region (dropout masks, say) are those of the
model without backward quantization.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK = 256
_LOW, _HIGH = -(2**63), 2**63 - 1


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    index = device.index if device.index is not None else torch.get_device_module(device).current_device()
    return torch.get_device_module(device).default_generators[index]


class SeedStream:
    """Seeds of one root region, one generator fork a device.

    CPU seeds are Python integers; on other devices they are 0-d int64 tensors on the device, so that no draw
    synchronizes.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Iterator[int | Tensor]] = {}

    def next(self, device: torch.device) -> int | Tensor:
        """Return the next seed for a tensor on ``device``."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = _seeds(device)
        return next(stream)

    def close(self) -> None:
        """Move each default generator that was forked on by one draw."""
        for device in self._streams:
            torch.randint(_LOW, _HIGH, (), dtype=torch.int64, device=device)
        self._streams.clear()


def _seeds(device: torch.device) -> Iterator[int | Tensor]:
    fork = torch.Generator(device)
    fork.set_state(_default_generator(device).get_state())
    while True:
        block = torch.randint(_LOW, _HIGH, (_BLOCK,), dtype=torch.int64, device=device, generator=fork)
        yield from block.tolist() if device.type == "cpu" else block.unbind()
