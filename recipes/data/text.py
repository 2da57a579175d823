"""Text, taken character by character: a tenth is held out, and no paragraph is in both parts.

The text that needs no download is the reference of the Python language that comes with every Python, as the module
`pydoc_data.topics` of its standard library: the text of `help("for")`. Its licence is the Python Software Foundation
License Version 2. It differs a little from one release of Python to the next. Of Python 3.11.7's, with no paragraph
twice, 337,255 characters are trained on and 35,844 held out; 1.6 % of the latter's stretches of 40 characters, the
rules of tables for the most part, occur in the former too.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from recipes.errors import RecipeError

HELD_OUT = 0.1
"""Share of the text that is tested on."""


@dataclass(frozen=True)
class TextDataset:
    """A text as numbers of characters.

    Attributes:
        name: for titles.
        train: int64 tensor, the characters to train on.
        test: the characters held out.
        characters: all that occur, in both parts; a number is a place in it.
    """

    name: str
    train: Tensor
    test: Tensor
    characters: str

    def decode(self, numbers: Sequence[int]) -> str:
        return "".join(self.characters[number] for number in numbers)


def load_text(path: Path | None, train_size: int | None = None, test_size: int | None = None) -> TextDataset:
    """Loads a text (None: Python's reference), split at a paragraph: the last tenth is held out.

    A paragraph that has occurred before, but for its white space, is left out: Python's reference repeats whole
    sections, and text that is held out would otherwise have been trained on.
    """
    name, text = ("python-docs", python_reference()) if path is None else (path.stem, read_text(path))
    train, test = split_paragraphs(different_paragraphs(text))
    for part, size, option in ((train, train_size, "--train-size"), (test, test_size, "--test-size")):
        if not part:
            raise RecipeError(f"the text of {name} has fewer than two different paragraphs; take a longer one")
        if size is not None and size > len(part):
            raise RecipeError(
                f"{option} {size} is not possible: that part of {name} has {len(part)} characters; use 1 to {len(part)}"
            )
    characters = "".join(sorted({*train, *test}))
    numbers = {character: number for number, character in enumerate(characters)}
    parts = (
        torch.tensor([numbers[character] for character in part]) for part in (train[:train_size], test[:test_size])
    )
    return TextDataset(name, *parts, characters)


def python_reference() -> str:
    """The reference of the Python language, topic after topic in the order of their digests, which mixes subjects."""
    from pydoc_data.topics import topics

    order = sorted(topics, key=lambda name: hashlib.sha256(name.encode()).digest())
    return "\n\n".join(topics[name].strip("\n") for name in order)


def read_text(path: Path) -> str:
    """The text of a file in UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"--text-file {path} cannot be read ({error.strerror or error}); name a text file") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"--text-file {path} is not a text in UTF-8 ({error.reason}); convert it") from error


def different_paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, which blank lines separate, without those that differ from an earlier one in nothing
    but white space.
    """
    kept: dict[str, str] = {}
    for paragraph in re.split(r"\n\s*\n", text):
        key = " ".join(paragraph.split())
        if key:
            kept.setdefault(key, paragraph)
    return list(kept.values())


def split_paragraphs(paragraphs: Sequence[str]) -> tuple[str, str]:
    """Two texts; the second has the last `HELD_OUT` of all characters, or up to a paragraph less."""
    total, count, first = sum(map(len, paragraphs)), 0, len(paragraphs)
    while first and count + len(paragraphs[first - 1]) <= HELD_OUT * total:
        first -= 1
        count += len(paragraphs[first])
    return "\n\n".join(paragraphs[:first]), "\n\n".join(paragraphs[first:])


class TextBatches:
    """Iterates over windows of a text that do not overlap: (B x T characters, the B x T characters that follow them).

    In training the windows of an epoch start at a place that, like their order, depends on `seed` and the epoch's
    number alone, and windows that do not fill a last batch are left out. In testing they start at the first character.
    A model sees no character before its window.

    Args:
        numbers: int64 tensor, the text.
        context: characters in a window.
        batch_size: windows in a batch.
        device: where the text is kept.
        train: shift and shuffle.
        seed: of shift and order.

    Raises:
        RecipeError: the text is too short for a window.
    """

    def __init__(
        self,
        numbers: Tensor,
        context: int,
        batch_size: int,
        *,
        device: torch.device,
        train: bool = False,
        seed: int = 0,
    ) -> None:
        # A target follows the last character; a shift moves the windows by up to one less than their length.
        self.windows = (len(numbers) - (context if train else 1)) // context
        if self.windows < 1:
            part, needed = ("training", 2 * context) if train else ("test", context + 1)
            raise RecipeError(
                f"--context {context} needs at least {needed} characters of {part} text, there are {len(numbers)}; "
                "take a shorter context or more text"
            )
        self.numbers = numbers.to(device)
        self.context = context
        self.batch_size = min(batch_size, self.windows) if train else batch_size
        self.train = train
        self.seed = seed

    def __len__(self) -> int:
        if self.train:
            return self.windows // self.batch_size
        return -(-self.windows // self.batch_size)

    def epoch(self, number: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (characters B x T, those that follow them B x T), int64, for one pass over the text."""
        starts = torch.arange(self.windows) * self.context
        if self.train:
            # One stream for each pair of seed and epoch, up to 2**20 epochs.
            generator = torch.Generator().manual_seed(self.seed * 2**20 + number)
            shift = torch.randint(self.context, (), generator=generator)
            starts = starts[torch.randperm(self.windows, generator=generator)] + shift
        starts = starts[: len(self) * self.batch_size].to(self.numbers.device)
        offsets_T = torch.arange(self.context, device=self.numbers.device)
        for chosen_B in starts.split(self.batch_size):
            places_BT = chosen_B[:, None] + offsets_T
            yield self.numbers[places_BT], self.numbers[places_BT + 1]
