"""Breakdown of a training step's peak tensor memory."""

from __future__ import annotations

from dataclasses import dataclass

from brevact.tables import size_text, text_table


@dataclass(frozen=True)
class PeakMemory:
    """Breakdown of a step's peak of tensor memory, in bytes above its start; the parts sum to ``tensors``.

    >>> PeakMemory(packed=2, unpacked=3, decoded=4, weight_gradients=5, activation_gradients=6, other=7).tensors
    27

    Args:
        packed: codes and masks, saved for backward.
        unpacked: other tensors saved for backward: in full precision, indices, statistics.
        decoded: tensors decoded or recomputed from saved ones, and temporaries of that.
        weight_gradients: gradients of parameters and other leaves.
        activation_gradients: gradients of op results.
        other: results and temporaries of ops, workspaces that PyTorch allocates, tensors that checkpoints recompute,
            tensors inside compiled graphs; minus bytes freed since the start.
    """

    packed: int
    unpacked: int
    decoded: int
    weight_gradients: int
    activation_gradients: int
    other: int

    @property
    def tensors(self) -> int:
        """Peak of the bytes that PyTorch allocates in the step, above those at its start."""
        saved, gradients = self.packed + self.unpacked, self.weight_gradients + self.activation_gradients
        return saved + self.decoded + gradients + self.other


_TENSORS = {
    "packed": "saved, packed",
    "unpacked": "saved, not packed",
    "decoded": "decoded",
    "weight_gradients": "gradients of weights",
    "activation_gradients": "gradients of activations",
    "other": "other tensors",
}


def peak_tables(plain: PeakMemory, packed: PeakMemory) -> str:
    columns = plain, packed
    rows = [(text, *(_size(getattr(column, name)) for column in columns)) for name, text in _TENSORS.items()]
    total = "sum", *(_size(column.tensors) for column in columns)
    return text_table(("tensors at the peak", "plain", "packed"), rows, total, numbers=2)


def _size(count: int) -> str:
    return f"-{size_text(-count)}" if count < 0 else size_text(count)
