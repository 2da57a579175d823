"""Small models in the trainers of other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from recipes.torchvision_ops import declare_missing_ops

declare_missing_ops()  # transformers imports torchvision if it is there

import transformers  # noqa: E402

VOCABULARY = 128


def gpt2(dropout: float = 0.1) -> Any:
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        **{"n_layer": 1, "n_head": 2, "n_embd": 64, "vocab_size": VOCABULARY, "n_positions": 64},
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
    )
    return transformers.GPT2LMHeadModel(config)


def texts(count: int = 32) -> list[dict[str, torch.Tensor]]:
    """Random token ids, each its own label."""
    ids = torch.randint(VOCABULARY, (count, 64), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def trained(
    folder: Path, *callbacks: Any, steps: int = 2, resume: str | None = None, model: Any = None, **options: Any
) -> Any:
    """The trainer of a run that has ended; a callback in brackets joins by `add_to`."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **{"save_strategy": "no", **options},
    )
    trainer = transformers.Trainer(
        model or gpt2(),
        arguments,
        train_dataset=texts(),
        eval_dataset=texts(4),
        callbacks=[each for each in callbacks if not isinstance(each, list)],
    )
    for each in callbacks:
        if isinstance(each, list):
            each[0].add_to(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two models have equal weights, bit for bit, under equal names."""
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
