"""Trainings of each variant with each seed: the same weights and batches for a seed, resumed where they stopped."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import brevact
from recipes import files
from recipes.policies import is_packed, prepare
from recipes.recipe import Recipe, RecipeError, Task

COLUMNS = ("variant", "seed", "value", "loss", "kept_mib", "plain_mib", "seconds")
COLUMNS_OF_EPOCHS = ("variant", "seed", "epoch", "loss", "value", "seconds")

Row = dict[str, Any]


class Run:
    """The training of a task by a variant and a seed, from its start or from a `state_dict`."""

    def __init__(
        self, recipe: Recipe, settings: Any, variant: str, seed: int, device: torch.device, state: Row | None = None
    ) -> None:
        self.variant, self.seed = variant, seed
        torch.manual_seed(seed)
        self.task: Task = recipe.task(settings, seed, device)
        self.fitted = prepare(self.task, variant, state and state["fitted"])
        self.epochs: list[Row] = []
        batch = next(iter(self.task.batches(1)))
        self.report = brevact.memory_report(self.task.model, batch, lambda _, batch: self.task.loss(batch))
        plain, packed = (each / 2**20 for each in (self.report.plain_bytes, self.report.saved_bytes))
        self.kept_mib, self.plain_mib = packed if is_packed(variant) else plain, plain
        torch.manual_seed(seed)
        if state is not None:
            self._load(state)

    def train_epoch(self, bar: tqdm) -> Row:
        """Trains, measures, and adds a row to `epochs`."""
        number, start = len(self.epochs) + 1, time.perf_counter()
        loss = self.task.train_epoch(number, bar.update)
        seconds = time.perf_counter() - start
        if not abs(loss) < float("inf"):
            raise RecipeError(f"the training loss became {loss} in epoch {number}; try a smaller --lr")
        row = {"variant": self.variant, "seed": self.seed, "epoch": number, "loss": loss}
        self.epochs.append({**row, "value": self.task.evaluate(), "seconds": seconds})
        return self.epochs[-1]

    def state_dict(self) -> Row:
        """All that the next epoch depends on."""
        state: Row = {"variant": self.variant, "seed": self.seed, "epochs": self.epochs, "fitted": self.fitted}
        state |= {name: part.state_dict() for name, part in self._parts().items()}
        if torch.cuda.is_available():
            state["cuda_generator"] = torch.cuda.get_rng_state()
        state |= {"generator": torch.get_rng_state(), "noise_count": brevact.noise_count()}
        return {**state, "task": self.task.state_dict()}

    def _load(self, state: Row) -> None:
        self.task.model.load_state_dict(state["model"])
        self.task.load_state_dict(state["task"])
        for name, part in self._parts().items():
            if name != "model":
                part.load_state_dict(state[name])
        self.epochs = list(state["epochs"])
        brevact.noise_count(state["noise_count"])
        torch.set_rng_state(state["generator"])
        if "cuda_generator" in state:
            torch.cuda.set_rng_state(state["cuda_generator"])

    def _parts(self) -> Row:
        parts = {"model": self.task.model, "optimizer": self.task.optimizer, "scheduler": self.task.scheduler}
        return {name: part for name, part in parts.items() if part is not None}


def train(
    recipe: Recipe, settings: Any, variants: Sequence[str], seeds: Sequence[int], device: torch.device, folder: Path
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Trains each variant with each seed, those that the folder has already left out.

    Args:
        recipe: whose task is trained.
        settings: of all runs.
        variants: words of `recipes.policies`.
        seeds: of the runs.
        device: to train on.
        folder: receives a row per run, a row per epoch, pictures of the first seed, and the run's checkpoint.

    Returns:
        Rows of all runs of these variants and seeds, with the keys `COLUMNS`; and those of their epochs.
    """
    rows, epochs = ([*files.read_rows(folder / name)] for name in (files.RUNS, files.EPOCHS))
    done = {(row["variant"], int(row["seed"])) for row in rows}
    wanted = [(variant, seed) for seed in seeds for variant in variants]
    for variant, seed in wanted:
        if (variant, seed) in done:
            continue
        run = Run(recipe, settings, variant, seed, device, _state_of(variant, seed, folder / files.CHECKPOINT))
        _finish(run, settings.epochs, recipe, folder)
        if seed == seeds[0]:
            if is_packed(variant):
                run.report.plot(folder / f"memory-{file_name(variant)}.png")
            run.task.show(folder / f"{recipe.name}-{file_name(variant)}.png")
        rows.append({**run.epochs[-1], "kept_mib": run.kept_mib, "plain_mib": run.plain_mib})
        rows[-1]["seconds"] = sum(row["seconds"] for row in run.epochs)
        epochs += run.epochs
        files.write_rows(folder / files.EPOCHS, COLUMNS_OF_EPOCHS, epochs)
        files.write_rows(folder / files.RUNS, COLUMNS, rows)
        (folder / files.CHECKPOINT).unlink()
    mine, its = ([row for row in each if (row["variant"], int(row["seed"])) in wanted] for each in (rows, epochs))
    return mine, its


def _finish(run: Run, epochs: int, recipe: Recipe, folder: Path) -> None:
    """Trains the epochs that a run lacks, each followed by a checkpoint."""
    label, steps, metric = f"{run.variant}, seed {run.seed}", run.task.steps_per_epoch, recipe.metric
    tqdm.write(f"{label}: {run.kept_mib:.2f} of {run.plain_mib:.2f} MiB kept for backward")
    with tqdm(total=epochs * steps, initial=len(run.epochs) * steps, desc=label, disable=None) as bar:
        while len(run.epochs) < epochs:
            row = run.train_epoch(bar)
            files.write_checkpoint(folder / files.CHECKPOINT, run.state_dict())
            found = f"loss {row['loss']:.4f}  {metric.words} {row['value']:{metric.spec}}  {row['seconds']:.1f} s"
            tqdm.write(f"{label}  epoch {row['epoch']}/{epochs}  {found}")


def _state_of(variant: str, seed: int, path: Path) -> Row | None:
    """The checkpoint of a folder, if it is of this run."""
    state = files.read_checkpoint(path) if path.exists() else {}
    return state if (state.get("variant"), state.get("seed")) == (variant, seed) else None


def file_name(variant: str) -> str:
    """A variant as a part of the name of a file."""
    return "".join(sign if sign.isalnum() or sign in "-_=." else "_" for sign in variant)
