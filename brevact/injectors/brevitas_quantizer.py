"""Any Brevitas activation quantizer as a backward quantizer: saved tensors are quantized, the forward pass is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from brevitas.config import JIT_ENABLED
from torch import Tensor, nn

from brevact.injectors.brevitas_formats import Format, is_kind
from brevact.injectors.brevitas_source import build_tensor_quant, group_dim_of, with_group_dim
from brevact.injectors.observed import ObservedQuantizer, as_it_is, without_missing
from brevact.injectors.seeded_rounding import SeededStochasticRound
from brevact.injectors.tensor_statistics import State, TensorStatistics
from brevact.private_names.of_brevitas import StochasticRoundSte
from brevact.quantizers import PackedActivation, UniformQuantizer

_STORED_AS_IT_IS = UniformQuantizer(bit_width=32)
#: Tensors per forward pass that collect statistics; later ones each use their own.
_PLACES = 64


class BrevitasQuantizer(nn.Module):
    """Activation quantizer that saves the values that a Brevitas activation injector would compute in the forward pass.

    Codes take their true width, scales and zero points their exact value; decoding returns Brevitas' dequantized value,
    but for the sign of a zero. Differs: a scale that float16 rounds to zero, by which Brevitas divides, decodes to
    zero; and non-finite elements decode to NaN, with statistics of the tensor with zeros in their place. Their code is
    one that is no number: that of NaN or -0 in minifloats, the last one of a narrow range or of three values. If there
    is none, the elements that share the scale give up their first code (the last one if no integer is negative), which
    costs at most one more step of error at that end; of two values, only their middle is left. The sign of the group's
    scale flags this at no extra bytes; a power-of-two scale in a byte is rounded up to every second power (above 8
    bits, up to every fourth). A scale that may have either sign (``SIGNED_MAX``) cannot be flagged: its whole group is
    NaN.

    Statistics follow Brevitas' rules: a scale from runtime statistics is the current tensor's for
    ``collect_stats_steps`` tensors and then the parameter collected from them, running averages move in training only,
    and the module's state is saved and moved with its layer. Learned scales get no gradient, since they do not affect
    the forward pass: their parameters are frozen at the collected values. A layer that saves several tensors per
    forward pass collects for each of them, distinguished by their order.

    Tensors that are quantized again while a checkpoint recomputes them do not count twice; nor do they with
    ``SaveMode.QUANTIZE_ON_BACKWARD``, which takes statistics in the forward pass and codes when backward starts.

    >>> import torch, brevact
    >>> from brevitas.quant import Int8ActPerTensorFloat
    >>> q = brevact.quantizer(Int8ActPerTensorFloat, bit_width=2)
    >>> packed = q.quantize(torch.linspace(-1, 1, 256))
    >>> packed.nbytes, packed.dequantize().unique()
    (68, tensor([-1.0000, -0.5000,  0.0000,  0.5000]))

    Compares by identity: two quantizers with the same settings collect different statistics.

    Args:
        source: injector class of a Brevitas activation quantizer.
        group_dim: dimension along which groups lie, for an injector with ``group_size`` that does not state its own.
        collects: whether the state changes; if not, each tensor is quantized as by a new quantizer.
        is_lazy: whether Brevitas' modules are built with the first tensor.

    Raises:
        TypeError: the injector lacks a value, or its quantization has no codes of constant width.
        ValueError: a value is out of range.
    """

    def __init__(self, source: type, *, group_dim: int = -1, collects: bool = True, is_lazy: bool = False) -> None:
        super().__init__()
        self.source = source
        self.group_dim = group_dim
        self.collects = collects
        self.tensors = nn.ModuleDict()
        self.is_stochastic = False
        self.asked: frozenset[str] = frozenset()
        self._same: dict[int, BrevitasQuantizer] = {}
        self._prefix = ""
        self.register_load_state_dict_post_hook(_forgive_missing)
        if not is_lazy:
            self._statistics_of("0")

    @property
    def name(self) -> str:
        """Name of the injector."""
        return self.source.__name__

    @property
    def format(self) -> Format:
        """Format of the codes."""
        return self._statistics_of("0").format

    @property
    def has_state(self) -> bool:
        """Whether a tensor's values may depend on earlier tensors."""
        return self._statistics_of("0").has_state

    def for_module(self, module: nn.Module) -> BrevitasQuantizer:
        """Return a quantizer with these settings for one module's tensors: a new one, if it collects statistics.

        A convolution's groups lie along dimension 1, other modules' along the last one. The new one has seen no tensor;
        without statistics, such modules share one.
        """
        group_dim = group_dim_of(module)
        if self.has_state:
            return self._like(group_dim)
        return self._same.setdefault(group_dim, self if group_dim == self.group_dim else self._like(group_dim))

    def for_each_tensor(self) -> BrevitasQuantizer:
        """Return a quantizer with these settings that quantizes each tensor by its own statistics."""
        return self._like(self.group_dim, collects=False) if self.has_state else self

    def with_statistics_of(self, x: Tensor, place: int = 0) -> ObservedQuantizer | UniformQuantizer:
        """Take the statistics of a forward pass's tensor number ``place``; its quantizer does not take them again."""
        if x.numel() == 0:
            return _STORED_AS_IT_IS
        collects = self.collects and self.has_state
        if collects and place >= _PLACES:
            collects, place = False, -1
        statistics = self._statistics_of(str(place if self.collects and self.has_state else 0))
        _check_group(statistics.format.group, x, self.name)
        try:
            with as_it_is(x.device):
                finite = without_missing(x)
                scale, zero_point = statistics.observe(finite if x.dim() else finite.reshape(1), collects=collects)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(
                f"{self.name} cannot take the statistics of an activation of shape {tuple(x.shape)}: {error}; "
                "scaling_per_output_type=, per_channel_broadcastable_shape= and group_dim= must fit it"
            ) from error
        return ObservedQuantizer(self.name, statistics, scale, zero_point)

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        """Take a tensor's statistics, quantize and pack it.

        Args:
            x: floating-point tensor of any shape and strides.
            seed: key of stochastic rounding's random bits; unused for other roundings.

        Returns:
            The packed activation, on the device of ``x``.
        """
        return self.with_statistics_of(x).quantize(x, seed)

    def apply(self, fn: Callable[[nn.Module], Any]) -> BrevitasQuantizer:
        """Do nothing: with ``apply``, Brevitas' calibration would end the collection of all quantizers in reach."""
        return self

    def extra_repr(self) -> str:
        """Return the injector's name and the code width."""
        return f"{self.name}, bit_width={self.format.codes.bit_width}"

    def __repr__(self) -> str:
        """One line: Brevitas has many modules."""
        return f"BrevitasQuantizer({self.extra_repr()})"

    def _like(self, group_dim: int, collects: bool = True) -> BrevitasQuantizer:
        twin = BrevitasQuantizer(self.source, group_dim=group_dim, collects=collects, is_lazy=True)
        twin.is_stochastic = self.is_stochastic
        return twin

    def _statistics_of(self, place: str) -> TensorStatistics:
        """Return the statistics of one tensor of a forward pass, built on first use."""
        if place not in self.tensors:
            injector = with_group_dim(self.source, self.group_dim)
            tensor_quant, self.asked = build_tensor_quant(injector)
            if any(is_kind(module, StochasticRoundSte) for module in tensor_quant.modules()):
                _refuse_scripting(self.name)
                tensor_quant, _ = build_tensor_quant(injector.let(float_to_int_impl=SeededStochasticRound))
            self.tensors[place] = statistics = TensorStatistics(tensor_quant, self.name).train(self.training)
            self.is_stochastic = bool(statistics.roundings)
        return self.tensors[place]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._prefix = prefix
        within = f"{prefix}tensors."
        for key in state_dict:
            if key.startswith(within):
                self._statistics_of(key.removeprefix(within).partition(".")[0])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by settings and state: Brevitas' modules may hold functions that cannot be pickled."""
        states = {place: statistics.state() for place, statistics in self.tensors.items()}
        return _restored, (self.source, self.group_dim, self.collects, self.is_stochastic, self.training, states)


