"""Fake quantization in the forward pass. Saves integer codes, masks of clipped elements, and few-bit rounding errors.

y = clip(round(x / s + z)), out = (y - z) s, with straight-through rounding. With the output gradient g, and m = 1 where
nothing was clipped: dL/dx = g m (in stock order: g s m / s), dL/ds = sum of g (y - z) - g s m (x / s) / s, and
x / s = y + r - z with the rounding residual r in [-1/2, 1/2]. So dL/ds sums g (y - z) over clipped elements and -g r
over the others. The codes of y are saved exactly and shared with every op that saves ``out``
(``brevact.autograd.known_values``). If the scale is learned, m and r are saved together, r rounded stochastically to
fixed levels so that dL/ds is unbiased; otherwise m is saved in one bit. Until an op saves ``out``, one bit per code
suffices (``brevact.autograd.known_values``). The gradients of x and z are exact.

A weight stays in memory anyway, so its fake quantization saves nothing else and recomputes from it.

Source: Learned step size quantization, arXiv:1902.08153, section 2.1; Brevitas, ``brevitas.core.quant`` for arithmetic
and order of operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brevact.autograd import known_values, storage_report
from brevact.autograd.ops.base import Formula, compute_from_weight, gradients_of, save
from brevact.autograd.ops.one_pass import Kind, Quantized, one_pass_for
from brevact.autograd.saved import Keeper, Saved, decoder_of_mask
from brevact.autograd.settings import SaveMode
from brevact.autograd.store import keep_as_it_is, keep_mask, pack, reported
from brevact.geometry import IntegerRounding
from brevact.private_names.of_torch import DisableTorchFunction, top_hooks
from brevact.quantizers import Layout, ResidualQuantizer, is_on_host, pack_mask


@dataclass(frozen=True, eq=False)
class Integers:
    """How a forward quantizer turns x / s + z into integers: round (with an identity gradient), then clip.

    The minimum is a 0-d tensor, and also a number, ``lowest``. ``residual`` bounds the rounding error x - round(x). A
    narrow range reserves the last code for NaN. ``repeats``: rounding the same numbers again gives the same integers.
    If ``rounding`` is set, it is deterministic, and kernels do everything in one pass.
    """

    round: Callable[[Tensor], Tensor]
    clamp: Callable[[Tensor], Tensor]
    minimum: Tensor
    maximum: Tensor
    lowest: int
    highest: int
    bit_width: int
    residual: tuple[float, float]
    rounding: IntegerRounding | None = None
    is_narrow: bool = False
    repeats: bool = True
    clips_gradients: bool = True

    def of(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shifted = x / scale + zero_point
        rounded = self.round(shifted)
        return shifted, rounded, self.clamp(rounded)

    def blocked(self, rounded: Tensor, rectified: Tensor | None = None) -> Tensor | None:
        """Mask of clipped elements (not NaN), and of those zeroed by a ReLU with output ``rectified``, or None."""
        found = None
        if self.clips_gradients:
            found = (rounded > self.maximum).logical_or_(rounded < self.minimum)
        if rectified is not None:
            found = (rectified <= 0) if found is None else found.logical_or_(rectified <= 0)
        return found

    @functools.cached_property
    def kind(self) -> Kind | None:
        if self.rounding is None:
            return None
        ends = self.bit_width, self.lowest, self.highest
        return Kind(*ends, self.rounding, self.clips_gradients, self.is_narrow)

    def residual_quantizer(self, bit_width: int) -> ResidualQuantizer:
        low, high = self.residual
        return ResidualQuantizer(bit_width=bit_width, low=low, high=high)

    def quantized(self, x: Tensor, *given: Tensor) -> Tensor:
        """Return the values; ``given``: the scale and the zero point, and those before rounding."""
        one_pass = None if self.kind is None else one_pass_for(self.kind, False, x, *given)
        return self.by_ops(x, *given) if one_pass is None else one_pass.values(x, *given[:2])

    def by_ops(self, x: Tensor, scale: Tensor, zero_point: Tensor, pre_scale: Tensor, pre_zero_point: Tensor) -> Tensor:
        return (self.of(x, pre_scale, pre_zero_point)[2] - zero_point) * scale

    def gradients(self, tensors: list[Tensor], needs: tuple[bool, ...], grad: Tensor) -> Sequence[Tensor | None]:
        one_pass = None if self.kind is None else one_pass_for(self.kind, False, *tensors)
        if one_pass is None or not one_pass.takes(grad):
            return gradients_of(self.by_ops, tensors, needs, grad)
        x, scale, zero_point, *_ = tensors
        found = one_pass.gradients(grad, scale, zero_point, values=x.detach(), zero_learns=needs[2] or needs[4])
        return [each if needed else None for each, needed in zip(found, needs, strict=True)]

    def of_rectified(self, x: Tensor, *given: Tensor) -> Tensor:
        return self.by_ops(x.relu(), *given)


class Rectifier(NamedTuple):
    """A ReLU in front: its detached output, None if not computed yet; whether the zero point is known to be lowest."""

    output: Tensor | None
    zero_is_lowest: bool = False


class _Recipe(NamedTuple):
    """How backward reads what a fake quantizer saved; ``integers``: to recompute them from the values, or None."""

    residual_of: ResidualQuantizer | None
    one_pass: Any
    rectifies: bool
    is_joint: bool
    keeps_ends: bool
    integers: Integers | None
    shapes: list[torch.Size]
    dtype: torch.dtype
    of_quotient: torch.dtype


def _quantize(
    region: Keeper, integers: Integers, rectifier: Rectifier | None, ctx: Any, x: Tensor, *given: Tensor
) -> Tensor:
    """Run a fake quantizer. If values are saved in place of rounding errors, backward recomputes from them."""
    scale, zero_point, pre_scale, pre_zero_point = given
    needs_scale, _, needs_pre_scale, _ = ctx.needs_input_grad[4:]
    in_bits = needs_pre_scale and integers.clips_gradients and region.settings.residual_bit_width <= 8
    residual_of = integers.residual_quantizer(region.settings.residual_bit_width) if in_bits else None
    seed = region.seeds.next(x.device) if in_bits else None
    keeps_values = needs_pre_scale and not in_bits
    again = keeps_values and integers.repeats and region.settings.residual_bit_width > 8
    values = x if rectifier is None else rectifier.output
    one_pass = None if integers.kind is None else one_pass_for(integers.kind, rectifier is not None, x, *given)
    # Both parts of the scale's gradient go to one tensor, and terms with integers that were not clipped cancel.
    is_joint = needs_scale and pre_scale is scale and pre_zero_point is zero_point
    if residual_of is not None and not is_joint:
        one_pass = None
    found = None
    if one_pass is not None:
        if values is None and keeps_values and one_pass.layout.dtype is not x.dtype:
            values = x.relu()  # the kernels would write another type
        unwritten = one_pass.layout.empty(x.device) if values is None and keeps_values else None
        found = one_pass.quantize(
            *(x if values is None else values, scale, zero_point),
            keeps_mask=not again and residual_of is None and (integers.clips_gradients or rectifier is not None),
            residual_of=residual_of,
            seed=seed,
            values=unwritten,
        )
    if found is None:
        one_pass = None
        values = x.relu() if values is None else values
        found = _quantized(integers, rectifier is not None, values, given, residual_of, seed)
    elif values is None:
        values = unwritten
    known_values.register(found.out, *found.codes, is_new=one_pass is not None)
    (packed, *numbers), code_decoder = found.codes
    has_one_zero = rectifier is None or zero_point.numel() == 1
    keeps_ends = one_pass is not None and residual_of is not None and has_one_zero and _may_keep_ends(code_decoder)
    codes: Saved | None = None
    if keeps_ends:
        floor = None
        if rectifier is not None and not rectifier.zero_is_lowest:
            rounded = integers.round(numbers[0].detach().reshape(()).to(code_decoder.layout.dtype))
            floor = rounded.clamp(integers.lowest, integers.highest).sub_(integers.lowest)
        ends = code_decoder.bit_width, code_decoder.nbytes, top_hooks(True), floor
        codes = (known_values.keep_ends(packed, *ends), *numbers), code_decoder
    elif (needs_scale or needs_pre_scale) and not again:
        codes = reported(found.codes)
    kept: list[Saved | None] = [
        codes,
        None if found.residual is None else reported(found.residual),
        None if found.mask is None or again else reported(found.mask),
        None,
    ]
    if keeps_values and values is not None:
        kept[3] = keep_as_it_is(values) if region.settings.residual_bit_width > 8 else region.keep(values)
    shares = pre_zero_point is zero_point
    save(ctx, *kept, exact=(scale, pre_scale, None if shares else pre_zero_point, zero_point if again else None))
    dtype = found.codes[1].layout.dtype
    recipe = _Recipe(
        *(residual_of, one_pass, rectifier is not None, is_joint, keeps_ends, integers if again else None),
        *([each.shape for each in given], dtype, dtype if one_pass is not None else torch.result_type(x, pre_scale)),
    )
    ctx.gradients = functools.partial(_gradients, recipe)
    return found.out


def _gradients(
    of: _Recipe,
    needs: tuple[bool, ...],
    grad: Tensor,
    codes: Any,
    residual: Any,
    mask: Any,
    values: Any,
    scale: Tensor,
    pre_scale: Tensor,
    pre_zero_point: Tensor | None,
    zero_point: Tensor | None,
) -> tuple[Tensor | None, ...]:
    of_scale, of_zero_point, of_pre_scale, of_pre_zero_point = of.shapes
    if of.keeps_ends:
        token, *numbers = codes.tensors
        codes = codes._replace(tensors=(known_values.load_ends(token), *numbers))
    if of.one_pass is not None and of.one_pass.takes(grad):
        x = None if values is None else values.decode()
        learns = x is not None or residual is not None
        if zero_point is None:
            zero_point = grad.new_zeros(of_zero_point) if codes is None else codes.tensors[1]
        found = of.one_pass.gradients(
            *(grad, scale, zero_point),
            codes=codes.tensors[0] if learns and codes is not None else None,
            mask=None if mask is None else mask.tensors[0],
            values=x,
            residual_of=of.residual_of,
            residual=None if residual is None else residual.tensors[0],
            zero_learns=needs[2] or needs[4],
        )
        return tuple(each if needed else None for each, needed in zip(found, needs, strict=True))
    if of.integers is not None:
        compute = of.integers.of_rectified if of.rectifies else of.integers.by_ops
        given: list[Any] = [scale, zero_point, pre_scale, zero_point if pre_zero_point is None else pre_zero_point]
        return tuple(gradients_of(compute, [values.decode(), *given], needs, grad))
    shifted: Any = None
    blocked = None
    q: Any = None if codes is None else codes.decoder.integers(codes.tensors)
    if residual is not None:
        assert of.residual_of is not None
        shifted = residual.decode()
        blocked = shifted == of.residual_of.clipped
        if of.is_joint and q is not None:
            q = torch.where(blocked, q, q * 0.0)
        else:
            if pre_zero_point is not None:
                shifted.add_(codes.tensors[1]).sub_(pre_zero_point)
            shifted.add_(q)  # clipped elements have some value here, their gradient is zero
    elif values is not None:
        shifted = values.decode() / pre_scale
    through = (grad * scale).to(of.dtype)
    if blocked is not None:
        clipped = torch.where(blocked, 0.0, through)  # in the memory order of the mask, as of stock ops
    else:
        clipped = through if mask is None else mask.multiply(through)
    of_shifted = clipped.to(of.of_quotient)  # each gradient by the formula and order of stock ops
    of_x = of_shifted / pre_scale if needs[0] else None
    found = (
        of_x,
        (grad * q).sum_to_size(of_scale) if needs[1] else None,
        (-through).sum_to_size(of_zero_point) if needs[2] else None,
        (-of_shifted * (shifted / pre_scale)).sum_to_size(of_pre_scale) if needs[3] else None,
        clipped.sum_to_size(of_pre_zero_point) if needs[4] else None,
    )
    if of_x is not None and of.rectifies and _may_be_nan(pre_scale):  # 0 / NaN, which a ReLU sets to 0
        rectified = of_x if mask is None else mask.multiply(of_x)
        rectified = rectified if blocked is None else torch.where(blocked, 0.0, rectified)
        found = torch.where(pre_scale.isnan(), rectified, of_x), *found[1:]
    return found


def _may_keep_ends(codes: known_values.IntegerCodes) -> bool:
    """Return whether one bit can replace each code until an op saves the output; not if one code is a NaN."""
    hooks = top_hooks(True)
    return (
        codes.bit_width in known_values.BIT_WIDTHS
        and not codes.has_spare
        and codes.layout.numel >= known_values.MIN_NUMEL
        and (hooks is None or storage_report.are_of_report(hooks))  # others would hand out a copy of the token
    )


def _may_be_nan(x: Tensor) -> bool:
    """Return whether a tensor may have a NaN; True without looking on a GPU, to avoid a synchronization."""
    return not is_on_host(x) or bool(x.isnan().any())


def _quantized(
    integers: Integers,
    rectifies: bool,
    values: Tensor,
    given: tuple[Tensor, ...],
    residual_of: ResidualQuantizer | None,
    seed: int | Tensor | None,
) -> Quantized:
    """Quantize by torch ops and pack the tensors that the gradient needs; ``values`` is any ReLU in front's output."""
    scale, zero_point, pre_scale, pre_zero_point = given
    shifted, rounded, q = integers.of(values, pre_scale, pre_zero_point)
    out = (q - zero_point) * scale
    blocked = integers.blocked(rounded, values if rectifies else None)
    decoder = known_values.IntegerCodes(
        Layout.of(q), integers.bit_width, integers.lowest, 1, out.nbytes, integers.is_narrow
    )
    codes = decoder.encode(q, zero_point, scale), decoder
    mask = residual = None
    if residual_of is not None and seed is not None and blocked is not None:
        left = shifted.sub_(rounded).clamp_(residual_of.low, residual_of.high)
        state = left.masked_fill_(blocked, residual_of.clipped)
        residual = pack(state, residual_of, SaveMode.SAVE_QUANTIZED, seed)
    elif blocked is not None:
        blocked.logical_not_()
        mask = (pack_mask(blocked),), decoder_of_mask(Layout.of(blocked), 0.0)
    return Quantized(out, codes, mask, residual)


