"""Parts of the memory of a training step, at the peak of its tensors and at the peak of the process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from brevact.tables import size_text, text_table


@dataclass(frozen=True)
class ProcessMemory:
    """Resident memory of the process at its peak in a step, in bytes; the parts sum to ``peak``.

    Freed memory stays resident, and so the peak lasts: of the moments at which the process has grown to within 1 % of
    it, the parts are those of the one when most was in use.

    >>> process = ProcessMemory(before=400, loaded=100, tensors=50, workspaces=20, gaps=None, rest=5)
    >>> process.growth, process.peak  # `loaded` is a part of `before`
    (75, 475)

    Args:
        before: resident before the step: libraries, weights, optimizer state, data.
        loaded: of ``before``, the bytes that importing this package (without torch) and loading its CPU kernels added.
        tensors: allocated by PyTorch since the step began.
        workspaces: other blocks that were allocated since: workspaces of libraries, nodes of the graph, objects of
            Python; None where malloc does not tell (an allocator that is not glibc's own, or glibc before 2.33).
        gaps: resident free memory of the heap, which the step's tensors left and no other took; None likewise.
        rest: all else: mapped files, stacks; less memory in use that was not written yet. Where ``workspaces`` and
            ``gaps`` are None, they are in ``rest``, less what was free and resident before the step.
    """

    before: int
    loaded: int
    tensors: int
    workspaces: int | None
    gaps: int | None
    rest: int

    @property
    def peak(self) -> int:
        """Most resident bytes of the process in the step."""
        return self.before + self.growth

    @property
    def growth(self) -> int:
        """``peak`` less ``before``."""
        return self.tensors + (self.workspaces or 0) + (self.gaps or 0) + self.rest


@dataclass(frozen=True)
class PeakMemory:
    """Tensors that PyTorch holds in a step when they are most, in bytes above its start; the parts sum to ``tensors``.

    >>> PeakMemory(packed=2, unpacked=3, decoded=4, weight_gradients=5, activation_gradients=6, other=7).tensors
    27

    Args:
        packed: codes and masks, saved for backward.
        unpacked: other tensors that are saved for backward: in full precision, indices, statistics.
        decoded: tensors that are decoded or recomputed from saved ones, with what that allocates meanwhile.
        weight_gradients: gradients of parameters, and of other leaves of the graph.
        activation_gradients: gradients of the results of ops.
        other: all else: results and temporaries of ops, workspaces that PyTorch allocates, tensors that checkpoints
            recompute, tensors inside of compiled graphs; less what was freed since the start.
        process: the process when most of its memory was resident; None off Linux.
    """

    packed: int
    unpacked: int
    decoded: int
    weight_gradients: int
    activation_gradients: int
    other: int
    process: ProcessMemory | None = None

    @property
    def tensors(self) -> int:
        """Most bytes that PyTorch allocates in the step, above those at its start."""
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
_PROCESS = {
    "before": "before the step",
    "loaded": "  of it loaded by brevact",
    "tensors": "tensors",
    "workspaces": "workspaces and graph",
    "gaps": "gaps in the heap",
    "rest": "rest",
}


def peak_tables(plain: PeakMemory, packed: PeakMemory) -> str:
    """Return tables of the parts of both peaks: of a step without backward quantization and with it."""
    tables = [_table("tensors at the peak", _TENSORS, (plain, packed), [x.tensors for x in (plain, packed)])]
    if packed.process is not None:
        processes = plain.process, packed.process
        peaks = [None if x is None else x.peak for x in processes]
        tables.append(_table("process at its peak", _PROCESS, processes, peaks))
    return "\n\n".join(tables)


def _table(title: str, names: dict[str, str], columns: Sequence[object], totals: Sequence[int | None]) -> str:
    rows = [(text, *(_size(getattr(column, name, None)) for column in columns)) for name, text in names.items()]
    return text_table((title, "plain", "packed"), rows, ("sum", *map(_size, totals)), numbers=2)


def _size(count: int | None) -> str:
    if count is None:
        return "-"
    return f"-{size_text(-count)}" if count < 0 else size_text(count)
