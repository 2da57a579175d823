"""The studies: what each one asks, where the question is from, and which runs answer it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.study.run import FULL_PRECISION, Run, Size

NANO = Size()
THESIS = "J. Li, master's thesis, Heidelberg University, 2025"


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
        seeds: number of seeds.
        size: how much its runs train, unless the command line says otherwise.
    """

    name: str
    question: str
    source: str
    cases: tuple[Case, ...]
    seeds: int = 3
    size: Size = NANO

    def runs(self, size: Size, seeds: Sequence[int]) -> Iterator[Run]:
        """All runs, seed by seed, so that what is compared is trained in turn."""
        for seed in seeds:
            for case in self.cases:
                yield case.run(size, seed)


REFERENCE = Case("full precision", FULL_PRECISION)
DEFAULT = Case("DEFAULT", "DEFAULT")
#: Of the thesis' figures; 32 bits are full precision.
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 16)


def uniform(rounding: str, bit_width: int, **settings: Any) -> Case:
    """One quantizer for all layers.

    Args:
        rounding: "Stoch" or "Nearest".
        bit_width: of all of them.
        **settings: of the quantizer.
    """
    name = f"{rounding}Backward{min(bit_width, 8)}bit"
    given = {"bit_width": bit_width, **settings} if bit_width > 8 else settings
    words = [name, ",".join(f"{key}={value}" for key, value in given.items())] if given else [name]
    kind = "stochastic" if rounding == "Stoch" else "nearest"
    label = [f"{bit_width} bits", kind, *(f"{key}={value}" for key, value in settings.items())]
    return Case(", ".join(label), ":".join(words))


STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        Study(
            "main",
            "Does training by default, at a twentieth of the bytes, end where training at full precision does?",
            "this project",
            (
                REFERENCE,
                Case("2 bits, stochastic", "StochBackward2bit"),
                DEFAULT,
                Case("fit, bytes of DEFAULT", "fit:bytes=DEFAULT"),
                Case("Adaptive, bytes of DEFAULT", "DEFAULT@adaptive:100"),
            ),
            seeds=5,
        ),
        Study(
            "bit-widths-stochastic",
            "How many bits does stochastic rounding need?",
            f"{THESIS}, figure 5.1",
            (REFERENCE, *(uniform("Stoch", bits) for bits in WIDTHS)),
        ),
        Study(
            "bit-widths-nearest",
            "How many bits does rounding to nearest need?",
            f"{THESIS}, figure 4.1",
            (REFERENCE, *(uniform("Nearest", bits) for bits in WIDTHS)),
        ),
    )
}
