"""Attention: query, key and value are saved packed; scores, output and log-sum-exp are not saved.

Backward runs torch's own attention again on the decoded q^, k^, v^ and differentiates it, so that probabilities,
normalization and output match one another; the log-sum-exp of the exact scores would not match. Dropout replays the
generator. Masks are saved unpacked: the caller holds them for all layers. A mask that a layer made, with a gradient, is
packed like scores, as differences from the maxima of its rows.

Keys are packed less their mean, where it exceeds their deviation: it moves all scores of a query alike, and gradients
of scores sum to 0 for a query.

For given scores the gradients are linear in v^, but all of them are exponential in q^ k^: if the region's quantizer has
fewer bits, queries and keys use ``score_bit_width``, 8 by default. The remaining bias, of the order of the variance of
8-bit scores, is below 2 % of the gradient's norm on random and on peaked attention. With 2 bits for q and k it is 20 to
300 %, and the noise up to 28 times as large; packed probabilities would give 1.5 to 6 times the noise, and L^2 codes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from brevact.autograd.call_arguments import BoundCall, Parameters, is_plain
from brevact.autograd.deriving.cache import Graph, cache, make_token
from brevact.autograd.deriving.layers import MOST_NESTED, HeldOutput, can_recompute
from brevact.autograd.ops.base import Formula, Needs, outside_regions, requires_grad, run_inside, save, with_bits
from brevact.autograd.ops.op import Op, Stored
from brevact.autograd.ops.products import keep_operand, without_autocast_cache
from brevact.autograd.saving.saved import AS_IT_IS, Region, Saved, distinct_elements, express, mapped, with_strides
from brevact.autograd.saving.storages import find_shared, share_packed, storage_address
from brevact.autograd.saving.store import reported
from brevact.private_names.of_torch import attention_by_math, choose_attention, is_any_autocast_enabled

_attend = F.scaled_dot_product_attention


class _Scores(NamedTuple):
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


def _apply(
    region: Region, attend: Callable[..., Tensor], options: _Scores, backend: int | None, *tensors: Tensor | None
) -> Tensor:
    dtypes = tuple(None if x is None else x.dtype for x in tensors)

    def run(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        needs = ctx.needs_input_grad[3:7]
        state = None
        if backend is not None:
            state = torch.cuda.get_rng_state(query.device) if query.is_cuda else torch.get_rng_state()
        # Torch checks whether the mask, or autocast's copy of it, requires a gradient.
        with torch.set_grad_enabled(needs[3] and is_any_autocast_enabled()):
            out = without_autocast_cache(attend, query, key, value, mask)
        out, finer = out.detach(), with_bits(region, region.settings.score_bit_width)
        of_query, of_key = keep_operand(finer, query), _keep_key(finer, query, key)
        of_value = keep_operand(region, value) if needs[0] or needs[1] or needs[3] else None
        token = None
        if region.recompute and options.dropout_p == 0.0 and not needs[3]:
            token = _remember(region, (of_query, of_key, of_value), out, key.shape[-2], mask, options, needs[:3])
        of_mask = _keep_mask(finer, mask) if mask is not None and needs[3] else None
        save(ctx, token, of_query, of_key, of_value, of_mask, exact=(mask if of_mask is None else None, state))
        ctx.gradients = functools.partial(gradients, out.dtype, value.shape)
        return out

    def gradients(
        dtype: torch.dtype, of_value: torch.Size, needs: Needs, grad: Tensor, token: Any, *saved: Any
    ) -> tuple[Tensor | None, ...]:
        graph = None if token is None else cache.take_graph(token.decode())
        if graph is not None:
            with outside_regions(grad.device):
                return _differentiated(needs, dtypes, *graph, grad)
        *kept, made, mask, state = saved
        query, key, value = (None if item is None else item.decode_as(dtype) for item in kept)
        mask = mask if made is None else made.decode()
        value = grad.new_zeros(of_value) if value is None else value
        leaves = [
            x if x is None or x.dtype is torch.bool else x.detach().to(dtype).requires_grad_(need)
            for x, need in zip((query, key, value, mask), needs, strict=True)
        ]
        with outside_regions(grad.device), _replaying(state, grad.device):
            out = _recompute_attention(leaves, options, backend)
            return _differentiated(needs, dtypes, out, tuple(leaves), grad)

    return region.apply(Formula, run, None, *tensors)


def _from_largest(x: Tensor, largest: Tensor, *shape: int) -> Tensor:
    """Return a mask from its differences to the maxima of its rows; non-finite values become -inf."""
    return (x.masked_fill(x.isfinite().logical_not_(), -torch.inf) + largest).expand(shape)


#: Scores this far below their row's largest have a negligible probability, e^-60.
_LOWEST = -60.0


def _keep_mask(region: Region, mask: Tensor) -> Saved | None:
    """Pack a layer's mask once for all readers, with -inf where a softmax gives 0; None if it is small."""
    if mask.numel() < region.settings.min_numel:
        return None
    if (mask.is_leaf and mask.requires_grad) or region.is_weight(mask):
        return region.keep_activation(mask)

    def from_largest() -> Saved:
        x = distinct_elements(mask.detach())
        largest = x.amax(-1, keepdim=True)
        largest = largest.masked_fill(largest == -torch.inf, 0)
        x = x - largest
        kept = region.keep(x.masked_fill_(x < _LOWEST, -torch.inf), share=False)
        return mapped(kept, BoundCall(_from_largest, (Tensor, Tensor, *mask.shape)), largest)

    return _keep_once(region, mask, "mask", from_largest)


