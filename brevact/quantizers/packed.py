"""The stored form of an activation: packed codes, metadata, and what restores the tensor."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from brevact.quantizers.layout import Layout


class ActivationQuantizer(Protocol):
    """What a region asks of a quantizer, whatever its format; `UniformQuantizer` is one.

    It is hashable: quantizers that are equal share what they packed. `quantize` returns a `PackedActivation`, whose
    `spec` (a `Decoder`, often the quantizer itself, and the layout) and `tensors` are what autograd keeps and what
    `dequantize` and `dequantize_multiply` decode.
    """

    @property
    def is_stochastic(self) -> bool:
        """Whether the codes depend on the seed: if not, none is drawn."""

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        """Quantize and pack a floating-point tensor of any shape and strides, with random bits of this seed."""


class Decoder(Protocol):
    """What a `PackedActivation` asks of the quantizer that made it."""

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the stored tensors, codes first."""

    def decode(self, tensors: tuple[Tensor, ...], layout: Layout, target: Tensor) -> None:
        """Decode into `target`, whose memory holds `layout.numel` elements densely in memory order."""

    def decode_multiply(self, tensors: tuple[Tensor, ...], layout: Layout, other: Tensor, target: Tensor) -> None:
        """Decode, multiply by `other` and write to `target`; both dense in memory order and of the layout's dtype."""


class PackedSpec(NamedTuple):
    """Everything about a `PackedActivation` but its tensors; hashable and picklable."""

    quantizer: Decoder
    layout: Layout


