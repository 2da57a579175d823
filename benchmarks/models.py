"""The table of models: all that the bench knows, by name and by group."""

from __future__ import annotations

from benchmarks.domain_models import DOMAINS
from benchmarks.kernel_models import KERNELS
from benchmarks.large_models import CIFAR10, COMPILED, LARGE, TRAINED
from benchmarks.qat_nets import QAT
from benchmarks.small_models import CONVOLUTIONAL, IMAGE_MODELS, LENGTHS, LONGEST, TRANSFORMERS
from benchmarks.step import Model

GROUPS: dict[str, dict[str, Model]] = {
    **{"small": TRANSFORMERS | CONVOLUTIONAL, "images": IMAGE_MODELS, "domains": DOMAINS},
    **{"qat": QAT, "large": LARGE, "compiled": COMPILED, "trained": TRAINED, "cifar10": CIFAR10, "kernels": KERNELS},
    **{"lengths": LENGTHS, "longest": LONGEST},
}
MODELS: dict[str, Model] = {name: model for group in GROUPS.values() for name, model in group.items()}


def models_of(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """The models of a group, or these."""
    return tuple(GROUPS[names]) if isinstance(names, str) else names
