"""Brevitas' integer activation quantizers as backward quantizers: they quantize saved tensors, not the forward pass."""

from __future__ import annotations

import inspect
import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from dependencies.exceptions import DependencyError
from torch import Tensor, nn

import brevact.private_names.of_brevitas as bv
from brevact.geometry import DEFAULT_BLOCK, packed_bytes
from brevact.injectors.class_protocol import InjectorClass, is_injector
from brevact.quantizers import Layout, PackedActivation, PackedSpec, Part, UniformQuantizer, pack_codes, unpack_codes

_UNPACKED = UniformQuantizer(bit_width=32)
_ACCEPTED = (
    "accepted are integer, binary and ternary quantizers of brevitas.quant, such as Int8ActPerTensorFloat; "
    "StochBackward8bit takes any activation"
)


@dataclass(frozen=True)
class Integers:
    """Integers of a tensor quantizer: ``step * code + lowest`` for codes of ``bit_width`` bits."""

    bit_width: int
    lowest: int
    step: int = 1


class BrevitasQuantizer:
    """Activation quantizer that saves the integers and the scale that a Brevitas activation injector would compute.

    Decoding returns Brevitas' dequantized value, but for the sign of a zero, computed in float32 (float64 for a float64
    tensor). Scales and zero points are those of the tensor itself, as in a new Brevitas layer's first training step:
    nothing is collected, learned or saved with the layer. If an element is NaN or infinite, all elements that share its
    scale decode to NaN.

    >>> import torch, brevact
    >>> from brevitas.quant import Int8ActPerTensorFloat
    >>> q = brevact.quantizer(Int8ActPerTensorFloat, bit_width=2)
    >>> packed = q.quantize(torch.linspace(-1, 1, 256))
    >>> packed.nbytes, packed.dequantize().unique()
    (68, tensor([-1.0000, -0.5000,  0.0000,  0.5000]))

    Args:
        source: injector class of a Brevitas activation quantizer.

    Raises:
        TypeError: the injector lacks a value, has groups, or its values are not integers of a constant width.
        ValueError: a value is out of range.
    """

    is_stochastic = False

    def __init__(self, source: InjectorClass) -> None:
        self.source = source
        if "group_size" in source:
            raise TypeError(
                f"group_size of {self.name}: a backward quantizer of Brevitas has no groups; accepted is one "
                "with buckets: StochBackward8bit.let(bucket_size=32)"
            )
        tensor_quant, self.asked = build_tensor_quant(source)
        self.integers = _integers_of(tensor_quant, self.name)
        int_quant: Any = getattr(tensor_quant, "int_quant", None)
        self._has_zero_point = int_quant is not None and not is_kind(tensor_quant.zero_point_impl, bv.ZeroZeroPoint)

    @property
    def name(self) -> str:
        """Name of the injector."""
        return self.source.__name__

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        """Quantize and pack a tensor.

        Args:
            x: floating-point tensor of any shape and strides.
            seed: not used.

        Returns:
            The packed activation, on the device of ``x``.
        """
        if not x.numel():
            return _UNPACKED.quantize(x)
        if 0 in x.stride():  # copies of an expanded element may get different codes
            x = x.contiguous()
        dtype = torch.promote_types(x.dtype, torch.float32)
        with ExitStack() as around:
            around.enter_context(torch.no_grad())
            if torch.amp.is_autocast_available(x.device.type):
                around.enter_context(torch.autocast(x.device.type, enabled=False))
            rows = x if x.dim() else x.reshape(1)
            values, scale, zero_point = self._quantized(rows.nan_to_num(0.0, 0.0, 0.0).to(dtype))
            missing = rows.isfinite().logical_not_().to(dtype)
            if values.shape != missing.shape:
                raise self._misfit(x, f"a scale of shape {tuple(scale.shape)}")
            codes = values.div_(scale).add_(zero_point).sub_(self.integers.lowest).div_(self.integers.step).round_()
            scale = scale.masked_fill(missing.sum_to_size(scale.shape) > 0, math.nan)
        shape = tuple(zero_point.shape) if self._has_zero_point else None
        layout = Layout.of(x)
        spec = PackedSpec.of(ScaledIntegers(self.integers, dtype, tuple(scale.shape), shape), layout)
        packed = PackedActivation(spec, spec.empty(x))
        flat = _in_memory_order(codes.view(x.shape), layout).to(torch.uint8)
        contents = pack_codes(flat, self.integers.bit_width), scale, zero_point
        for part, content in zip(packed.tensors, contents, strict=False):
            part.copy_(content.reshape(-1))
        return packed

    def _quantized(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run new modules of Brevitas, which take the statistics of ``x`` alone."""
        tensor_quant, _ = build_tensor_quant(self.source)
        try:
            values, scale, zero_point, *_ = tensor_quant.to(x.device)(x)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self._misfit(x, str(error)) from error
        return values, scale.detach(), zero_point.detach()

    def _misfit(self, x: Tensor, why: str) -> ValueError:
        return ValueError(
            f"{self.name} does not fit an activation of shape {tuple(x.shape)}: {why}; scaling_per_output_type= "
            "and per_channel_broadcastable_shape= must fit it"
        )

    def extra_repr(self) -> str:
        """Return the injector's name and the code width."""
        return f"{self.name}, bit_width={self.integers.bit_width}"

    def __repr__(self) -> str:
        return f"BrevitasQuantizer({self.extra_repr()})"

    def __eq__(self, other: object) -> bool:
        """Whether both have the same injector class."""
        return isinstance(other, BrevitasQuantizer) and self.source is other.source

    def __hash__(self) -> int:
        return hash(self.source)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by settings: Brevitas' modules may hold functions that cannot be pickled."""
        return BrevitasQuantizer, (self.source,)


@dataclass(frozen=True)
class ScaledIntegers:
    """Decoder of (integer - zero_point) * scale.

    Bytes: codes in the block format of `PackedActivation`, in memory order; then scales and zero points, in the
    order of their shape, which broadcasts against the tensor.

    Values are computed in ``dtype``, that of scales and zero points; zero points without a shape are zero.
    """

    integers: Integers
    dtype: torch.dtype
    scale_shape: tuple[int, ...]
    zero_point_shape: tuple[int, ...] | None

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        """Parts stored for a tensor of this layout, codes first."""
        codes = Part("codes", torch.uint8, packed_bytes(layout.numel, self.integers.bit_width, DEFAULT_BLOCK))
        shapes = {"scale": self.scale_shape, "zero_point": self.zero_point_shape}
        metadata = (Part(name, self.dtype, math.prod(shape)) for name, shape in shapes.items() if shape is not None)
        return codes, *metadata

    def decode(self, buffer: Tensor, spec: PackedSpec[ScaledIntegers], target: Tensor) -> None:
        """Decode stored bytes into memory that is dense in the layout's memory order, in its dtype."""
        layout = spec.layout
        packed, scale, *zero_point = spec.split(buffer)
        codes = layout.restore(unpack_codes(packed, self.integers.bit_width, layout.numel))
        values = codes.to(self.dtype).mul_(self.integers.step).add_(self.integers.lowest)
        if self.zero_point_shape is not None:
            values = values - zero_point[0].view(self.zero_point_shape)
        values = values * scale.view(self.scale_shape)
        target.as_strided((layout.numel,), (1,)).copy_(_in_memory_order(values.view(layout.shape), layout))

    def decode_multiply(self, buffer: Tensor, spec: PackedSpec[ScaledIntegers], other: Tensor, target: Tensor) -> None:
        """Decode, multiply by another tensor and write to memory, possibly the same; both dense in memory order."""
        decoded = torch.empty_like(target)
        self.decode(buffer, spec, decoded)
        flat = (spec.layout.numel,), (1,)
        torch.mul(decoded.as_strided(*flat), other.as_strided(*flat), out=target.as_strided(*flat))


def _in_memory_order(x: Tensor, layout: Layout) -> Tensor:
    """A tensor's elements in the layout's memory order, whatever its own strides."""
    kept = sorted(layout.dims)
    x = x[tuple(slice(None) if dim in kept else 0 for dim in range(x.dim()))]
    return x.permute([kept.index(dim) for dim in layout.dims]).reshape(-1)


def is_kind(module: Any, kind: type) -> bool:
    """Whether a module is of this class, scripted (``BREVITAS_JIT=1``) or not."""
    return isinstance(module, kind) or getattr(module, "original_name", None) == kind.__name__


def _integers_of(tensor_quant: Any, name: str) -> Integers:
    int_quant = getattr(tensor_quant, "int_quant", tensor_quant)
    wrapper = getattr(int_quant, "delay_wrapper", None)
    if wrapper is not None and not is_kind(wrapper.delay_impl, bv._NoDelay):
        raise ValueError(
            f"quant_delay_steps={wrapper.delay_impl.quant_delay_steps} lets a quantizer return the tensor unchanged "
            "for some steps, without integers; leave it out"
        )
    if any(is_kind(module, bv.StochasticRoundSte) for module in tensor_quant.modules()):
        raise ValueError(
            f"float_to_int_impl_type='stochastic_round' of {name} draws from a generator of its own; round to nearest, "
            "or pass StochBackward8bit, whose noise follows torch.manual_seed"
        )
    if any(is_kind(tensor_quant, kind) for kind in (bv.BinaryQuant, bv.ClampedBinaryQuant)):
        return Integers(bit_width=1, lowest=-1, step=2)
    if is_kind(tensor_quant, bv.TernaryQuant):
        return Integers(bit_width=2, lowest=-1)
    if not is_kind(tensor_quant, bv.RescalingIntQuant):
        raise TypeError(f"tensor_quant of {name} is a {type(tensor_quant).__name__}, without integers; {_ACCEPTED}")
    if not is_kind(tensor_quant.msb_clamp_bit_width_impl, bv.BitWidthConst):
        raise TypeError(
            f"bit_width of {name} comes from a {type(tensor_quant.msb_clamp_bit_width_impl).__name__}, which may "
            "change while codes are stored; accepted is a constant one: bit_width_impl_type='const'"
        )
    bit_width = tensor_quant.msb_clamp_bit_width_impl()
    if bit_width.item() not in range(1, 9):
        raise ValueError(
            f"bit_width={bit_width.item():g} of {name} is out of range; accepted is an integer from 1 to 8"
        )
    return Integers(bit_width=int(bit_width), lowest=int(int_quant.min_int(bit_width)))


def is_act_quantizer(source: Any) -> bool:
    """Whether this is an injector class by which Brevitas quantizes activations."""
    return _has_proxy(source, bv.ActQuantProxyFromInjectorBase)


def quantizes_parameters(source: Any) -> bool:
    """Whether this is an injector class by which Brevitas quantizes weights or biases."""
    return _has_proxy(source, (bv.WeightQuantProxyFromInjectorBase, bv.BiasQuantProxyFromInjectorBase))


def build_tensor_quant(injector: InjectorClass) -> tuple[nn.Module, frozenset[str]]:
    """Build an activation quantizer's ``tensor_quant``, without the proxy that would put it into a forward pass."""
    probe = injector.let(proxy_module=nn.Identity())
    asked = _Asked(probe.__dependencies__)
    type.__setattr__(probe, "__dependencies__", asked)
    try:
        tensor_quant = probe.tensor_quant
        if "proxy_module" in asked.names:  # to search for the best scale by calling it
            proxy = injector.proxy_class(nn.Identity(), injector)
            tensor_quant = proxy.fused_activation_quant_proxy.tensor_quant
    except DependencyError as error:
        raise TypeError(f"{injector.__name__} is incomplete: {error}. State the missing setting") from error
    except Exception as error:
        raise ValueError(
            f"{injector.__name__} cannot be built: {type(error).__name__}: {error}; check the settings that differ "
            "from those of the class in brevitas.quant"
        ) from error
    if tensor_quant is None:
        raise TypeError(f"{injector.__name__} quantizes nothing; pass act_quant=None for a plain layer")
    return tensor_quant, frozenset(asked.names)


class _Asked(dict[str, Any]):
    """An injector's dependencies, recording the names that its resolution looks up."""

    def __init__(self, dependencies: dict[str, Any]) -> None:
        super().__init__(dependencies)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def _has_proxy(source: Any, kinds: type | tuple[type, ...]) -> bool:
    if not is_injector(source) or "proxy_class" not in source:
        return False
    return inspect.isclass(source.proxy_class) and issubclass(source.proxy_class, kinds)