class PackedActivation:
    """An activation stored as packed codes and metadata.

    >>> import torch
    >>> from brevact.quantizers import UniformQuantizer
    >>> packed = UniformQuantizer(bit_width=4, bucket_size=64).quantize(torch.linspace(-1, 1, 128), seed=0)
    >>> packed.codes.shape, packed.scale.shape, packed.nbytes
    (torch.Size([64]), torch.Size([2]), 76)
    >>> packed.dequantize().shape
    torch.Size([128])

    **Byte format.** The n distinct elements are taken in memory order: dense tensors are read as they lie, whatever the
    order of their strides; repeats of expanded dimensions are not stored; a tensor with gaps is read from a dense copy.

    *Codes* of b bits lie in blocks of P elements, of 8 planes by W = P / 8 columns: element i * W + j of a block is
    code i of column j. The 8 codes of a column make a little-endian integer of b bytes, code i at bits i * b and up;
    its byte k is stored at byte k * W + j of the block's b * W bytes. The last block, of r < P elements, has
    ceil(r / 8) columns, its missing codes 0. So codes take exactly b bits an element, but for the tail's rounding up to
    8 elements. P is the smallest multiple of bucket_size and 8 that is at least 512, if it is at most 4096; otherwise,
    and where groups are not buckets, 512.

    *Metadata* are 1-D tensors of one value a group, for uniform quantizers `scale` s and `minimum` m; code q stands
    for m + s * q, computed in float32 and clamped to the finite range of the dtype. The group of element e is
    e // inner % groups: bucket e // bucket_size, one for the whole tensor, or the index of a dimension. NaN metadata
    mark a group that held NaN or an infinity; all of it decodes to NaN.

    *32 bits*: `codes` are the bytes of the elements as they are, without metadata.

    Args:
        spec: Quantizer and layout.
        tensors: Codes, then metadata, in the order of the quantizer's `tensor_names`.
    """

    __slots__ = ("spec", "tensors")

    def __init__(self, spec: PackedSpec, tensors: tuple[Tensor, ...]) -> None:
        self.spec = spec
        self.tensors = tensors

    @classmethod
    def from_tensors(cls, spec: PackedSpec, tensors: tuple[Tensor, ...]) -> PackedActivation:
        """Rebuild a packed activation from its parts.

        Args:
            spec: `packed.spec`.
            tensors: `packed.tensors`, or tensors of the same content.

        Returns:
            The packed activation.
        """
        return cls(spec, tuple(tensors))

    @property
    def quantizer(self) -> Decoder:
        """The quantizer that made it and decodes it."""
        return self.spec.quantizer

    @property
    def layout(self) -> Layout:
        """Shape, strides and dtype to restore."""
        return self.spec.layout

    @property
    def codes(self) -> Tensor:
        """Packed uint8 codes."""
        return self.tensors[0]

    @property
    def scale(self) -> Tensor | None:
        """Step of each group, or None where the format stores none."""
        return self._named("scale")

    @property
    def minimum(self) -> Tensor | None:
        """Value of code 0 of each group, or None where the format stores none."""
        return self._named("minimum")

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of `tensors`: all that is kept."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    def dequantize(self, out: Tensor | None = None) -> Tensor:
        """Decode the activation.

        Args:
            out: Tensor of the same shape, dtype and device, overwritten in place; no allocation where it is dense and
                in the activation's memory order.

        Returns:
            `out`, or a new tensor with the shape, dtype, device and strides of the quantized tensor (dense strides
            where its elements overlapped otherwise than by expansion).

        Raises:
            ValueError: If `out` has another shape, dtype or device.
        """
        quantizer, layout = self.spec
        codes = self.tensors[0]
        if out is None:
            if layout.is_result_dense:
                out = layout.empty(codes.device)
                quantizer.decode(self.tensors, layout, out)
                return out
            flat = codes.new_empty(layout.numel, dtype=layout.dtype)
            quantizer.decode(self.tensors, layout, flat)
            return layout.restore(flat)
        self._check("out", out, layout.dtype)
        if layout.matches(out):
            quantizer.decode(self.tensors, layout, out)
            return _written(out)
        return out.copy_(self.dequantize())

    def dequantize_multiply(self, other: Tensor, out: Tensor | None = None) -> Tensor:
        """Decode and multiply, equal to `dequantize() * other` bit for bit, without the intermediate tensor.

        Args:
            other: Tensor of the same shape and device. Where its dtype or memory order differ, the product is computed
                in two steps.
            out: Tensor of the result's shape and dtype, overwritten in place; may be `other` itself.

        Returns:
            `out`, or a new tensor of the product's dtype, with the strides of `other` where those are dense.

        Raises:
            ValueError: If the shape or device of `other` or `out`, or the dtype of `out`, does not fit.
        """
        quantizer, layout = self.spec
        self._check("other", other)
        if out is not None:
            self._check("out", out, torch.promote_types(layout.dtype, other.dtype))
        if other.dtype != layout.dtype or not layout.matches(other):
            product = self.dequantize() * other
            return product if out is None else out.copy_(product)
        if out is None:
            out = Layout.of(other).empty(other.device)
            quantizer.decode_multiply(self.tensors, layout, other, out)
            return out
        if layout.matches(out):
            quantizer.decode_multiply(self.tensors, layout, other, out)
            return _written(out)
        return out.copy_(self.dequantize_multiply(other))

    def __repr__(self) -> str:
        """Short description."""
        shape, stride = self.layout.shape, self.layout.stride
        return f"PackedActivation(shape={shape}, stride={stride}, nbytes={self.nbytes}, quantizer={self.quantizer})"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle spec and tensors."""
        return PackedActivation, (self.spec, self.tensors)

    def _named(self, name: str) -> Tensor | None:
        names = self.quantizer.tensor_names
        return self.tensors[names.index(name)] if name in names else None

    def _check(self, name: str, tensor: Tensor, dtype: object = None) -> None:
        layout, device = self.layout, self.codes.device
        if tensor.shape != layout.shape:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}; the packed activation has {layout.shape}")
        if tensor.device != device:
            raise ValueError(f"{name}: got a tensor on {tensor.device}; the packed activation is on {device}; move it")
        if dtype is not None and tensor.dtype != dtype:
            raise ValueError(f"{name}: got {tensor.dtype}; the result is {dtype}; pass a tensor of that dtype")


def _written(out: Tensor) -> Tensor:
    """Tell autograd that `out` changed: kernels write behind its back."""
    if not out.is_inference():
        increment_version(out)
    return out