def _keep_key(region: Region, query: Tensor, key: Tensor) -> Saved:
    """Pack keys less their mean, which moves all scores of a query alike: what keys have in common takes no levels.

    Only where it exceeds their deviation: a few far keys, such as masked ones, would move all others by their size.
    """
    is_query = storage_address(key) == storage_address(query) and key.storage_offset() == query.storage_offset()
    is_held = (key.is_leaf and key.requires_grad) or region.is_weight(key) or region.settings.is_lossless
    if is_query or is_held or 0 in key.stride() or key.numel() < region.settings.min_numel:
        return keep_operand(region, key)

    def from_mean() -> Saved:
        x = key.detach()
        mean, norm = x.mean(-2, keepdim=True), torch.linalg.vector_norm(x, dim=-2, keepdim=True)
        is_near = mean.abs() * math.sqrt(2 * x.shape[-2]) <= norm  # within their deviation: 2 mean^2 <= mean of x^2
        return region.keep(x - mean.masked_fill_(is_near, 0), share=False)

    return _keep_once(region, key, "key", from_mean)


def _keep_once(region: Region, x: Tensor, name: str, keep: Callable[[], Saved]) -> Saved:
    """Save a tensor in a form of its own, once for all readers, or as it is known."""
    known = region.find_known(x)
    if known is not None:
        return reported(known)
    key, root = (name, region.settings.key), region.seeds.number if region.settings.is_random else 0
    found = find_shared(x, key, root)
    if found is not None:
        return reported(found)
    found = keep()
    share_packed(x, key, *found, root)
    return found


