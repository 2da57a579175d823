"""What a study is: a question, and the runs that answer it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.study.run import FULL_PRECISION, Run, Size

#: Of studies that rank what differs much: differences show early, while those that chance makes grow with the steps.
SHORT = Size(epochs=4, train_size=5_000)


@dataclass(frozen=True)
class Case:
    """Runs that differ in nothing but the seed.

    Attributes:
        label: how tables and pictures call it.
        policy: words that `recipes.study.policies` reads.
        changes: settings that differ from those of all studies.
        recipe: a key of `recipes.study.run.RECIPES`.
    """

    label: str
    policy: str
    changes: tuple[tuple[str, Any], ...] = ()
    recipe: str = "efficientnetv2"

    def run(self, size: Size, seed: int) -> Run:
        """The run of a seed."""
        return Run(self.policy, seed, size, self.recipe, self.changes)


@dataclass(frozen=True)
class Study:
    """A question and the runs that answer it.

    Attributes:
        name: on the command line.
        question: that it asks.
        source: of the question.
        cases: what is compared; the first one is what the others are compared with.
        contrasts: pairs of labels: the first is also compared with the second.
        seeds: number of seeds.
        size: how much its runs train, unless the command line says otherwise.
        is_long: whether it is left out where all studies are asked for.
        note: what a reader of its table has to know.
    """

    name: str
    question: str
    source: str
    cases: tuple[Case, ...]
    contrasts: tuple[tuple[str, str], ...] = ()
    seeds: int = 3
    size: Size = SHORT
    is_long: bool = False
    note: str = ""

    def runs(self, size: Size, seeds: Sequence[int]) -> Iterator[Run]:
        """All runs, seed by seed, so that what is compared is trained in turn."""
        for seed in seeds:
            for case in self.cases:
                yield case.run(size, seed)

    def case(self, label: str) -> Case:
        """The case of a label."""
        return next(case for case in self.cases if case.label == label)


REFERENCE = Case("full precision", FULL_PRECISION)
DEFAULT = Case("DEFAULT", "DEFAULT")


def uniform(rounding: str, bit_width: int, **settings: Any) -> Case:
    """One quantizer for all layers.

    >>> uniform("Stoch", 2, bucket_size=64).policy
    'StochBackward2bit:bucket_size=64'
    >>> uniform("Nearest", 16).policy
    'NearestBackward8bit:bit_width=16'

    Args:
        rounding: "Stoch", "Dither" or "Nearest".
        bit_width: of all layers.
        **settings: of the quantizer.
    """
    given = {"bit_width": bit_width, **settings} if bit_width > 8 else settings
    words = [f"{rounding}Backward{min(bit_width, 8)}bit", ",".join(f"{name}={value}" for name, value in given.items())]
    kind = {"Stoch": "stochastic", "Dither": "dithered", "Nearest": "nearest"}[rounding]
    label = [f"{bit_width} bit{'s' * (bit_width > 1)}", kind, *(f"{name}={value}" for name, value in settings.items())]
    return Case(", ".join(label), ":".join(filter(None, words)))
