"""How good a model is: the scores of a pass over a split, and the figure that a recipe judges its runs by."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Scores:
    """Mean loss over the targets of a pass, in nats, and the share of them predicted correctly (0..1)."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Metric:
    """The figure that a recipe judges its runs by.

    Attributes:
        name: in columns: train_<name>, test_<name>.
        of: takes it from scores.
        best: the better one of several.
        spec: of its text, for `format`.
        axis: label of a plot's axis.
        factor: from the figure to the plotted one.
    """

    name: str
    of: Callable[[Scores], float]
    best: Callable[[Iterable[float]], float]
    spec: str
    axis: str
    factor: float = 1.0

    @property
    def words(self) -> str:
        return self.name.replace("_", " ")


ACCURACY = Metric("accuracy", lambda scores: scores.accuracy, max, ".2%", "accuracy (%)", 100.0)
BITS_PER_CHARACTER = Metric(
    "bits_per_character", lambda scores: scores.loss / math.log(2), min, ".3f", "bits per character"
)
