"""Language models of Hugging Face in `transformers.Trainer`, in full or by LoRA: plain, checkpoint, packed.

    python -m recipes.finetune                                             # a small Llama from random weights
    python -m recipes.finetune --size small --method lora --batch-size 1 --context 512

trains on texts that come with Python, in sequences of tokens, and measures bits per character on a held-out tenth.
Random weights are those of a small Llama or GPT-2, with a tokenizer trained on the text. `--weights` takes a name of
Hugging Face's hub, or a folder that `save_pretrained` wrote, such as that of `--save`:

    python -m recipes.finetune --variants plain --seeds 0 --save --out-dir runs/base
    python -m recipes.finetune --weights runs/base/finetune-plain --text python-source --method lora --lr 5e-4

An epoch is a run of `Trainer` with brevact's callback, and with the optimizer and the schedule of the whole training.
Kernels, weights and trainers of the field are options:

    python -m recipes.finetune --method lora --weights-4bit --packed --trainer sft
    TRITON_INTERPRET=1 python -m recipes.finetune --trainer dpo --liger --context 16 --sequences 8 --epochs 1
    TRITON_INTERPRET=1 python -m recipes.finetune --liger --context 16 --sequences 8 --test-sequences 2 --epochs 1
"""

import copy
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes import command_line, files
from recipes.data.tokens import TEXTS, Tokens, load_tokens
from recipes.recipe import ABOVE_0, Metric, Recipe, RecipeError, Settings, Task, library, setting

#: Width, layers and heads of models with random weights.
SIZES = {"tiny": (128, 4, 4), "small": (512, 8, 8)}
_CLIP = 1.0
_WARMUP = 0.1
#: Mean tokens of a text in a packed sequence, as a part of the sequence.
_PIECE = 0.125
#: Attributes of a model that trainers set, and the recipe takes away: forward passes in autocast, or with a fused head.
_FORWARDS = ("forward", "_original_forward", "_is_accelerate_prepared")


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
    trainer: str = setting(
        "trainer", "of transformers, or TRL's SFTTrainer or DPOTrainer", choices=("trainer", "sft", "dpo")
    )
    packed: bool = setting(False, "several texts in a sequence, which attend to themselves alone")
    liger: bool = setting(False, "Liger's kernels")
    weights_4bit: bool = setting(False, "bitsandbytes' weights of 4 bits under LoRA")
    checkpoint_every: int = setting(1, "blocks of which one is checkpointed, in variants with checkpoints", least=1)
    bf16: bool = setting(False, "autocast to bfloat16")
    compile: bool = setting(False, "compile the model by torch.compile")
    save: bool = setting(False, "write the model of each variant's first seed, for --weights")


