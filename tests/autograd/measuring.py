"""Settings and measuring tools for the tests of regions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from brevact.autograd import BackwardSettings, SaveMode, region
from brevact.quantizers import Layout, PackedActivation, PackedSpec, Part, Rounding, UniformQuantizer
from brevact.quantizers.passes import flat_memory


def settings(bit_width: int = 2, rounding: Rounding = Rounding.STOCHASTIC, bucket_size: int = 64, **options: object):
    """Settings that pack every tensor, however small."""
    quantizer = UniformQuantizer(bit_width=bit_width, rounding=rounding, bucket_size=bucket_size)
    return BackwardSettings(quantizer, **{"min_numel": 0, **options})


@dataclass(frozen=True)
class Mirrored:
    """Gives back x + sign * e, with the error e of stochastic rounding at 2 bits by the same seed.

    The mean over both signs of what is an affine function of the decoded tensors is that of x: rounding does not bias
    it. Of what is curved, or multiplies two of them, it is not.
    """

    sign: int
    bit_width: int = 2
    is_stochastic: bool = True

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        """The values, in double precision."""
        return (Part("values", torch.float64, layout.numel),)

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        """Store x + sign * e."""
        layout = Layout.of(x)
        flat = layout.flatten(x.detach())
        rounded = UniformQuantizer(bit_width=self.bit_width, bucket_size=64).quantize(flat, seed).dequantize()
        values = flat.double() + self.sign * (rounded.double() - flat.double())
        return PackedActivation(PackedSpec.of(self, layout), values.view(torch.uint8))

    def decode(self, buffer: Tensor, spec: PackedSpec, target: Tensor) -> None:
        """Write the values."""
        flat_memory(target, spec.layout.numel).copy_(buffer.view(torch.float64))

    def decode_multiply(self, buffer: Tensor, spec: PackedSpec, other: Tensor, target: Tensor) -> None:
        """Write the values times a factor."""
        flat_memory(target, spec.layout.numel).copy_(
            buffer.view(torch.float64).to(other.dtype) * flat_memory(other, spec.layout.numel)
        )


class Saved:
    """What autograd stored while it was watched: distinct storages, and the tensors themselves."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct storages."""
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in self.tensors}.values())

    def holds(self, x: Tensor) -> bool:
        """Whether the storage of `x` is among them."""
        return any(x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() for y in self.tensors)


@contextmanager
def watch_saved() -> Iterator[Saved]:
    """Record the tensors that autograd stores."""
    saved = Saved()

    def pack(x: Tensor) -> Tensor:
        saved.tensors.append(x.detach())
        return saved.tensors[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield saved


def assert_graph_is_kept_and_refuses_a_second_derivative(
    function: Callable[[Tensor], Tensor], x: Tensor, mode: SaveMode
) -> None:
    """Check two backward passes through one forward pass, and the error of double backward."""
    with region(settings(save_mode=mode)):
        out = function(x * 1).sum()
    first, second = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(out, x, create_graph=True)
