"""Parse and check the arguments of a run's policy."""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from brevact.arguments import check_count, check_state
from brevact.bit_widths.spec import PolicySpec, parse_policy
from brevact.policy.attach import region_of_step
from brevact.policy.mixing import checked_plan
from brevact.policy.presets import DEFAULT, Policy
from brevact.policy.text import settings_of
from brevact.quantizers.brief import brief
from brevact.reports.gradient_passes import check_loss
from brevact.reports.in_place import kept_random_state


def check_steps(**intervals: Any) -> None:
    """Raise unless numbers of steps are None or at least 1."""
    for name, steps in intervals.items():
        if steps is not None:
            check_count(name, steps, more=", or None")


def check_run(batches: Any, loss: Any) -> None:
    """Raise a TypeError unless batches are iterable and the loss is a function or None."""
    if not isinstance(batches, Iterable):
        raise TypeError(
            f"batches: got {brief(batches)} of type {type(batches).__name__}; accepted is a data loader or a list"
        )
    if loss is not None:
        check_loss(loss)


def check_values(state: Any, own: Mapping[str, Any]) -> None:
    """Raise a TypeError or a ValueError unless this is a training policy's own state."""
    check_state(state, own)
    for name in ("steps", "noise_count"):
        check_count(f"state: {name}", state[name], 0)
    for name, kinds, accepted in (("noise", (int, float), "a number"), ("rules", str, "JSON text of a policy")):
        if state[name] is not None and (isinstance(state[name], bool) or not isinstance(state[name], kinds)):
            raise TypeError(f"state: {name}={brief(state[name])}; accepted is {accepted}, or None")
    if state["rules"] is not None:
        Policy.from_json(state["rules"])  # raises unless valid


def spec_of(policy: Any) -> PolicySpec | None:
    """Return a policy's spec, parsed if it is text; None for the policy that a model has."""
    if policy is None:
        return None
    if isinstance(policy, PolicySpec):
        return policy
    if isinstance(policy, str | os.PathLike):
        return parse_policy(policy)
    if policy is DEFAULT:
        return PolicySpec("default", policy)
    if not isinstance(policy, Policy):
        Policy(policy if isinstance(policy, Mapping) else {"*": policy})  # raises unless valid
    text = brief(policy.rules if isinstance(policy, Policy) else policy)
    return PolicySpec(re.sub(r" at 0x[0-9a-f]+", "", text), policy)  # the same in the process that resumes


def mix_of(words: str) -> tuple[str, dict[str, Any]]:
    """Return kind and settings of a schedule of mixing probabilities; raises a TypeError or a ValueError.

    >>> mix_of("cosine:start=0.9,end=0.1")
    ('cosine', {'start': 0.9, 'end': 0.1})
    """
    if not isinstance(words, str):
        raise TypeError(
            f"mix_schedule={brief(words)} of type {type(words).__name__}; accepted is a text: "
            '"cosine:start=0.9,end=0.1"'
        )
    kind, separator, rest = words.partition(":")
    settings = settings_of(rest.split(",")) if separator else {}
    accepted = ("start", "end", "steps", "stairs")
    for name in settings:
        if name not in accepted:
            raise ValueError(f"mix_schedule={words!r}: {name} is not known; accepted are {', '.join(accepted)}")
    try:
        checked_plan({"start": 0.0, "end": 0.0, "steps": 1, "stairs": 4, **settings, "kind": kind})
    except ValueError as error:
        raise ValueError(f"mix_schedule={words!r}: {error}") from error
    return kind, settings


def refuse_to_fit(model: nn.Module) -> None:
    """Raise a ValueError for a model whose forward pass needs all processes: a single one cannot measure it."""
    if not has_others():
        return
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        needs = "SyncBatchNorm"
    elif is_sharded(model):
        needs = "a model with sharded parameters"
    else:
        return
    raise ValueError(
        f"policy: a budget is fitted in one process, where {needs} waits for the others; fit it in a run of "
        'one process, save it with policy.save("policy.json"), and pass "policy.json"'
    )


def is_sharded(model: nn.Module) -> bool:
    """Return whether a process has parts of a model's parameters: by FSDP, tensor parallelism or DeepSpeed's ZeRO-3."""
    tensor: Any = sys.modules.get("torch.distributed.tensor")  # None if never imported
    kinds = () if tensor is None else (tensor.DTensor,)
    return any(isinstance(x, kinds) or hasattr(x, "_is_flat_param") or hasattr(x, "ds_id") for x in model.parameters())


def _generators_of(loader: Any) -> Iterator[torch.Generator]:
    holders, found = [loader], set()
    while holders:
        holder = holders.pop()
        if holder is None or id(holder) in found:
            continue
        found.add(id(holder))
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and id(generator) not in found:
            found.add(id(generator))
            yield generator
        holders += [getattr(holder, name, None) for name in ("base_dataloader", "batch_sampler", "sampler")]


def first_batches(loader: Iterable[Any], count: int) -> list[Any]:
    """Return at most `count` first batches of a loader (Accelerate's, too) or list; later iterations are unchanged."""
    # Accelerate's prepared loader counts its passes for gradient accumulation: the inner one does not.
    plain = getattr(loader, "base_dataloader", loader)
    states = [(generator, generator.get_state()) for generator in _generators_of(loader)]
    try:
        with kept_random_state():
            iterator = iter(plain)
            found = list(itertools.islice(iterator, count))
            del iterator  # ends its workers
    finally:
        for generator, state in states:
            generator.set_state(state)
    return found


def moved(value: Any, device: torch.device) -> Any:
    """Move a batch's tensors to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: moved(each, device) for name, each in value.items()}
    if isinstance(value, tuple | list):
        found = [moved(each, device) for each in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return value


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter, or the CPU."""
    return next((x.device for x in model.parameters()), torch.device("cpu"))


def has_others() -> bool:
    """Return whether there are other processes in this run."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def in_one_process(make: Callable[[], str], device: torch.device) -> str:
    """Return rank 0's result on all ranks, sent through `device`; its error raises a RuntimeError on the others."""
    if not has_others():
        return make()
    found: list[str | None] = [None]
    error = None
    if distributed.get_rank() == 0:
        try:
            found = [make()]
        except Exception as failure:  # raised after the broadcast, for which the others wait
            error = failure
    distributed.broadcast_object_list(found, src=0, device=device)
    if error is not None:
        raise error
    if found[0] is None:
        raise RuntimeError("the policy could not be fitted in the process of rank 0; its error says why")
    return found[0]


def in_region(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function of a model in the model's region, which hooks enter only for `forward`."""

    @functools.wraps(function)
    def run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with region_of_step(model):
            return function(model, *args, **kwargs)

    return run
