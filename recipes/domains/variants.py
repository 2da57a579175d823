"""Tensors kept for backward: all, inputs of checkpoints, or those of a policy."""

from contextlib import nullcontext

import brevact
from recipes.domains.domain import Region, Task
from recipes.policy_names import named_policy

PLAIN, CHECKPOINT = "plain", "checkpoint"
#: In front of a policy: checkpoints, with the policy outside of them.
_BOTH = "checkpoint+"


def prepare(task: Task, variant: str) -> Region:
    """Gives the model of a task checkpoints, or a policy.

    Args:
        task: changed in place.
        variant: `PLAIN`, `CHECKPOINT`, words of `recipes.policy_names`, or those behind `checkpoint+`.

    Returns:
        The function that makes the context of a forward pass and its loss.
    """
    if variant == PLAIN:
        return nullcontext
    if variant == CHECKPOINT or variant.startswith(_BOTH):
        task.use_checkpoints()
    if not is_packed(variant):
        return nullcontext
    policy = named_policy(policy_words(variant))
    brevact.quantize_backward(task.model, policy.source, **{**policy.settings, **task.policy_settings})
    return lambda: brevact.backward_quant(task.model)


def policy_words(variant: str) -> str:
    return variant.removeprefix(_BOTH)


def is_packed(variant: str) -> bool:
    """Whether a variant has a policy."""
    return variant not in (PLAIN, CHECKPOINT)
