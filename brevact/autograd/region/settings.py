"""Settings of a region: the quantizer, when it runs, and which tensors are too small for it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from brevact.autograd.interop.other_code import is_path
from brevact.quantizers import from_text, to_text
from brevact.quantizers.brief import brief
from brevact.quantizers.checks import check_bit_width, check_bool, check_int, member_of
from brevact.quantizers.normalizing import has_uniform_codes
from brevact.quantizers.traits import is_quantizer, traits_of


class SaveMode(str, enum.Enum):
    """When a saved activation is quantized.

    ``SAVE_QUANTIZED`` quantizes in the forward pass and stores the packed codes, which saves memory.
    ``QUANTIZE_ON_BACKWARD`` stores a full-precision copy and quantizes when the op's backward starts, with the seed
    that the forward pass drew: gradients equal those of ``SAVE_QUANTIZED`` bit for bit, so that an ablation separates
    the effect of the noise from everything else.

    Source: J. Li, master's thesis, Heidelberg University, 2025, section 4.2.4.

    >>> SaveMode("quantize_on_backward")
    <SaveMode.QUANTIZE_ON_BACKWARD: 'quantize_on_backward'>
    """

    SAVE_QUANTIZED = "save_quantized"
    QUANTIZE_ON_BACKWARD = "quantize_on_backward"


_keys: dict[tuple[Any, ...], int] = {}
_quantizers: dict[Any, Any] = {}  # the first of equal ones, which later ones become: `is` is quicker than `==`
_numbers = itertools.count()

#: Bits of a forward quantizer's rounding errors if its scale is learned.
DEFAULT_RESIDUAL_BIT_WIDTH = 2
#: Bits that a packed tensor must have for its nonlinear functions to derive from it.
DEFAULT_DERIVE_MIN_BITS = 4
#: Bits of attention's query and key, whose products are exponentiated.
DEFAULT_SCORE_BIT_WIDTH = 8
#: Multiplications and additions per element up to which a layer's output is recomputed; 0 recomputes none.
DEFAULT_RECOMPUTE = 0
#: Tensors with fewer elements stay unpacked: packing one costs more time than its bytes are worth.
DEFAULT_MIN_NUMEL = 4096


def nominal_quantizer(quantizer: Any) -> Any:
    """Return ``quantizer``, or the one that it substitutes at more bits, so that the same tensors are stored."""
    nominal = traits_of(quantizer).nominal
    return quantizer if nominal is None else nominal


def bits_of(quantizer: Any) -> int:
    """Return the bits per code, a mean rounded down; 0 for quantizers without a bit width."""
    width = traits_of(nominal_quantizer(quantizer)).bit_width
    return int(width) if isinstance(width, int | float) else 0


_text_of = functools.lru_cache(maxsize=256)(to_text)


@functools.lru_cache(maxsize=256)
def _has_text(quantizer: Any) -> bool:
    try:
        return bool(from_text(to_text(quantizer)) == quantizer)
    except TypeError:
        return False


@dataclass(frozen=True)
class BackwardSettings:
    """How a region saves the tensors that its ops need for backward.

    >>> from brevact.quantizers import UniformQuantizer
    >>> settings = BackwardSettings(UniformQuantizer(bit_width=4), min_numel=0)
    >>> settings.save_mode, settings.min_numel
    (<SaveMode.SAVE_QUANTIZED: 'save_quantized'>, 0)

    Args:
        quantizer: activation quantizer (``quantize(x, seed)`` returns a ``PackedActivation``); None means full
            precision and needs ``of_functions``.
        save_mode: see :class:`SaveMode`.
        min_numel: tensors with fewer elements are stored unpacked.
        residual_bit_width: bits per element for the rounding residual and the clipping mask of a forward quantizer with
            a learned scale: 2 to 8, stochastically rounded; 32 stores the quantizer's input in full precision.
        derive_min_bits: fewest bits of a packed tensor from which smooth functions derive; affine and piecewise linear
            functions derive at any width, since they are unbiased. 0 derives nothing: each op stores its own tensor.
        score_bit_width: bits of attention's query and key, 2 to 8, if the quantizer has fewer.
        recompute: recompute a layer's output in backward, from its input and weight, if it costs at most this many
            multiplications per element and the op that reads it has these settings; it is then not stored. 0 recomputes
            none. A 3x3 depthwise convolution costs 9, a linear layer as many as it has inputs.
        of_functions: pairs of an op's name (``brevact.autograd.ops``) and the settings that replace these for it,
            None for full precision. For an op inside another one, the first of the two pairs decides.
        double_backward: whether gradients may be differentiated again (``create_graph=True``). Each op is then torch's
            own, hooks pack its saved tensors if its gradient allows that, and nothing is recomputed (``recompute``).
            Compiled graphs, which have no second derivatives in torch, ignore it.

    Raises:
        TypeError: ``quantizer`` cannot quantize, ``of_functions`` holds something else, or ``double_backward`` is not a
            bool.
        ValueError: unknown ``save_mode``, negative ``min_numel``, a number of bits that is not accepted, or
            ``double_backward`` with a quantizer that changes the forward pass.
    """

    quantizer: Any
    save_mode: SaveMode = field(default=SaveMode.SAVE_QUANTIZED)
    min_numel: int = field(default=DEFAULT_MIN_NUMEL)
    residual_bit_width: int = field(default=DEFAULT_RESIDUAL_BIT_WIDTH)
    derive_min_bits: int = field(default=DEFAULT_DERIVE_MIN_BITS)
    score_bit_width: int = field(default=DEFAULT_SCORE_BIT_WIDTH)
    recompute: int = field(default=DEFAULT_RECOMPUTE)
    of_functions: tuple[tuple[str, BackwardSettings | None], ...] = field(default=())
    double_backward: bool = field(default=False)
    key: int = field(init=False, repr=False, compare=False)
    """Number, quick to hash, of all settings in this process that differ at most in ``recompute``, ``of_functions`` and
    ``double_backward``: they store a tensor alike."""
    text: str | None = field(init=False, repr=False, compare=False)
    """The settings as text, which a traced graph can hold; None for quantizers without a text form."""

    draws_size: bool = field(init=False, repr=False, compare=False)
    """Whether the quantizer first draws on the host how many bytes a tensor takes (``with_drawn_size``)."""
    quantizes_forward: bool = field(init=False, repr=False, compare=False)
    """Whether norms continue with the stored values, in eval mode and without gradients too."""

    is_random: bool = field(init=False, repr=False, compare=False)
    """Whether packing a tensor again may give other codes."""

    is_exact: bool = field(init=False, repr=False, compare=False)
    """Whether activations stay unpacked, and only masks and codes of forward quantizers are packed."""

    uses_fast_pack: bool = field(init=False, repr=False, compare=False)
    """Whether tensors of equal sizes are packed alike, at once, in the uniform format."""

    derives: bool = field(init=False, repr=False, compare=False)
    """Whether tensors are derived from packed ones."""

    derives_curved: bool = field(init=False, repr=False, compare=False)
    """Whether smooth functions of packed tensors are derived, too."""

    is_lossless: bool = field(init=False, repr=False, compare=False)
    """Whether decoding returns the packed tensor bit for bit, so that norms pack their input, not normalized values."""

    keeps_elements: bool = field(init=False, repr=False, compare=False)
    """Whether elements are stored in their own dtype, as sources that others are computed from."""

    leaves_ops_to_torch: bool = field(init=False, repr=False, compare=False)
    """Whether torch runs some ops that have a counterpart: for bit-equal gradients, or for second derivatives."""

    def __post_init__(self) -> None:
        self._check_functions()
        if (self.quantizer is not None or not self.of_functions) and not is_quantizer(self.quantizer):
            raise TypeError(
                f"quantizer={brief(self.quantizer)} is no activation quantizer; accepted is an object with "
                "quantize(x, seed) and is_stochastic, such as brevact.quantizer(StochBackward2bit)"
            )
        try:
            hash(self.quantizer)
        except TypeError:
            raise TypeError(
                f"quantizer={brief(self.quantizer)} has no hash; equal quantizers share what they packed, so "
                "one must be immutable and hashable: @dataclass(frozen=True)"
            ) from None
        save_mode = member_of("save_mode", SaveMode, self.save_mode)
        check_int("min_numel", self.min_numel, 0)
        check_bit_width("residual_bit_width", self.residual_bit_width, (*range(2, 9), 32))
        check_int("derive_min_bits", self.derive_min_bits, 0, 8)
        check_int("score_bit_width", self.score_bit_width, 2, 8)
        check_int("recompute", self.recompute, 0)
        check_bool("double_backward", self.double_backward)
        quantizer = _quantizers.setdefault(self.quantizer, self.quantizer)
        traits = traits_of(quantizer)
        derives = self.derive_min_bits > 0 and not (traits.is_exact or traits.is_lossless)
        is_plain = save_mode is SaveMode.SAVE_QUANTIZED and has_uniform_codes(quantizer)
        derives_curved = derives and bits_of(quantizer) >= self.derive_min_bits
        self.__dict__.update(
            save_mode=save_mode,
            quantizer=quantizer,
            is_exact=bool(traits.is_exact),
            is_lossless=bool(traits.is_lossless),
            keeps_elements=bool(traits.keeps_elements),
            derives=derives,
            derives_curved=derives_curved,
            draws_size=traits.draws_size,
            quantizes_forward=bool(traits.quantize_forward) and traits.for_normalized is not None,
            leaves_ops_to_torch=bool(traits.is_exact) or self.double_backward,
            is_random=bool(traits.is_stochastic) or traits.draws_size,
            uses_fast_pack=is_plain,
        )
        if self.double_backward and self.quantizes_forward:
            raise ValueError(
                f"double_backward=True with {brief(quantizer)}: norms that go on with rounded values have no "
                "second derivative; leave out quantize_forward=True or double_backward=True"
            )
        has_text = _has_text(quantizer) and all(each is None or each.text is not None for _, each in self.of_functions)
        for_graph = replace(self, double_backward=False) if has_text and self.double_backward else self
        key, text = _keys.setdefault(self._fields[:-3], next(_numbers)), _text_of(for_graph) if has_text else None
        self.__dict__.update(key=key, text=text)

    def _check_functions(self) -> None:
        if isinstance(self.of_functions, tuple) and all(
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in self.of_functions
        ):
            if all(each is None or isinstance(each, BackwardSettings) for _, each in self.of_functions):
                return
        raise TypeError(
            f"of_functions={brief(self.of_functions)}; accepted is a tuple of pairs of the name of an op and "
            'BackwardSettings or None: (("cross_entropy", settings),); a policy, {F.cross_entropy: '
            'StochBackward4bit, "*": StochBackward2bit}, makes it of torch functions'
        )

    @functools.cached_property
    def by_op(self) -> dict[str, BackwardSettings | None]:
        found: dict[str, BackwardSettings | None] = {}
        for i, (name, settings) in enumerate(self.of_functions):
            found.setdefault(name, with_functions(settings, self.of_functions[:i]))
        return found

    @functools.cached_property
    def most_recompute(self) -> int:
        """The largest ``recompute`` of these settings and those of ops: no costlier layer is recomputed."""
        return max(self.recompute, *(each.most_recompute for _, each in self.of_functions if each is not None), 0)

    @functools.cached_property
    def has_rules_for_other_code(self) -> bool:
        return any(is_path(name) for name, _ in self.of_functions)

    @property
    def changes_forward(self) -> bool:
        """Whether norms continue with the stored values, here or in one of ``of_functions``."""
        return self.quantizes_forward or any(each is not None and each.changes_forward for _, each in self.of_functions)

    @functools.cached_property
    def for_normalized(self) -> BackwardSettings | None:
        """Settings with which norms store a normalized input; None if they store their input, as other ops do."""
        quantizer = traits_of(self.quantizer).for_normalized
        if quantizer is None:
            return None
        least = 0 if self.quantizes_forward else self.min_numel
        return BackwardSettings(quantizer, self.save_mode, least, derive_min_bits=self.derive_min_bits, recompute=0)

    @functools.cached_property
    def for_smooth(self) -> BackwardSettings | None:
        """Settings with which smooth functions store their input, with dense levels around 0; None for even ones."""
        quantizer = traits_of(self.quantizer).for_smooth
        return None if quantizer is None or self.double_backward else replace(self, quantizer=quantizer)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields: keys do not outlive the process."""
        return BackwardSettings, self._fields

    @property
    def _fields(self) -> tuple[Any, ...]:
        return tuple(getattr(self, each.name) for each in dataclasses.fields(self) if each.init)


def with_functions(
    settings: BackwardSettings | None, of_functions: tuple[tuple[str, BackwardSettings | None], ...]
) -> BackwardSettings | None:
    if not of_functions:
        return settings
    if settings is None:
        return BackwardSettings(None, of_functions=of_functions)
    return replace(settings, of_functions=(*of_functions, *settings.of_functions))


def with_overrides(settings: BackwardSettings | None, overrides: Mapping[str, Any]) -> BackwardSettings | None:
    if settings is None or not overrides:
        return settings
    functions = tuple((name, with_overrides(each, overrides)) for name, each in settings.of_functions)
    return replace(settings, of_functions=functions, **overrides)
