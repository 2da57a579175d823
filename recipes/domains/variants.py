"""What a training keeps for its backward pass: everything, inputs of checkpoints, or what a policy says."""

from contextlib import nullcontext

from recipes.domains.domain import Region, Task

PLAIN, CHECKPOINT = "plain", "checkpoint"
#: What the table compares unless the command line says otherwise; all but the first two are names of policies.
DEFAULT_VARIANTS = (PLAIN, CHECKPOINT, "DEFAULT", "RECOMPUTE")


def prepare(task: Task, variant: str) -> Region:
    """Gives the model of a task checkpoints, or a policy.

    Args:
        task: changed in place.
        variant: `PLAIN`, `CHECKPOINT`, or words of `recipes.policy_names`.

    Returns:
        What makes the context of a forward pass and its loss.
    """
    if variant == PLAIN:
        return nullcontext
    if variant == CHECKPOINT:
        task.use_checkpoints()
        return nullcontext
    import brevact  # here: plain training runs without the package
    from recipes.policy_names import named_policy

    named_policy(variant).apply(task.model)
    return lambda: brevact.backward_quant(task.model)


def is_packed(variant: str) -> bool:
    """Whether a variant has a policy."""
    return variant not in (PLAIN, CHECKPOINT)