def fake_quantize(
    region: Keeper,
    integers: Integers,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    pre_scale: Tensor,
    pre_zero_point: Tensor,
    rectifier: Rectifier | None = None,
) -> Any:
    """Fake-quantize to integers: (clip(round(x / pre_scale + pre_zero_point)) - zero_point) * scale.

    Scales and zero points broadcast to the activation or weight ``x``; those before rounding often equal those after
    it. With a ``rectifier``, ``x`` is the input of a ReLU whose output is quantized: the gradient goes to ``x``, and
    one mask covers both ops. Elements at zero then add to the zero point's gradient, so a zero point may be learned
    only if the ReLU's output is saved. Returns ``NotImplemented`` where stock ops must run.
    """
    given = (scale, zero_point, pre_scale, pre_zero_point)
    with DisableTorchFunction():  # under a mode each attribute of a tensor would be a call of its function
        weight = region.is_weight(x)
        shares = pre_scale is scale and pre_zero_point is zero_point
        # whether the ReLU's output alone is saved, and the rest recomputed from it
        keeps_output = pre_scale.requires_grad and integers.repeats and region.settings.residual_bit_width > 8
        if (
            not is_quantizable(region, x, given[:2] if shares else given)
            or (weight and (rectifier is not None or not integers.repeats))
            or (not weight and integers.bit_width > 8)
            or (rectifier is not None and pre_zero_point.requires_grad and not keeps_output)
        ):
            return NotImplemented
        storage_report.report_op(fake_quantize)
        if weight:
            return compute_from_weight(region, integers.quantized, x, *given, gradients=integers.gradients)
        return region.apply(Formula, functools.partial(_quantize, region, integers, rectifier), None, x, *given)


