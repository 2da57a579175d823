"""A character-level GPT that learns the reference of the Python language, with 2 or 4 bits an activation for backward.

    python -m recipes.char_gpt --compare DEFAULT StochBackward2bit

trains a GPT of 0.8 million weights on text that comes with Python (`recipes/data/text.py` names source and licence),
three times, and compares the loss on the tenth of it that is held out: in nats a character, and in bits.

    python -m recipes.char_gpt --text-file book.txt --act-quant StochBackward2bit --generate 500

takes a text of your own, with paragraphs between blank lines. Norm and MLP may be those of later models, the head may
have a weight of its own:

    python -m recipes.char_gpt --norm rms --mlp swiglu --head separate --act-quant StochBackward4bit

Stored bytes include the loss's, whose input has a number for each character of the alphabet. An interrupted run
or comparison goes on with `--resume DIR`, and ends in the weights of an uninterrupted one.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from recipes import files
from recipes.command_line import main as run_command_line
from recipes.data.text import TextBatches, TextDataset, load_text
from recipes.metrics import BITS_PER_CHARACTER
from recipes.models import GPT, GPT_SIZES, HEADS, MLPS, NORMS, FloatLayers, Layers
from recipes.options import Limit, setting
from recipes.recipe import Recipe
from recipes.settings import Settings

SAMPLE = "sample.txt"


@dataclass(frozen=True)
class CharGptSettings(Settings):
    LIMITS: ClassVar[tuple[Limit, ...]] = (
        *Settings.LIMITS,
        ("train_size", lambda value: value >= 1, "use a number of characters of at least 1"),
        ("test_size", lambda value: value >= 1, "use a number of characters of at least 1"),
        ("context", lambda value: value >= 1, "use at least 1"),
        ("generate", lambda value: value >= 0, "use 0 or more"),
        ("temperature", lambda value: value > 0, "use a value above 0"),
    )
    MAY_CHANGE_ON_RESUME: ClassVar[frozenset[str]] = frozenset({"device", "generate", "temperature"})

    model: str = setting("nano", "size of the GPT", choices=tuple(GPT_SIZES))
    context: int = setting(64, "characters that the model sees", type=int)
    norm: str = setting("layer", "LayerNorm or RMSNorm", choices=tuple(NORMS))
    mlp: str = setting("gelu", "MLP of the blocks", choices=tuple(MLPS))
    head: str = setting("tied", "weight of the head: that of the embedding, or its own", choices=HEADS)
    text_file: str | None = setting(None, "text in UTF-8; without it the reference of the Python language")
    train_size: int | None = setting(None, "train on this many characters only", type=int)
    test_size: int | None = setting(None, "test on this many characters only", type=int)
    generate: int = setting(200, "characters of sample text at the end", type=int)
    temperature: float = setting(0.8, "of the sample text", type=float)

    epochs: int = setting(6, "passes over the training text", type=int)
    batch_size: int = setting(16, "windows of the text in a training step", type=int)
    lr: float = setting(1e-3, "largest learning rate of AdamW", type=float)
    label_smoothing: float = setting(0.0, "share of the target spread over all characters", type=float)
    clip_grad_norm: float | None = setting(1.0, "largest norm of all gradients together", type=float)
    dropout: float = setting(0.0, "dropout of embeddings, attention and residual branches", type=float)


def load_data(settings: CharGptSettings) -> TextDataset:
    path = None if settings.text_file is None else Path(settings.text_file)
    return load_text(path, settings.train_size, settings.test_size)


def make_batches(settings: CharGptSettings, data: TextDataset, device: torch.device) -> tuple[TextBatches, TextBatches]:
    options = {"context": settings.context, "batch_size": settings.batch_size, "device": device}
    return TextBatches(data.train, train=True, seed=settings.seed, **options), TextBatches(data.test, **options)


def build_model(settings: CharGptSettings, data: TextDataset, layers: Layers) -> nn.Module:
    return GPT(
        GPT_SIZES[settings.model],
        vocabulary=len(data.characters),
        context=settings.context,
        norm=settings.norm,
        mlp=settings.mlp,
        head=settings.head,
        dropout=settings.dropout,
        stochastic_depth=settings.stochastic_depth,
        layers=layers,
    )


def write_sample(model: nn.Module, settings: CharGptSettings, data: TextDataset, folder: Path) -> None:
    """Lets a trained model go on after an empty line, prints the text and writes it to `folder`."""
    if settings.generate == 0:
        return
    start = data.characters.find("\n")  # the first of all characters in a text of one line
    device = next(model.parameters()).device
    drawn = model.generate(
        torch.tensor([max(start, 0)] * 2, device=device),
        settings.generate,
        temperature=settings.temperature,
        generator=torch.Generator().manual_seed(settings.seed),
    )
    text = data.decode(drawn.tolist())
    files.write_atomically(folder / SAMPLE, lambda file: file.write((text + "\n").encode()))
    print(f"--- {settings.label} writes:\n{text}\n---")


RECIPE = Recipe(
    module="char_gpt",
    description=__doc__,
    settings=CharGptSettings,
    metric=BITS_PER_CHARACTER,
    folder=lambda settings: f"char-gpt-{settings.model}",
    title=lambda settings: f"GPT {settings.model}, {settings.context} characters, batches of {settings.batch_size}",
    load_data=load_data,
    make_batches=make_batches,
    build_model=build_model,
    layers=FloatLayers(),
    quantize_loss=True,
    finish=write_sample,
)
main = partial(run_command_line, RECIPE)

if __name__ == "__main__":
    sys.exit(main())
