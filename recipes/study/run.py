"""What a run is: a recipe, a backward policy, settings that differ from those of all studies, and a seed.

Runs of a seed start from the same weights and see the same batches. Nothing is random but quantizers: there is no
dropout, which would draw from the generator that they take their seeds from.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from recipes import efficientnetv2, qat
from recipes.images import ImageSettings
from recipes.models import resnet50
from recipes.recipe import Recipe

FULL_PRECISION = "None"
#: Kinds of runs, by the word that rows hold.
RECIPES: dict[str, Recipe] = {
    "efficientnetv2": efficientnetv2.RECIPE,
    "qat": qat.RECIPE,
    "resnet50": replace(
        efficientnetv2.RECIPE,
        settings=ImageSettings,
        build_model=lambda settings, data, layers: resnet50(
            classes=data.classes, channels_in=data.channels, image_size=data.image_size
        ),
    ),
}
#: Settings of all studies that differ from those of the recipes.
BASE: dict[str, Any] = {"batch_size": 64, "dropout": 0.0, "label_smoothing": 0.0}
#: Columns that tell runs apart.
KEY = ("dataset", "recipe", "epochs", "train_size", "settings", "policy", "seed")

Key = tuple[str, ...]


@dataclass(frozen=True)
class Size:
    """How much a run trains.

    Attributes:
        dataset: a key of `recipes.data.LOADERS`.
        epochs: passes over the training images.
        train_size: number of training images; None for all.
    """

    dataset: str = "cifar10"
    epochs: int = 10
    train_size: int | None = 10_000


@dataclass(frozen=True)
class Run:
    """A training run that a row describes.

    Attributes:
        policy: words that `recipes.study.policies` reads.
        seed: of weights, batches and random rounding.
        size: how much it trains.
        recipe: a key of `RECIPES`.
        changes: settings that differ from `BASE`, with their values.
    """

    policy: str
    seed: int
    size: Size = field(default_factory=Size)
    recipe: str = "efficientnetv2"
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> Key:
        """The texts of the columns `KEY`."""
        size = "all" if self.size.train_size is None else str(self.size.train_size)
        changes = " ".join(f"{name}={value}" for name, value in sorted(self.changes))
        return (self.size.dataset, self.recipe, str(self.size.epochs), size, changes, self.policy, str(self.seed))

    @property
    def words(self) -> str:
        """The run in a line, for people."""
        changes = [f"{name}={value}" for name, value in sorted(self.changes)]
        return ", ".join([self.recipe, self.policy, *changes, f"seed {self.seed}"])

    def settings(self, data_dir: str, device: str = "auto") -> ImageSettings:
        """The settings of the recipe.

        Args:
            data_dir: folder that holds the data set.
            device: torch device.

        Raises:
            RecipeError: a value is not possible.
        """
        size = {"dataset": self.size.dataset, "epochs": self.size.epochs, "train_size": self.size.train_size}
        given = {**BASE, **size, **dict(self.changes), "seed": self.seed, "data_dir": data_dir, "device": device}
        return RECIPES[self.recipe].settings(**given)  # type: ignore[return-value]

    def with_policy(self, policy: str) -> "Run":
        """The run that differs in nothing but what is stored."""
        return replace(self, policy=policy)