def is_quantizable(region: Keeper, x: Any, given: tuple[Any, ...]) -> bool:
    if not region.is_activation(x) or x.numel() < max(region.settings.min_numel, 1):
        return False
    device = x.device
    for each in given:  # a loop: this runs in every call
        if not region.is_activation(each) or each.device != device:
            return False
    return _broadcast(x.shape, *[each.shape for each in given])


@functools.lru_cache(maxsize=4096)
def _broadcast(shape: torch.Size, *others: torch.Size) -> bool:
    return torch.broadcast_shapes(shape, *others) == shape


@dataclass(frozen=True, eq=False)
class Signs:
    """How a binary or ternary forward quantizer turns x into the integers that the scale multiplies.

    ``of`` returns the integers of x under a scale, starting at -1 in steps, by differentiable ops. ``clips``: elements
    beyond the scale have no gradient, and the scale gets theirs. A zero stops the gradient.
    """

    of: Callable[[Tensor, Tensor], Tensor]
    bit_width: int
    step: int
    clips: bool = False
    has_zero: bool = False

    def quantized(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.of(x, scale) * scale


def quantize_signs(region: Keeper, signs: Signs, x: Tensor, scale: Tensor) -> Any:
    if not is_quantizable(region, x, (scale,)):
        return NotImplemented
    storage_report.report_op(quantize_signs)
    if region.is_weight(x):
        return compute_from_weight(region, signs.quantized, x, scale)
    dtype, shape = x.dtype, x.shape

    def run(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        q = signs.of(x, scale)
        out = q * scale
        decoder = known_values.IntegerCodes(
            Layout.of(q), signs.bit_width, -1, signs.step, out.nbytes, has_spare=signs.has_zero
        )
        tensors = decoder.encode(q, torch.zeros((), dtype=q.dtype, device=q.device), scale)
        known_values.register(out, tensors, decoder)
        codes = reported((tensors, decoder)) if ctx.needs_input_grad[4] or signs.has_zero else None
        passes = (x > scale).logical_or_(x < -scale).logical_not_() if signs.clips else None
        save(ctx, codes, None if passes is None else keep_mask(passes), exact=(scale,))
        return out

    def gradients(needs: tuple[bool, ...], grad: Tensor, codes: Any, mask: Any, scale: Tensor) -> tuple[Any, ...]:
        q = torch.ones((), device=grad.device) if codes is None else codes.decoder.integers(codes.tensors)
        size = scale.detach().abs()
        x = q * (1000.0 * size + 1.0)  # beyond any threshold and bound
        if not signs.has_zero:
            x = torch.where(mask.decode(), q * (0.5 * size), x) if mask is not None else q
        return tuple(gradients_of(signs.quantized, [x.to(dtype).expand(shape), scale], needs, grad))

    with DisableTorchFunction():
        return region.apply(Formula, run, gradients, x, scale)
