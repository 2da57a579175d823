"""Texts as tokens of a tokenizer of Hugging Face: trained on the spot, or the one that comes with a model's weights.

A tenth of a text is held out, and no paragraph is in both parts. The texts that need no download come with Python,
under the Python Software Foundation License Version 2: the reference of the language (`pydoc_data.topics`) and the
source of the standard library. They differ a little from one release of Python to the next.
"""

import functools
import hashlib
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.recipe import RecipeError

#: Characters that are taken of the source of the standard library.
_SOURCE_CHARACTERS = 1_000_000
#: Share of the text that is tested on.
HELD_OUT = 0.1


def python_reference() -> str:
    """The reference of the Python language, topic after topic in the order of their digests, which mixes subjects."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip("\n") for name in sorted(topics, key=_digest))


def python_source() -> str:
    """Source of modules of Python's standard library, in the order of the digests of their names."""
    parts, count = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: _digest(path.name)):
        if count < _SOURCE_CHARACTERS:
            parts.append(path.read_text("utf-8"))
            count += len(parts[-1])
    return "\n\n".join(parts)


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


#: Texts that come with Python, by the name that the command line has for them.
TEXTS = {"python-docs": python_reference, "python-source": python_source}


def read_text(path: Path) -> str:
    """The text of a file in UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"--text-file {path} cannot be read ({error.strerror or error}); name a text file") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"--text-file {path} is not a text in UTF-8 ({error.reason}); convert it") from error


def different_paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, which blank lines separate, without those that repeat an earlier one's words.

    Python's reference repeats whole sections; text that is held out would otherwise have been trained on.
    """
    kept: dict[str, str] = {}
    for paragraph in re.split(r"\n\s*\n", text):
        if key := " ".join(paragraph.split()):
            kept.setdefault(key, paragraph)
    return list(kept.values())


def split_paragraphs(paragraphs: Sequence[str]) -> tuple[str, str]:
    """Two texts; the second has the last `HELD_OUT` of all characters, or up to a paragraph less."""
    total, count, first = sum(map(len, paragraphs)), 0, len(paragraphs)
    while first and count + len(paragraphs[first - 1]) <= HELD_OUT * total:
        first -= 1
        count += len(paragraphs[first])
    return "\n\n".join(paragraphs[:first]), "\n\n".join(paragraphs[first:])


@dataclass(frozen=True)
class Tokens:
    """A text as numbers of tokens.

    Attributes:
        tokenizer: of Hugging Face.
        train: int64 tensor, the tokens to train on.
        test: the tokens held out.
        tokens_per_character: of the text held out.
    """

    tokenizer: Any
    train: Tensor
    test: Tensor
    tokens_per_character: float


def trained_tokenizer(text: str, vocabulary: int) -> Any:
    """A tokenizer of pairs of bytes (BPE), trained on a text."""
    import tokenizers
    import transformers

    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator([text], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=found, **dict.fromkeys(("eos_token", "bos_token", "pad_token"), "<|end|>")
    )


@functools.lru_cache(maxsize=2)
def load_tokens(text: str, text_file: str | None, weights: str | None, vocabulary: int) -> Tokens:
    """Splits a text at a paragraph, the last tenth held out, and both parts into tokens.

    Args:
        text: key of `TEXTS`.
        text_file: path of a text in UTF-8, in place of that; None for none.
        weights: folder or name of a model whose tokenizer it is; None for one that is trained on the text.
        vocabulary: number of tokens of that.

    Raises:
        RecipeError: the text cannot be read, or there is no such tokenizer.
    """
    import transformers

    transformers.logging.set_verbosity_error()  # of texts longer than the model takes at once
    content = TEXTS[text]() if text_file is None else read_text(Path(text_file))
    train, test = split_paragraphs(different_paragraphs(content))
    if not train or not test:
        raise RecipeError(f"--text-file {text_file} has fewer than two different paragraphs; take a longer one")
    if weights is None:
        tokenizer = trained_tokenizer(train, vocabulary)
    else:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
        except (OSError, ValueError) as error:
            raise RecipeError(
                f"--weights {weights} has no tokenizer ({str(error).splitlines()[0]}); name a folder that "
                "save_pretrained of model and tokenizer wrote"
            ) from error
    numbers = [torch.tensor(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (train, test)]
    return Tokens(tokenizer, *numbers, tokens_per_character=len(numbers[1]) / len(test))
