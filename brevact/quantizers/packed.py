"""The stored form of an activation: packed codes, metadata, and the layout of the tensor."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from brevact.quantizers.brief import brief
from brevact.quantizers.layout import Layout


class ActivationQuantizer(Protocol):
    """Interface of quantizers of any format to a region; `UniformQuantizer` is one.

    It is immutable and hashable, a frozen dataclass for example: equal quantizers share packed tensors, and specs
    are cached by quantizer and layout. Norms let it quantize their normalized input, unless it has a true
    attribute `is_lossless`: then their input itself. `quantize` returns a `PackedActivation`, whose `buffer` autograd
    keeps; `dequantize` and `dequantize_multiply` decode it by its `spec`: an `ActivationDecoder`, often the quantizer
    itself, and the layout.
    """

    @property
    def is_stochastic(self) -> bool:
        """Whether the codes depend on the seed: if not, none is drawn."""

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        """Quantize and pack a floating-point tensor of any shape and strides, with random bits of this seed."""


class ActivationDecoder(Hashable, Protocol):
    """Interface of a quantizer to the `PackedActivation` that it made."""

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        """Stored parts of a tensor of this layout, codes first."""

    def decode(self, buffer: Tensor, spec: PackedSpec[Any], target: Tensor, other: Tensor | None = None) -> None:
        """Decode into `target`, and multiply by `other` unless that is None.

        Both hold the elements densely in memory order and are of the layout's dtype.
        """


class Part(NamedTuple):
    """One of the arrays that are stored: its name, dtype and number of elements."""

    name: str
    dtype: torch.dtype
    numel: int


D = TypeVar("D", bound=ActivationDecoder)


class PackedSpec(Generic[D]):
    """Everything about a `PackedActivation` but its bytes; hashable and picklable.

    Args:
        quantizer: Decodes the bytes.
        layout: Shape, strides and dtype to restore.
    """

    __slots__ = ("has_padding", "layout", "nbytes", "offsets", "parts", "plan", "quantizer", "shape")

    def __init__(self, quantizer: D, layout: Layout) -> None:
        self.quantizer = quantizer
        self.layout = layout
        self.parts = quantizer.parts(layout)
        offsets, end, used = [], 0, 0
        for part in self.parts:
            start = -(-end // part.dtype.itemsize) * part.dtype.itemsize
            size = part.numel * part.dtype.itemsize
            offsets.append(start)
            end, used = start + size, used + size
        self.offsets = tuple(offsets)
        self.nbytes = end
        self.shape = torch.Size((end,)) if type(end) is int else (end,)  # of the buffer; symbols stay as they are
        self.has_padding = used < end
        self.plan: Any = None  # the quantizer derives it for its passes

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(quantizer: ActivationDecoder, layout: Layout) -> PackedSpec[Any]:
        """The spec with these fields; equal specs are one shared object."""
        return PackedSpec(quantizer, layout)

    def empty(self, like: Tensor) -> Tensor:
        """(nbytes,) uint8 memory on the device of a tensor, uninitialised but for padding."""
        make = like.new_zeros if self.has_padding else like.new_empty
        return make(self.nbytes, dtype=torch.uint8)

    def accepts(self, buffer: Tensor) -> bool:
        return buffer.dtype is torch.uint8 and buffer.shape == self.shape and buffer.is_contiguous()

    def split(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """Views of the parts of (nbytes,) bytes, 1-D."""
        return tuple(
            buffer[start : start + part.numel * part.dtype.itemsize].view(part.dtype)
            for part, start in zip(self.parts, self.offsets, strict=True)
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedSpec):
            return NotImplemented
        return (self.quantizer, self.layout) == (other.quantizer, other.layout)

    def __hash__(self) -> int:
        return hash((self.quantizer, self.layout))

    def __reduce__(self) -> tuple[object, ...]:
        return PackedSpec.of, (self.quantizer, self.layout)


class PackedActivation:
    """A tensor stored as packed codes and the metadata of its groups, in one uint8 buffer.

    `quantize` of a quantizer returns it; `dequantize` restores shape, strides, dtype and device.

    >>> import torch
    >>> from brevact.quantizers import UniformQuantizer
    >>> packed = UniformQuantizer(bit_width=4, bucket_size=64).quantize(torch.linspace(-1, 1, 128), seed=0)
    >>> packed.codes.shape, packed.scale.shape, packed.nbytes
    (torch.Size([64]), torch.Size([2]), 76)
    >>> packed.dequantize().shape
    torch.Size([128])

    **Elements** are packed in memory order. A dense tensor is read as it lies, whatever the order of its strides; an
    expanded dimension is stored once; a tensor with gaps is read from a dense copy.

    **Codes** of b bits lie in blocks of P elements, of W = P / 8 columns. Element i * W + j of a block is code i, 0 to
    7, of column j. The 8 codes of a column form a little-endian integer of b bytes, code i at bits i * b and up; byte k
    of this integer is byte k * W + j of the block. The last block, of r < P elements, has ceil(r / 8) columns, padded
    with codes 0, so that n elements take b * ceil(n / 8) bytes. P is the smallest multiple of bucket_size and 8 that
    is at least 512, if it is at most 4096; otherwise, and where groups are not buckets, 512.

    **Metadata** follow the codes, one value a group in each array, aligned to its dtype by zero bytes. Uniform
    quantizers store `minimum` m, then `scale` s: code q decodes to m + s * q, computed in float32 and clamped to the
    finite range of the tensor's dtype. Element e is in group e // inner % groups: bucket e // bucket_size, the one
    group of a whole tensor, or its index along a dimension.

    **Zeros.** An element that is exactly 0 in float32 decodes to exactly 0. A group of a uniform quantizer that holds a
    zero and a negative minimum has m = -k * s, with an integer k, the code of zero. s is the least scale of its dtype
    with which levels cover the group's range on both sides of zero, and m + s * k is 0 in float32; with a bfloat16 m, k
    and s have four significant bits each. Dithering does not shift the group; its other elements stay unbiased. At 1
    bit a group with elements of both signs has no level at 0. Other formats document their level at 0;
    `NormalizedCodes`, which norms store, have none.

    **NaN and infinities** decode to NaN and leave the range of the group to its finite elements; infinities of one sign
    decode to themselves in uneven buckets (below). A group of both kinds is flagged by the sign bit of s, that of s = 0
    as well. In this group code 2^b - 1 decodes to NaN and code q below
    it to m + |s| * q, with one level fewer between the ends. At 1 bit the remaining code decodes to m + |s| / 2, or to
    0 where an element is 0: only this case is biased, by at most half of the range, or all of it beside zeros. A group
    without a finite element has NaN metadata and decodes to NaN. Other formats document their flag, which takes no
    byte.

    **Uneven buckets.** Buckets of 8 elements and more, of 2 to 8 bits, with a float32 minimum and a bfloat16 scale,
    are flagged in the same way if an element is not finite, if one value takes half of the range, or if four of five
    elements that are not 0 are at most an eighth of the largest magnitude. There code 2^b - 1 stands for one *far
    value*, and the others for levels that fit the remaining elements. The bits of the minimum are those of the far
    value in float32, but its last 12, which say where levels lie; the last four bits of the scale are the four next
    ones of the far value, and the scale without them is s. So a far value keeps 16 significant bits;
    `geometry.SENTINELS`, the largest float and infinities have patterns of NaN or infinity, and are exact. With the
    last 12 bits F, code q below 2^b - 1 decodes

    - if F >= 2048, to (q + F - 3072) * s;
    - else to +-T(k) * s with k = |q - F % 256| and a spacing of p = F // 256: T(k) is k if p is 7 or k <= e = p * L,
      with L = 2^(b - 4), or 1 below 5 bits; farther levels lie L in an octave: T(k) = e + v - L, where the float32 bits
      of v are those of L plus (k - e) * 2^23 / L.

    `uneven.fit` chooses among them. Other formats and metadata keep their levels.

    **Stretched elements.** Codes of a `StretchedQuantizer` are those of y = x + 50 x / (2.5 + |x|), computed in float32
    (`reference.stretched`), and y, clamped to the finite range of the tensor's dtype, decodes to x.

    **Large ranges.** Elements that are finite in float32 decode to finite values. If the range of a uniform quantizer's
    group is 2^128 - 2^122 or more, as a mask with the lowest float beside large values makes it, elements beyond
    +-2^125 count as +-2^125; with a level at zero, from a range of 2^126 on.

    **32 bits.** `codes` are the bytes of the elements, without metadata.

    Args:
        spec: Quantizer and layout.
        buffer: (spec.nbytes,) contiguous uint8 tensor of all the bytes, at the start of its storage.

    Raises:
        ValueError: If `buffer` has another dtype, shape or stride.
        TypeError: If `spec` is no `PackedSpec`, or `buffer` no tensor.
    """

    __slots__ = ("buffer", "spec")

    def __init__(self, spec: PackedSpec[Any], buffer: Tensor) -> None:
        if type(spec) is not PackedSpec:
            raise TypeError(f"spec: got {brief(spec)}; accepted is a PackedSpec: PackedSpec.of(quantizer, layout)")
        if not isinstance(buffer, Tensor):
            raise TypeError(f"buffer: got {brief(buffer)}; accepted is a torch.uint8 tensor, as quantize made it")
        if not spec.accepts(buffer):
            raise ValueError(
                f"buffer: got a {buffer.dtype} tensor of shape {tuple(buffer.shape)} and stride {buffer.stride()}; "
                f"accepted is a contiguous torch.uint8 tensor of shape ({spec.nbytes},), as quantize made it. If "
                "autograd saved it: saved-tensor hooks around the region must give tensors back as they were; "
                "leave integer tensors alone there"
            )
        self.spec = spec
        self.buffer = buffer

    @property
    def quantizer(self) -> ActivationDecoder:
        return self.spec.quantizer

    @property
    def layout(self) -> Layout:
        return self.spec.layout

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Codes, then metadata: views of `buffer`."""
        return self.spec.split(self.buffer)

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
        """Bytes of the storage of `buffer`: all that is kept."""
        return self.buffer.untyped_storage().nbytes()

    def dequantize(self) -> Tensor:
        """Decode the activation to a tensor with the shape, dtype, device and strides of the quantized one.

        Strides are dense where its elements overlapped otherwise than by expansion.
        """
        spec, layout, buffer = self.spec, self.spec.layout, self.buffer
        is_dense = layout.is_result_dense
        out = layout.empty(buffer.device) if is_dense else buffer.new_empty(layout.numel, dtype=layout.dtype)
        spec.quantizer.decode(buffer, spec, out)
        return out if is_dense else layout.restore(out)

    def dequantize_multiply(self, other: Tensor) -> Tensor:
        """Decode and multiply, equal to `dequantize() * other` bit for bit, without the intermediate tensor.

        `other` has the same shape and device; where its dtype or memory order differ, the product is computed in two
        steps. The result has the strides of `other` where those are dense.

        Raises: ValueError: If the shape or device of `other` does not fit.
        """
        spec, layout, device = self.spec, self.spec.layout, self.buffer.device
        if not isinstance(other, Tensor):
            raise TypeError(f"other: got {brief(other)}; accepted is a tensor of shape {layout.shape} on {device}")
        if other.shape != layout.shape or other.device != device:
            raise ValueError(
                f"other: got a tensor of shape {tuple(other.shape)} on {other.device}; accepted is one of shape "
                f"{layout.shape} on {device}, as the packed tensor"
            )
        if other.dtype != layout.dtype or not layout.matches(other):
            return self.dequantize() * other
        out = Layout.of(other).empty(device)
        spec.quantizer.decode(self.buffer, spec, out, other)
        return out

    def __repr__(self) -> str:
        shape, stride = self.layout.shape, self.layout.stride
        return f"PackedActivation(shape={shape}, stride={stride}, nbytes={self.nbytes}, quantizer={self.quantizer})"

    def __reduce__(self) -> tuple[object, ...]:
        return PackedActivation, (self.spec, self.buffer)

    def _named(self, name: str) -> Tensor | None:
        names = [part.name for part in self.spec.parts]
        return self.tensors[names.index(name)] if name in names else None
