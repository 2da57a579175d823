"""Packed gradients for FSDP2: each rank gets, of all others, the codes of the part whose weights it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from brevact.distributed.message import Agreement, check_marks, marks_of, message_of, packs_of
from brevact.distributed.packing import DTYPES, check_count, check_quantizer, check_seed, is_unbiased, pack
from brevact.injectors import backward_settings_from
from brevact.injectors.resolve import BackwardQuantizer
from brevact.quantizers import ActivationQuantizer
from brevact.quantizers.brief import brief


def quantized_reduce_scatter(
    quantizer: BackwardQuantizer, *, min_numel: int = 4096, seed: int = 0, **overrides: Any
) -> QuantizedReduceScatter:
    """Return a communication for ``FSDPModule.set_custom_reduce_scatter`` that sends gradients as packed codes.

    FSDP2 hands over the gradients of a block as one flat tensor, a part for each rank. Each part is packed and sent to
    the rank that holds its weights, which decodes what all ranks sent, in their order, and averages it. Gradients of
    norms and biases share buckets with those of weights: no part of them is sent as it is, and nothing is fed back, so
    that the quantizer has to be unbiased.

    >>> import brevact
    >>> comm = brevact.distributed.quantized_reduce_scatter(brevact.StochBackward4bit)
    >>> comm.quantizer.bit_width  # then, of each FSDPModule: module.set_custom_reduce_scatter(comm)
    4

    Args:
        quantizer: backward quantizer that rounds at random, such as ``WeibullBackward4bit``.
        min_numel: parts with fewer elements are reduced as they are.
        seed: of random rounding, the same on all ranks.
        **overrides: settings that replace those of ``quantizer``.

    Returns:
        The communication, for one module or for several.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the quantizer is biased, or an argument is out of range.
    """
    packs = backward_settings_from(quantizer, None, "quantizer", **overrides).quantizer
    return QuantizedReduceScatter(packs, min_numel=min_numel, seed=seed)


class QuantizedReduceScatter:
    """Packs, exchanges, decodes and averages; see :func:`quantized_reduce_scatter`, which makes it.

    Args:
        quantizer: packs parts of gradients.
        min_numel: fewest elements that are packed.
        seed: of random rounding.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the quantizer is biased, or ``min_numel`` is negative.
    """

    def __init__(self, quantizer: ActivationQuantizer, *, min_numel: int = 4096, seed: int = 0) -> None:
        check_quantizer(quantizer)
        if not is_unbiased(quantizer):
            raise ValueError(
                f"quantizer: got {brief(quantizer)}, which is biased, and errors of FSDP2's gradients cannot be fed "
                "back; accepted is one that rounds at random between levels that span a bucket: StochBackward4bit"
            )
        check_count("min_numel", min_numel, at_least=0)
        check_seed(seed)
        self.quantizer = quantizer
        self.min_numel = min_numel
        self.seed = seed
        self.calls = 0
        self.sent_bytes = 0  # to all ranks, this one among them
        self.plain_bytes = 0  # of the same gradients as they were
        self._agreement = Agreement()
        self._unchecked: Tensor | None = None  # marks on a device, until the next call

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the reduction, as FSDP2 asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Write the sum or the average of this rank's part over all ranks.

        Args:
            output_tensor: (n,) tensor to write to.
            input_tensor: (ranks n,) gradients.
            group: process group.
            op: ``ReduceOp.SUM`` or ``ReduceOp.AVG``.
            async_op: taken where nothing is packed; otherwise the result is there on return.

        Returns:
            What PyTorch's own returns where nothing is packed, None otherwise.

        Raises:
            ValueError: ``op`` is another one, or the ranks pack in different ways.
        """
        settings = self.quantizer, self.min_numel, self.seed, self.calls
        self._agreement.reach(group, input_tensor.device, *settings)
        step, ranks = self.calls, group.size()
        self.calls += 1
        if self._unchecked is not None:
            check_marks(self._unchecked)
            self._unchecked = None
        if output_tensor.dtype not in DTYPES or output_tensor.numel() < self.min_numel:
            return distributed.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        if op not in (distributed.ReduceOp.SUM, distributed.ReduceOp.AVG):
            raise ValueError(
                f"op: got {op}; accepted are SUM and AVG; call set_force_sum_reduction_for_comms(True) on the module"
            )
        with torch.no_grad():
            first = distributed.get_rank() * ranks  # of all processes: replicas of these parts round apart
            parts = enumerate(input_tensor.view(ranks, -1))
            packs = [pack(self.quantizer, part, (self.seed, step, 0), first + number) for number, part in parts]
            messages = torch.stack([message_of([packed], step) for packed in packs])
            self.sent_bytes += messages.numel()
            self.plain_bytes += input_tensor.numel() * input_tensor.element_size()
            received = torch.empty_like(messages)
            distributed.all_to_all_single(received.view(-1), messages.view(-1), group=group)
            self._check(received)
            total = torch.zeros_like(output_tensor, dtype=torch.promote_types(output_tensor.dtype, torch.float32))
            for row in received:
                total += packs_of(row, [packs[0].spec])[0].dequantize()
            output_tensor.copy_(total.div_(ranks) if op == distributed.ReduceOp.AVG else total)
        return None

    def state_dict(self) -> dict[str, int]:
        """Return the root of the seeds, the same on all ranks."""
        return {"calls": self.calls, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Args:
            state: what it returned.

        Raises:
            ValueError: it is no such state.
        """
        if not isinstance(state, Mapping) or set(state) != {"calls", "seed"}:
            raise ValueError(f"state: got {brief(state)}; accepted is what state_dict() returned")
        check_count("state['calls']", state["calls"], at_least=0)
        check_seed(state["seed"])
        self.calls, self.seed = state["calls"], state["seed"]

    def _check(self, received: Tensor) -> None:
        if received.is_cpu:
            check_marks(marks_of(received))
        else:
            self._unchecked = marks_of(received).clone()
