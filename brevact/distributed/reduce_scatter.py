"""Packed gradients for FSDP2: each rank receives the codes of its own shard from all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from brevact.distributed.packing import SEEDS, Exchange, is_unbiased, message_of, pack, packs_of
from brevact.injectors import backward_settings_from
from brevact.injectors.resolve import BackwardQuantizer
from brevact.private_names.of_torch import reduce_scatter_single
from brevact.quantizers import ActivationQuantizer
from brevact.quantizers.brief import brief
from brevact.quantizers.checks import DTYPES, check_int


def quantized_reduce_scatter(
    quantizer: BackwardQuantizer, *, min_numel: int = 4096, seed: int = 0, **overrides: Any
) -> QuantizedReduceScatter:
    """Return a communication for ``FSDPModule.set_custom_reduce_scatter`` that sends gradients as packed codes.

    FSDP2 passes a block's gradients as one flat tensor with one part per rank. Each part is packed and sent to the rank
    that holds its weights, which decodes all ranks' parts, in their order, and averages them. Norms and biases share
    buckets with weights, so all gradients are packed; there is no error feedback: the quantizer must be unbiased.

    >>> import brevact
    >>> comm = brevact.distributed.quantized_reduce_scatter(brevact.StochBackward4bit)
    >>> comm.quantizer.bit_width  # then, of each FSDPModule: module.set_custom_reduce_scatter(comm)
    4

    Args:
        quantizer: backward quantizer that rounds at random, such as ``WeibullBackward4bit``.
        min_numel: parts with fewer elements are reduced unpacked.
        seed: of random rounding, the same on all ranks.
        **overrides: settings that replace those of ``quantizer``.

    Returns:
        The communication, for one or more modules.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the quantizer is biased, or an argument is out of range.
    """
    packs = backward_settings_from(quantizer, "quantizer", **overrides).quantizer
    return QuantizedReduceScatter(packs, min_numel=min_numel, seed=seed)


class QuantizedReduceScatter(Exchange):
    """Packs, exchanges, decodes and averages gradients; made by :func:`quantized_reduce_scatter`."""

    def __init__(self, quantizer: ActivationQuantizer, *, min_numel: int = 4096, seed: int = 0) -> None:
        super().__init__(quantizer, min_numel, seed)
        if not is_unbiased(quantizer):
            raise ValueError(
                f"quantizer: got {brief(quantizer)}, which is biased, and errors of FSDP2's gradients cannot be fed "
                "back; accepted is one that rounds at random between levels that span a bucket: StochBackward4bit"
            )
        self.calls = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the reduction's buffers; FSDP2 calls this."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Write the sum or average of this rank's part over all ranks.

        Args:
            output_tensor: (n,) tensor to write to.
            input_tensor: (ranks n,) gradients.
            group: process group.
            op: ``ReduceOp.SUM`` or ``ReduceOp.AVG``.
            async_op: used only if nothing is packed; packed reductions are complete on return.

        Returns:
            The result of PyTorch's reduce-scatter if nothing is packed, None otherwise.

        Raises:
            ValueError: ``op`` is not supported, or the ranks pack in different ways.
        """
        self._agree(group, input_tensor.device, self.calls)
        step, ranks = self.calls, group.size()
        self.calls += 1
        if output_tensor.dtype not in DTYPES or output_tensor.numel() < self.min_numel:
            return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        if op not in (distributed.ReduceOp.SUM, distributed.ReduceOp.AVG):
            raise ValueError(
                f"op: got {op}; accepted are SUM and AVG; call set_force_sum_reduction_for_comms(True) on the module"
            )
        with torch.no_grad():
            first = distributed.get_rank() * ranks  # global rank: replicas round with different random bits
            parts = enumerate(input_tensor.view(ranks, -1))
            packs = [pack(self.quantizer, part, (self.seed, step, 0), first + number) for number, part in parts]
            messages = torch.stack([message_of([packed]) for packed in packs])
            self.sent_bytes += messages.numel()
            self.plain_bytes += input_tensor.numel() * input_tensor.element_size()
            received = torch.empty_like(messages)
            distributed.all_to_all_single(received.view(-1), messages.view(-1), group=group)
            total = torch.zeros_like(output_tensor, dtype=torch.promote_types(output_tensor.dtype, torch.float32))
            for row in received:
                total += packs_of(row, [packs[0].spec])[0].dequantize()
            output_tensor.copy_(total.div_(ranks) if op == distributed.ReduceOp.AVG else total)
        return None

    def state_dict(self) -> dict[str, int]:
        """Return the numbers from which seeds derive, the same on all ranks."""
        return {"calls": self.calls, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume from :meth:`state_dict`.

        Args:
            state: result of :meth:`state_dict`.

        Raises:
            ValueError: ``state`` is not such a result.
        """
        if not isinstance(state, Mapping) or set(state) != {"calls", "seed"}:
            raise ValueError(f"state: got {brief(state)}; accepted is what state_dict() returned")
        check_int("state['calls']", state["calls"], 0)
        check_int("state['seed']", state["seed"], *SEEDS)
        self.calls, self.seed, self._agreed = state["calls"], state["seed"], set()
