"""transformers' `gradient_checkpointing_enable`, which checkpoints inside the forward of each layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import brevact
from brevact import StochBackward2bit
from tests.crosses import taking_turns
from tests.trainers.running import VOCABULARY, transformers

LEAF = StochBackward2bit.let(min_numel=0)
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False},
}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def mixtral() -> Any:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    return transformers.MixtralForCausalLM(config)


def ids() -> Tensor:
    return torch.randint(VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(1))


def inputs_of_layers(model: nn.Module) -> list[list[Tensor]]:
    """Return one list per layer, which gets the input of each run of its body."""
    seen: list[list[Tensor]] = []
    for layer in model.model.layers:
        own: list[Tensor] = []
        layer.input_layernorm.register_forward_pre_hook(lambda _, args, own=own: own.append(args[0].detach().clone()))
        seen.append(own)
    return seen


def checkpointing(model: Any, policy: Any, use_reentrant: bool) -> Any:
    model.train().gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return brevact.quantize_backward(model, policy)


@pytest.mark.parametrize(
    "policy, use_reentrant, make",
    taking_turns([{"model.layers.*": LEAF}, LEAF, brevact.DEFAULT], [False, True], [llama, mixtral]),
)
def test_layers_are_recomputed_from_what_the_forward_pass_had(policy, use_reentrant, make):
    """Routers of experts, too, choose the same ones: otherwise sizes differ, which a checkpoint refuses."""
    torch.manual_seed(0)
    model = checkpointing(make(), policy, use_reentrant)
    seen = inputs_of_layers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=ids(), labels=ids()).loss
        loss.backward()
        optimizer.step()
    assert loss.isfinite() and all(p.grad is not None for p in model.model.layers.parameters())
    for own in seen:
        assert len(own) == 6
        assert all(torch.equal(first, again) for first, again in zip(own[::2], own[1::2], strict=True))


def test_a_rule_for_checkpoints_packs_the_inputs_of_layers():
    torch.manual_seed(0)
    model = checkpointing(llama(), {checkpoint: LEAF, "*": LEAF}, False)
    seen = inputs_of_layers(model)
    model(input_ids=ids(), labels=ids()).loss.backward()
    assert not any(torch.equal(*own) for own in seen)