def _check_group(group: tuple[int, int] | None, x: Tensor, name: str) -> None:
    if group is not None and not -max(x.dim(), 1) <= group[0] < max(x.dim(), 1):
        raise ValueError(
            f"group_dim={group[0]} of {name} is no dimension of an activation of shape {tuple(x.shape)}; group_dim=-1 "
            "is the last one of any"
        )


def _forgive_missing(module: BrevitasQuantizer, keys: Any) -> None:
    """Let a state dict without statistics load, such as the plain layer's: they are then collected anew."""
    keys.missing_keys[:] = [key for key in keys.missing_keys if not key.startswith(module._prefix)]


def _refuse_scripting(name: str) -> None:
    if JIT_ENABLED:
        raise ValueError(
            f"float_to_int_impl_type='stochastic_round' of {name} cannot be scripted with the seeds of a region; unset "
            "BREVITAS_JIT, or round to nearest"
        )


def _restored(
    source: type, group_dim: int, collects: bool, is_stochastic: bool, training: bool, states: dict[str, State]
) -> BrevitasQuantizer:
    quantizer = BrevitasQuantizer(source, group_dim=group_dim, collects=collects, is_lazy=True).train(training)
    quantizer.is_stochastic = is_stochastic
    for place, state in states.items():
        quantizer._statistics_of(place).set_state(state)
    return quantizer
