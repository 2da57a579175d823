"""Language models of Hugging Face in `transformers.Trainer`, in full or by LoRA: plain, checkpoint, packed.

    python -m recipes.finetune                                             # a small Llama from random weights
    python -m recipes.finetune --size small --method lora --batch-size 1 --context 512

trains on texts that come with Python, in sequences of tokens, and measures bits per character on a held-out tenth.
Random weights are those of a small Llama or GPT-2, with a tokenizer trained on the text. `--weights` takes a name of
Hugging Face's hub, or a folder that `save_pretrained` wrote, such as that of `--save`:

    python -m recipes.finetune --variants plain --seeds 0 --save --out-dir runs/base
    python -m recipes.finetune --weights runs/base/finetune-plain --text python-source --method lora --lr 5e-4

An epoch is a run of `Trainer` with brevact's callback, and with the optimizer and the schedule of the whole training.
"""

import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes import command_line, files
from recipes.data.tokens import TEXTS, Tokens, load_tokens
from recipes.recipe import ABOVE_0, Metric, Recipe, RecipeError, Settings, Task, library, setting

#: Width, layers and heads of models with random weights.
SIZES = {"tiny": (128, 4, 4), "small": (512, 8, 8)}
_CLIP = 1.0
_WARMUP = 0.1


@dataclass(frozen=True)
class FineTuneSettings(Settings):
    epochs: int = setting(6, "rounds of training, each with a measurement", least=1)
    batch_size: int = setting(8, "sequences in a training step", least=1)
    lr: float = setting(2e-3, "largest learning rate of AdamW", check=ABOVE_0)
    weights: str | None = setting(None, "folder or name of a model's weights and tokenizer; without it they are random")
    architecture: str = setting("llama", "of the model with random weights", choices=("llama", "gpt2"))
    size: str = setting("tiny", "of the model with random weights", choices=tuple(SIZES))
    vocabulary: int = setting(512, "tokens of the model with random weights, all bytes among them", least=257)
    method: str = setting("full", "what is trained: all weights, or adapters of low rank", choices=("full", "lora"))
    rank: int = setting(8, "of LoRA", least=1)
    text: str = setting("python-docs", "text that comes with Python", choices=tuple(TEXTS))
    text_file: str | None = setting(None, "text in UTF-8, in place of that")
    context: int = setting(128, "tokens in a sequence", least=2)
    sequences: int = setting(256, "sequences in an epoch", least=1)
    test_sequences: int = setting(64, "sequences to test on, at most", least=1)
    bf16: bool = setting(False, "autocast to bfloat16")
    save: bool = setting(False, "write the model of each variant's first seed, for --weights")


