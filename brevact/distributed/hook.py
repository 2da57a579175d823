"""A DistributedDataParallel communication hook that packs gradients with any of the package's quantizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from brevact.distributed.packing import (
    ALIGNMENT,
    AS_IT_IS,
    SEEDS,
    ParameterStates,
    after,
    check_feedback,
    check_state,
    digest_of,
    is_unbiased,
    keep_for_this_stream,
    message_of,
    pack,
    packs_of,
)
from brevact.injectors import backward_settings_from
from brevact.injectors.resolve import BackwardQuantizer
from brevact.private_names.of_torch import all_gather_single
from brevact.quantizers import ActivationQuantizer, PackedActivation
from brevact.quantizers.brief import brief
from brevact.quantizers.checks import DTYPES, check_int


def quantized_hook(
    quantizer: BackwardQuantizer,
    *,
    error_feedback: bool | None = None,
    min_numel: int = 4096,
    seed: int = 0,
    **overrides: Any,
) -> QuantizedHook:
    """Return a communication hook for ``DistributedDataParallel`` that sends gradients as packed codes.

    Each rank packs each parameter's gradient, one collective gathers a bucket's codes as bytes, and each rank decodes
    and averages them in the order of ranks: the result is the same on all ranks, bit for bit. It is unbiased with
    quantizers that round at random.

    Source: TinyScript (Fu et al., ICML 2020), section 3.3: buckets of 4096, no small tensors. Differs: any quantizer,
    error feedback for biased ones, no central server.

    >>> import torch, brevact
    >>> from torch import distributed, nn
    >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    >>> ddp = nn.parallel.DistributedDataParallel(nn.Linear(256, 64))
    >>> hook = brevact.distributed.quantized_hook(brevact.WeibullBackward4bit)
    >>> ddp.register_comm_hook(None, hook)
    >>> ddp(torch.randn(8, 256)).square().mean().backward()
    >>> hook.sent_bytes, hook.plain_bytes  # one message; 64 values of the bias as they are
    (8608, 65792)
    >>> distributed.destroy_process_group()

    Args:
        quantizer: backward quantizer for all gradients, such as ``WeibullBackward4bit``.
        error_feedback: whether each rank adds the rounding errors of earlier gradients to the next one (float32, as
            much memory as the gradients). None: for biased quantizers, since their errors do not average out.
        min_numel: gradients with fewer elements are sent unpacked; a bucket of only such gradients is all-reduced.
        seed: of random rounding, the same on all ranks; random bits differ per rank, step and parameter.
        **overrides: settings that replace those of ``quantizer``.

    Returns:
        The hook. ``register_comm_hook(group, hook)`` takes the process group, None for the default one.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
    """
    packs = backward_settings_from(quantizer, "quantizer", **overrides).quantizer
    return QuantizedHook(packs, error_feedback=error_feedback, min_numel=min_numel, seed=seed)


class QuantizedHook:
    """Packs, gathers, decodes and averages gradients; made by :func:`quantized_hook`.

    Error feedback is kept per parameter, not per bucket, since DistributedDataParallel rebuilds its buckets after the
    first step. A parameter keeps its errors for a later step if its gradient is all zeros, as when the loss does not
    reach it, or if its averaged gradient holds NaN or an infinity (most formats turn both into NaN on all ranks, and a
    ``GradScaler`` skips the step). Under a ``GradScaler``, gradients and errors are multiplied by its scale.
    """

    def __init__(
        self,
        quantizer: ActivationQuantizer,
        *,
        error_feedback: bool | None = None,
        min_numel: int = 4096,
        seed: int = 0,
    ) -> None:
        if isinstance(quantizer, type) or not callable(getattr(quantizer, "quantize", None)):
            raise TypeError(
                f"quantizer: got {brief(quantizer)}; accepted is an activation quantizer, such as what "
                "brevact.quantizer(StochBackward4bit) returns"
            )
        check_int("min_numel", min_numel, 0)
        check_int("seed", seed, *SEEDS)
        if not (error_feedback is None or isinstance(error_feedback, bool)):
            raise TypeError(f"error_feedback: got {brief(error_feedback)}; accepted are True, False and None")
        self.__name__ = self.__qualname__ = "quantized_hook"  # DistributedDataParallel logs it
        self.error_feedback = not is_unbiased(quantizer) if error_feedback is None else error_feedback
        if self.error_feedback:
            check_feedback(quantizer)
        self.quantizer, self.min_numel, self.seed, self.step = quantizer, min_numel, seed, 0
        self.sent_bytes = 0  # of this rank's messages so far
        self.plain_bytes = 0  # of the same gradients unpacked
        self.states = ParameterStates()
        self._agreed: set[str] = set()  # names of groups, empty behind load_state_dict

    def __call__(self, state, bucket):  # DistributedDataParallel refuses annotations that are strings
        """Average a bucket's gradients over the ranks.

        Args:
            state: process group, None for the default one; the first argument of ``register_comm_hook``.
            bucket: ``torch.distributed.GradBucket``.

        Returns:
            Future of the bucket's buffer, with the averages.
        """
        if isinstance(bucket, Tensor):
            raise TypeError("bucket: got a tensor, as of FSDP; accepted is a GradBucket of DistributedDataParallel")
        group: Any = distributed.group.WORLD if state is None else state
        buffer, gradients = bucket.buffer(), bucket.gradients()
        self._agree(group, buffer.device)
        step = self.step
        self.step += bucket.is_last()
        parameters = bucket.parameters()
        numbers = list(map(self.states.number_of, parameters))
        if buffer.dtype not in DTYPES or all(gradient.numel() < self.min_numel for gradient in gradients):
            return _averaged_as_they_are(group, buffer)
        with torch.no_grad():
            sent = [self._sent(*each) for each in zip(parameters, gradients, strict=True)]
            packs = [
                pack(
                    AS_IT_IS if x.numel() < self.min_numel else self.quantizer,
                    x,
                    (self.seed, step, number),
                    group.rank(),
                )
                for x, number in zip(sent, numbers, strict=True)
            ]
            message = message_of(packs)
        self.sent_bytes += message.numel()
        self.plain_bytes += buffer.numel() * buffer.element_size()
        rank, messages = group.rank(), message.new_empty(group.size(), message.numel())
        gathered = all_gather_single(messages.view(-1), message, group=group, async_op=True)
        specs = [pack.spec for pack in packs]

        def average() -> Tensor:
            keep_for_this_stream(messages, *sent)
            ranks = zip(*(packs_of(row, specs) for row in messages), strict=True)
            for each in zip(parameters, gradients, sent, ranks, strict=True):
                self._receive(*each, rank)
            return buffer

        return after(gathered, average, buffer.is_cpu)

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the hook's state on this rank; each rank saves its own.

        Args:
            model: the one whose gradients the hook averages, with or without its ``DistributedDataParallel``.

        Returns:
            Numbers, names and tensors, which ``torch.load(..., weights_only=True)`` reads.

        Raises:
            TypeError: ``model`` is not a module.
            ValueError: ``model`` has none of the parameters whose gradients the hook has averaged.
        """
        return {"step": self.step, "seed": self.seed, **self.states.state_dict(model)}

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Resume from :meth:`state_dict`: the same gradients give the same bits.

        Args:
            state: returned by the hook of the same rank.
            model: the model, with or without its ``DistributedDataParallel``.

        Raises:
            TypeError: ``model`` is not a module.
            ValueError: ``state`` is not a hook's state, or has parameters that the model lacks or of other shapes.
        """
        check_state(state)
        self.states.load_state_dict(state, model)
        self.step, self.seed, self._agreed = state["step"], state["seed"], set()

    def __repr__(self) -> str:
        return f"quantized_hook({self.quantizer}, error_feedback={self.error_feedback}, min_numel={self.min_numel})"

    def _agree(self, group: Any, device: torch.device) -> None:
        """Compare settings, on which the messages' length depends, between a group's processes, once."""
        if not isinstance(group, distributed.ProcessGroup):
            raise TypeError(
                f"process group: got {brief(group)}; accepted is a ProcessGroup of torch.distributed; "
                "register_comm_hook(None, hook) takes the default one"
            )
        if group.group_name in self._agreed:
            return
        mark = digest_of((self.quantizer, self.min_numel, self.seed, self.error_feedback, self.step)).to(device)
        marks = mark.new_empty(group.size(), ALIGNMENT)
        all_gather_single(marks.view(-1), mark, group=group)
        different = (marks != marks[0]).any(1).cpu().nonzero().view(-1).tolist()
        if different:
            raise ValueError(
                f"gradients of rank 0 and of ranks {different} are packed in different ways, or for different steps; "
                "accepted are hooks with the same quantizer and settings on all ranks, from checkpoints of the same "
                "step"
            )
        self._agreed.add(group.group_name)

    def _sent(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return the tensor to pack: the gradient plus earlier rounding errors."""
        if not self.error_feedback or gradient.numel() < self.min_numel:
            return gradient
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        if parameter not in self.states.residuals:
            self.states.residuals[parameter] = torch.zeros_like(wide)
        return wide + torch.where(gradient.any(), self.states.residuals[parameter], 0)

    def _receive(
        self, parameter: Tensor, gradient: Tensor, sent: Tensor, received: tuple[PackedActivation, ...], rank: int
    ) -> None:
        """Write the average over all ranks, and keep this rank's rounding error."""
        decoded = received[0].dequantize()
        own = decoded
        total = decoded.to(torch.promote_types(decoded.dtype, torch.float32), copy=True)
        for number, packed in enumerate(received[1:], 1):
            decoded = packed.dequantize()
            total += decoded
            if number == rank:
                own = decoded
        if self.error_feedback and (residual := self.states.residuals.get(parameter)) is not None:
            pays = gradient.any() & total.isfinite().all()
            residual.copy_(torch.where(pays, sent - own, residual))  # in memory of the hook's stream
        gradient.copy_(total.div_(len(received)))


def _averaged_as_they_are(group: Any, buffer: Tensor) -> torch.futures.Future[Tensor]:
    buffer.div_(group.size())
    return after(distributed.all_reduce(buffer, group=group, async_op=True), lambda: buffer, buffer.is_cpu)