class FineTuning(Task):
    def __init__(self, settings: FineTuneSettings, seed: int, device: torch.device) -> None:
        super().__init__(settings, seed, device)
        _check_combination(settings)
        transformers = library("transformers")
        transformers.logging.set_verbosity_error()
        model = _random_model(settings) if settings.weights is None else _given_model(settings)
        if settings.liger:
            take_liger(model, has_fused_loss=settings.trainer == "trainer")
        if settings.weights_4bit:
            take_quarters(model)
        #: Of DPO: the model before training, when adapters are 0.
        self.reference = copy.deepcopy(model).to(device).requires_grad_(False) if settings.trainer == "dpo" else None
        if settings.method == "lora":
            model = with_adapters(model, settings.rank)
        self.model = model.to(device).train()
        if settings.compile:
            torch.compiler.reset()  # the compiler counts models of all runs against one limit
            self.model.compile()
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
        """Sequences of texts that start anywhere in the text; for DPO, their ends, before ends of others."""
        own, text = self.settings, self.tokens().train
        generator = torch.Generator().manual_seed(self.seed * 2**20 + epoch)
        most = len(text) - own.context + 1
        shape, place_T = (own.batch_size, own.context), torch.arange(own.context)
        for _ in range(self.steps_per_epoch):
            from_BT = torch.randint(most, (own.batch_size, own.context if own.packed else 1), generator=generator)
            is_first_BT = (place_T == 0).expand(shape)
            if own.packed:
                is_first_BT = is_first_BT | (torch.rand(shape, generator=generator) * own.context * _PIECE < 1)
            first_BT = torch.where(is_first_BT, place_T, 0).cummax(1).values
            from_BT = from_BT.expand(shape).gather(1, first_BT)
            position_BT = place_T - first_BT
            batch = self._batch(text[from_BT + position_BT], is_first_BT)
            if own.trainer == "dpo":
                batch = _pairs(batch["input_ids"])
            elif own.packed or own.trainer == "sft":
                batch["position_ids"] = position_BT.to(self.device)
            yield batch

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The model's own, mean cross-entropy of the next token in nats, or that of TRL's trainer."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.bf16):
            if self.settings.trainer == "trainer":
                return self.model(**batch, use_cache=False).loss
            with tempfile.TemporaryDirectory() as folder, _own_forwards(self.model, self.reference):
                return self._trainer(folder, [batch], 0).compute_loss(self.model, dict(batch))

    def train_epoch(self, epoch: int, on_step: Callable[[], object]) -> float:
        """Lets the trainer take the steps of an epoch, with brevact's callback if the model has a policy."""
        with tempfile.TemporaryDirectory() as folder, _own_forwards(self.model, self.reference):
            trainer = self._trainer(folder, list(self.batches(epoch)), epoch)
            trainer.add_callback(_OnStep(on_step))
            if self.region is not nullcontext:
                from brevact.trainers import HuggingFaceCallback

                HuggingFaceCallback(None, memory=False).add_to(trainer)
            return trainer.train().training_loss

    def _trainer(self, folder: str, batches: list[dict[str, Tensor]], epoch: int) -> Any:
        """A trainer whose data are numbers of these batches."""
        transformers = library("transformers")
        library("accelerate")
        own = self.settings
        options: dict[str, Any] = {
            "num_train_epochs": 1,
            "per_device_train_batch_size": 1,
            "train_sampling_strategy": "sequential",
            "max_grad_norm": _CLIP,
            "seed": 1000 * self.seed + epoch,
            "bf16": own.bf16,
            "use_cpu": self.device.type == "cpu",
            **dict.fromkeys(("save_strategy", "logging_strategy"), "no"),
            "report_to": [],
            "disable_tqdm": True,
            "remove_unused_columns": False,
        }
        common = {
            "data_collator": lambda rows: batches[rows[0]["number"]],
            "optimizers": (self.optimizer, self.scheduler),
            "train_dataset": [{"number": number} for number in range(len(batches))],
        }
        if own.trainer == "trainer":
            trainer = transformers.Trainer(self.model, transformers.TrainingArguments(folder, **options), **common)
        else:
            trl = library("trl")
            options |= {"gradient_checkpointing": False, "max_length": None}
            common["train_dataset"] = library("datasets").Dataset.from_list(common["train_dataset"])
            common["processing_class"] = self.tokens().tokenizer
            if own.trainer == "sft":
                options["dataset_kwargs"] = {"skip_prepare_dataset": True}
                trainer = trl.SFTTrainer(self.model, trl.SFTConfig(folder, **options), **common)
            else:
                made = _of_pairs(trl, own.liger)
                trainer = made(self.model, self.reference, trl.DPOConfig(folder, **options), **common)
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    @torch.no_grad()
    def evaluate(self) -> float:
        """Bits per character of the text held out."""
        tokens, own = self.tokens(), self.settings
        count = min(own.test_sequences, len(tokens.test) // own.context)
        sequences = tokens.test[: count * own.context].view(count, own.context)
        self.model.eval()
        total = 0.0
        for part in sequences.split(own.batch_size):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=own.bf16):
                total += float(self.model(**self._batch(part), use_cache=False).loss) * len(part)
        self.model.train()
        return total / count * tokens.tokens_per_character / math.log(2)

    def use_checkpoints(self) -> None:
        """As `gradient_checkpointing=True` of `TrainingArguments`, of every n-th block."""
        is_new = hasattr(self.model, "activation_checkpointing_enable")  # the older name is an alias by now
        enable = self.model.activation_checkpointing_enable if is_new else self.model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        layer = library("transformers.modeling_layers").GradientCheckpointingLayer
        for number, block in enumerate(each for each in self.model.modules() if isinstance(each, layer)):
            block.gradient_checkpointing = number % self.settings.checkpoint_every == 0

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

    def _batch(self, tokens_BT: Tensor, is_first_BT: Tensor | None = None) -> dict[str, Tensor]:
        """Inputs of the model; the first token of a text has no label, as nothing precedes it."""
        if is_first_BT is None:
            is_first_BT = torch.arange(tokens_BT.shape[1]) == 0
        labels_BT = tokens_BT.masked_fill(is_first_BT, -100)
        return {"input_ids": tokens_BT.to(self.device), "labels": labels_BT.to(self.device)}