class FineTuning(Task):
    def __init__(self, settings: FineTuneSettings, seed: int, device: torch.device) -> None:
        super().__init__(settings, seed, device)
        transformers = library("transformers")
        transformers.logging.set_verbosity_error()
        model = _random_model(settings) if settings.weights is None else _given_model(settings)
        if settings.method == "lora":
            model = _with_adapters(model, settings.rank)
        self.model = model.to(device).train()
        self.steps_per_epoch = max(1, settings.sequences // settings.batch_size)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=settings.lr, weight_decay=0.01)
        steps = settings.epochs * self.steps_per_epoch
        self.scheduler = transformers.get_cosine_schedule_with_warmup(self.optimizer, round(_WARMUP * steps), steps)

    def tokens(self) -> Tokens:
        """The text, loaded once in a process."""
        own = self.settings
        found = load_tokens(own.text, own.text_file, own.weights, own.vocabulary)
        if (least := min(len(found.train), len(found.test))) < own.context:
            raise RecipeError(
                f"--context {own.context} is not possible: a part of the text has {least} tokens; use at most {least}, "
                "or a longer text (--text-file)"
            )
        return found

    def batches(self, epoch: int) -> Iterator[dict[str, Tensor]]:
        """Sequences that start anywhere in the text."""
        text = self.tokens().train
        generator = torch.Generator().manual_seed(self.seed * 2**20 + epoch)
        most = len(text) - self.settings.context + 1
        for _ in range(self.steps_per_epoch):
            starts_B = torch.randint(most, (self.settings.batch_size,), generator=generator)
            yield self._batch(text[starts_B[:, None] + torch.arange(self.settings.context)])

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The model's own: mean cross-entropy of the next token, in nats."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.bf16):
            return self.model(**batch, use_cache=False).loss

    def train_epoch(self, epoch: int, on_step: Callable[[], object]) -> float:
        """Lets `transformers.Trainer` take the steps of an epoch, with brevact's callback if the model has a policy."""
        transformers = library("transformers")
        library("accelerate")
        own = self.settings
        rows = [
            {name: values[i] for name, values in batch.items()}
            for batch in self.batches(epoch)
            for i in range(own.batch_size)
        ]
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder,
                num_train_epochs=1,
                per_device_train_batch_size=own.batch_size,
                train_sampling_strategy="sequential",
                max_grad_norm=_CLIP,
                seed=1000 * self.seed + epoch,
                bf16=own.bf16,
                use_cpu=self.device.type == "cpu",
                **dict.fromkeys(("save_strategy", "logging_strategy"), "no"),
                report_to=[],
                disable_tqdm=True,
            )
            optimizers = (self.optimizer, self.scheduler)
            trainer = transformers.Trainer(self.model, arguments, train_dataset=rows, optimizers=optimizers)
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.add_callback(_OnStep(on_step))
            if self.region is not nullcontext:
                from brevact.trainers import HuggingFaceCallback

                HuggingFaceCallback(None, memory=False).add_to(trainer)
            loss = trainer.train().training_loss
        for name in ("forward", "_original_forward", "_is_accelerate_prepared"):  # autocast, which the next epoch adds
            vars(self.model).pop(name, None)
        return loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """Bits per character of the text held out."""
        tokens, own = self.tokens(), self.settings
        count = min(own.test_sequences, len(tokens.test) // own.context)
        sequences = tokens.test[: count * own.context].view(count, own.context)
        self.model.eval()
        total = sum(float(self.loss(self._batch(part))) * len(part) for part in sequences.split(own.batch_size))
        self.model.train()
        return total / count * tokens.tokens_per_character / math.log(2)

    def use_checkpoints(self) -> None:
        """As `gradient_checkpointing=True` of `TrainingArguments`."""
        is_new = hasattr(self.model, "activation_checkpointing_enable")  # the older name is an alias by now
        enable = self.model.activation_checkpointing_enable if is_new else self.model.gradient_checkpointing_enable
        enable({"use_reentrant": False})

    def show(self, path: Path) -> None:
        """Writes the model's continuation of "The", and the model itself with `--save`."""
        tokenizer = self.tokens().tokenizer
        self.model.eval()
        torch.manual_seed(0)
        context = self.settings.context
        words = tokenizer("The", add_special_tokens=False)["input_ids"][: context - 1]
        start = torch.tensor([words], device=self.device)
        count = min(100, context - len(words))
        drawn = self.model.generate(
            input_ids=start, attention_mask=torch.ones_like(start), max_new_tokens=count, do_sample=True
        )
        text = tokenizer.decode(drawn[0].tolist()) + "\n"
        files.write_atomically(path.with_suffix(".txt"), lambda file: file.write(text.encode()))
        if self.settings.save:
            for part in (self.model, tokenizer):
                part.save_pretrained(path.with_suffix(""))

    def _batch(self, tokens_BT: Tensor) -> dict[str, Tensor]:
        """Inputs of the model; the first token has no label, as nothing precedes it."""
        labels_BT = tokens_BT.clone()
        labels_BT[:, 0] = -100
        return {"input_ids": tokens_BT.to(self.device), "labels": labels_BT.to(self.device)}


def _random_model(settings: FineTuneSettings) -> Any:
    transformers = library("transformers")
    width, layers, heads = SIZES[settings.size]
    common = {"vocab_size": settings.vocabulary, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)}
    if settings.architecture == "gpt2":
        shape = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": max(settings.context, 1024)}
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **drops, **common))
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=8 * width // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=max(settings.context, 4096),  # --weights may take longer ones
        tie_word_embeddings=True,
        **common,
    )
    return transformers.LlamaForCausalLM(config)


def _given_model(settings: FineTuneSettings) -> Any:
    transformers = library("transformers")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(settings.weights, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"--weights {settings.weights} cannot be loaded ({str(error).splitlines()[0]}); name a folder that "
            "save_pretrained wrote, or a causal language model of Hugging Face's hub"
        ) from error
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and settings.context > most:
        raise RecipeError(
            f"--context {settings.context} is not possible: the model of --weights takes {most} tokens at most; "
            f"use --context of at most {most}"
        )
    return model


def _with_adapters(model: Any, rank: int) -> Any:
    peft = library("peft")
    kind = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, **kind))


def _OnStep(on_step: Callable[[], object]) -> Any:
    """A callback of `Trainer` that calls a function after each step."""
    transformers = library("transformers")

    class OnStep(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            on_step()

    return OnStep()


RECIPE = Recipe(
    module="recipes.finetune",
    description=__doc__,
    settings=FineTuneSettings,
    task=FineTuning,
    metric=Metric("bits_per_character", "bits per character"),
    libraries=("transformers", "accelerate", "peft"),
)
main = partial(command_line.main, RECIPE)

if __name__ == "__main__":
    sys.exit(main())
