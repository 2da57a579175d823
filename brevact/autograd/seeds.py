"""Seeds for the stochastic quantizers, drawn from torch's generator without disturbing the forward pass.

Within a root region seeds come from a generator of its own, seeded by what torch's default generator would draw next;
the default generator moves on by that single draw when the region ends. So ``torch.manual_seed`` fixes every code, no
two tensors and no two steps share noise, and the random numbers that the model itself draws inside the region (dropout
masks, say) are those of the model without backward quantization.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK = 256
_LOW, _HIGH = -(2**63), 2**63 - 1


class SeedStream:
    """Seeds of one root region.

    CPU seeds are Python integers; on other devices they are 0-d int64 tensors on the device, drawn there, so that no
    draw synchronizes.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Iterator[int | Tensor]] = {}

    def next(self, device: torch.device) -> int | Tensor:
        """Return the next seed for a tensor on ``device``."""
        stream = self._streams.get(device)
        if stream is None:
            # Another device of the same kind gets another seed.
            base = _next_draw() + 0x9E3779B97F4A7C15 * (len(self._streams) + 1)
            stream = self._streams[device] = _seeds(device, base % 2**64)
        return next(stream)

    def close(self) -> None:
        """Let torch's default generator pass the draw that the seeds came from."""
        if self._streams:
            torch.randint(_LOW, _HIGH, ())


def _next_draw() -> int:
    """Return what the default generator draws next, without drawing it."""
    fork = torch.Generator()
    fork.set_state(torch.default_generator.get_state())
    return int(torch.randint(_LOW, _HIGH, (), generator=fork))


def _seeds(device: torch.device, base: int) -> Iterator[int | Tensor]:
    generator = torch.Generator(device).manual_seed(base)
    while True:
        block = torch.randint(_LOW, _HIGH, (_BLOCK,), device=device, generator=generator)
        yield from block.tolist() if device.type == "cpu" else block.unbind()