def _check_combination(settings: FineTuneSettings) -> None:
    if settings.weights_4bit and settings.method != "lora":
        raise RecipeError("--weights-4bit is not possible with --method full; use --method lora")
    if settings.trainer == "dpo" and settings.packed:
        raise RecipeError("--packed is not possible with --trainer dpo, which pads its pairs; use --trainer sft")
    if settings.trainer == "dpo" and settings.batch_size < 2:
        raise RecipeError("--batch-size 1 is not possible with --trainer dpo, which pairs texts; use at least 2")


def _pairs(tokens_BT: Tensor) -> dict[str, Tensor]:
    """DPO's batch: first halves of texts with their own second halves, then with those of others."""
    half = tokens_BT.shape[1] // 2
    ids = torch.cat([tokens_BT, torch.cat([tokens_BT[:, :half], tokens_BT[:, half:].roll(1, 0)], 1)])
    is_end = torch.zeros_like(ids)
    is_end[:, half:] = 1
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": is_end}


def _of_pairs(trl: Any, has_loss_of_liger: bool) -> Any:
    class OfPairs(trl.DPOTrainer):
        """Takes batches as they are, which the collator makes."""

        def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
            return dataset

    class OfLiger(OfPairs):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
            loss = _preference_loss(self.accelerator.unwrap_model(model), self.ref_model, inputs, self.args.beta)
            return (loss, None) if return_outputs else loss

    return OfLiger if has_loss_of_liger else OfPairs


def _preference_loss(model: Any, reference: Any, batch: dict[str, Tensor], beta: float) -> Tensor:
    """DPO's loss by Liger, which runs the head on a part of the batch at a time, and saves gradients in forward."""
    losses = library("liger_kernel.chunked_loss")
    ids = batch["input_ids"]
    targets = ids.masked_fill(batch["completion_mask"] == 0, -100)[:, 1:]

    def states_and_head(model: Any) -> tuple[Tensor, Tensor]:
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # without LoRA's shell
        found = model.base_model(input_ids=ids, attention_mask=batch["attention_mask"], use_cache=False)
        return found.last_hidden_state[:, :-1], model.get_output_embeddings().weight

    states, head = states_and_head(model)
    with torch.no_grad():
        others = states_and_head(reference)
    loss = losses.LigerFusedLinearDPOLoss(beta=beta, compiled=torch.cuda.is_available())
    return loss(head, states, targets, None, *others)[0]


@contextmanager
def _own_forwards(*models: Any) -> Iterator[None]:
    """Gives models their forward passes back after trainers have wrapped them."""
    parts = [vars(part) for model in models if model is not None for part in model.modules()]
    before = [{name: part[name] for name in _FORWARDS if name in part} for part in parts]
    try:
        yield
    finally:
        for part, own in zip(parts, before, strict=True):
            for name in _FORWARDS:
                part.pop(name, None)
            part.update(own)


def take_liger(model: Any, has_fused_loss: bool) -> None:
    """Gives a model Liger's kernels, in place."""
    library("triton")
    from recipes.liger import liger

    kernels = liger()
    known = library("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    if model.config.model_type not in known:
        raise RecipeError(f"--liger is not possible: Liger has no kernels for {model.config.model_type}; use llama")
    kernels._apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=has_fused_loss)


def _without_scales(layer: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Leaves scales of 4-bit weights out of checkpoints, whose layers have them and do not load them."""
    for name in [name for name in state if name.startswith(f"{prefix}weight.")]:
        del state[name]


def take_quarters(model: Any) -> None:
    """Gives a model linear layers of bitsandbytes, whose weights have 4 bits, but for its head; in place."""
    bitsandbytes = library("bitsandbytes")
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and layer is not model.get_output_embeddings():
            found = bitsandbytes.nn.Linear4bit(
                layer.in_features, layer.out_features, layer.bias is not None, layer.weight.dtype, quant_type="nf4"
            )
            found.weight = bitsandbytes.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
            found.bias = layer.bias
            found.support_avx512bf16_for_cpu = False  # of evaluation, which lays weights out as no backward reads them
            found.register_state_dict_post_hook(_without_scales)
            model.set_submodule(name, found)
    model.is_loaded_in_4bit = True


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


def with_adapters(model: Any, rank: int) -> Any:
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
