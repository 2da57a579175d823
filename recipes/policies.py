"""What a training keeps for the backward pass, as words of a command line.

plain, None                                              full precision
checkpoint                                               inputs of checkpoints
checkpoint+DEFAULT                                       the same, and a policy outside of them
StochBackward2bit                                        a quantizer, or a policy, of brevact
StochBackward4bit:bucket_size=256,save_mode='...'        with settings
StochBackward2bit+norms=StochBackward4bit                but for the norms; likewise DEFAULT+norms=StochBackward4bit
None+blocks.2.*=StochBackward4bit                        modules by a pattern of their names, which has a dot or a star
24x, 512MiB, noise=0.05                                 the policy of least noise within a budget, by `brevact.fit`
"""

import argparse
from itertools import islice
from typing import Any

import brevact
from brevact.policy.predicates import is_norm
from brevact.policy.text import read_policy
from recipes.recipe import RecipeError, Task

PLAIN, CHECKPOINT = "plain", "checkpoint"
_BOTH = "checkpoint+"
_FITTED_ON = 12  # batches


def variant_of(words: str) -> str:
    """Reads a variant; for argparse."""
    if is_packed(words):
        policy_of(words)
    return words


def is_packed(variant: str) -> bool:
    """Whether a variant has a policy."""
    return variant not in (PLAIN, CHECKPOINT, "None")


def policy_of(words: str) -> tuple[Any, dict[str, float]]:
    """The policy of a variant, or a budget; an ArgumentTypeError for words that are neither."""
    whole, *parts = words.removeprefix(_BOTH).split("+")
    try:
        if not parts:
            return read_policy(whole, "policy")
        rules: dict[Any, Any] = {}
        for part in parts:
            name, separator, source = part.partition("=")
            if not separator or not (name == "norms" or "." in name or "*" in name):
                raise ValueError(
                    f"+{part}: write +norms=NAME, or a pattern of modules' names, such as +blocks.2.*=NAME"
                )
            rules[is_norm if name == "norms" else name] = _leaf(source)
        base = _leaf(whole)
        return (base if isinstance(base, brevact.Policy) else brevact.Policy({"*": base})).let(rules), {}
    except (OSError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{words}: {error}") from error


def _leaf(words: str) -> Any:
    """A quantizer, a policy, or None for full precision."""
    found, budget = read_policy(words, "policy")
    if budget:
        raise ValueError(f"{words} is a budget, which is fitted for the whole model: leave out what follows it")
    return None if words == "None" else found


def prepare(task: Task, variant: str, fitted: str | None = None) -> str | None:
    """Gives the model of a task checkpoints, or a policy, and the task its region.

    Args:
        task: changed in place.
        variant: see above.
        fitted: the result of an earlier call for the same run, if there was one.

    Returns:
        The policy fitted to a budget, as JSON; None without a budget.
    """
    if variant == CHECKPOINT or variant.startswith(_BOTH):
        task.use_checkpoints()
    if not is_packed(variant):
        return None
    policy, budget = policy_of(variant)
    try:
        if budget and fitted is None:
            batches = list(islice(task.batches(1), _FITTED_ON))
            fitted = brevact.fit(task.model, batches, lambda _, batch: task.loss(batch), **budget).to_json()
        policy = brevact.Policy.from_json(fitted) if budget else policy
        brevact.quantize_backward(task.model, policy, **task.policy_settings)
    except ValueError as error:
        raise RecipeError(f"{variant}: {error}") from error
    task.region = lambda: brevact.backward_quant(task.model)
    return fitted