def _differentiated(
    needs: Needs, dtypes: tuple[Any, ...], out: Tensor, leaves: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    wanted = [x for x, need in zip(leaves, needs, strict=True) if x is not None and need]
    found = iter(torch.autograd.grad(out, wanted, grad))
    return tuple(next(found).to(dtype) if need else None for need, dtype in zip(needs, dtypes, strict=True))


@dataclass(eq=False, slots=True)
class _AttentionOutput(HeldOutput):
    """Decoder of the output; sources: query, key, value (``needs``: which need a gradient); a mask may follow."""

    options: _Scores
    needs: Needs

    def _computed(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Graph]:
        leaves: list[Tensor | None] = []
        for (kept, decoder), need in zip(self.parts(tensors), self.needs, strict=True):
            leaves.append(decoder.decode(kept).detach().to(self.dtype).requires_grad_(need))
        (mask,) = self.others(tensors) or (None,)
        leaves.append(mask if mask is None or mask.dtype is torch.bool else mask.to(self.dtype))
        with outside_regions(tensors[0].device):
            out = _recompute_attention(leaves, self.options, None)
        return with_strides(out.detach(), self.stride), (out, tuple(leaves))


def _remember(
    region: Region, kept: tuple, out: Tensor, keys: int, mask: Tensor | None, options: _Scores, needs: Needs
) -> Saved | None:
    """Register the output for recomputation; return a token's saved form, by which backward finds its graph."""
    sources = [source for source in kept if source is not None]
    depth = max(decoder.depth for _, decoder in sources)
    if not 2 * keys <= region.recompute or len(sources) < 3 or depth >= MOST_NESTED:
        return None
    if not can_recompute(region, out):
        return None
    token, masks = make_token(out.device), () if mask is None else (mask.detach(),)
    of_output = tuple(out.shape), out.stride(), out.dtype, 2 * keys, options, needs
    region.register(out, express(_AttentionOutput, sources, *of_output, leading=(token,), others=masks))
    return (token,), AS_IT_IS


def _recompute_attention(leaves: list[Any], options: _Scores, backend: int | None) -> Tensor:
    """Run the attention on decoded inputs; with dropout, by the same kernel, to draw the same random numbers."""
    query, key, value, mask = leaves
    if backend == SDPBackend.MATH.value:
        if mask is not None and mask.dtype is torch.bool:  # the op would add it
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), -torch.inf)
        return attention_by_math(query, key, value, mask, **options._asdict())[0]
    with ExitStack() as stack:
        if backend is not None:
            stack.enter_context(sdpa_kernel(SDPBackend(backend)))
        return _attend(query, key, value, mask, **options._asdict())


@contextmanager
def _replaying(state: Tensor | None, device: torch.device) -> Iterator[None]:
    if state is None:
        yield
        return
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if is_cuda else []):
        if is_cuda:
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
        yield


_PARAMETERS = Parameters("query key value attn_mask=None dropout_p=0.0 is_causal=False scale=None enable_gqa=False")


def _scaled_dot_product_attention(region: Region, func: Callable, *args: Any, **kwargs: Any) -> Any:
    given = _PARAMETERS.read(args, kwargs)
    if given is None:
        return NotImplemented
    *tensors, attn_mask, dropout_p, is_causal, scale, enable_gqa = given.values()
    if not all(region.is_activation(x) for x in tensors) or not requires_grad(*tensors, attn_mask):
        return NotImplemented
    if attn_mask is not None and not region.is_activation(attn_mask):
        if not (is_plain(attn_mask) and attn_mask.dtype is torch.bool):
            return NotImplemented  # torch has subclasses that represent a causal mask, without values in memory
    if max(x.numel() for x in tensors) < region.settings.min_numel or region.are_weights(*tensors):
        return NotImplemented
    if len({x.device for x in tensors}) > 1:
        return NotImplemented
    options = _Scores(dropout_p, is_causal, scale, enable_gqa)
    backend = None
    if dropout_p > 0:
        backend = choose_attention(*tensors, attn_mask, **options._asdict())
        if not _can_replay(tensors[0]):
            return NotImplemented
    attend = functools.partial(func, **options._asdict())
    return _apply(region, attend, options, backend, *tensors, attn_mask)


def _can_replay(x: Tensor) -> bool:
    return x.device.type in ("cpu", "meta") or (
        x.device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    )


STORED = Stored(
    "attention (`scaled_dot_product_attention`, `MultiheadAttention`)",
    "query, key less a large mean of all keys, and masks that layers make at 8 bits (`score_bit_width`; 5 in "
    "`DEFAULT`), value packed; backward recomputes attention",
    "bias that grows with the variance of scores",
)
#: Projections, products, softmax and dropout save their tensors as they do outside of it.
_multi_head = run_inside(F.multi_head_attention_forward)
OPS = (
    Op((F.scaled_dot_product_attention,), _scaled_dot_product_attention, STORED, is_bit_exact=False, is_layer=True),
    Op((F.multi_head_attention_forward,), _multi_head, STORED, twice=True, is_bit_exact=False, is_layer=True),
)
