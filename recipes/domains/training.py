"""Trainings of each variant with each seed: the same weights and batches for a seed, resumed where they stopped."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import brevact
from recipes import files, machine
from recipes.domains.domain import Domain, Region, Task
from recipes.domains.variants import is_packed, prepare
from recipes.errors import RecipeError

RUNS, EPOCHS, CHECKPOINT = "runs.csv", "epochs.csv", "checkpoint.pt"
COLUMNS = ("variant", "seed", "value", "loss", "kept_mib", "seconds", *machine.COLUMNS)
COLUMNS_OF_EPOCHS = ("variant", "seed", "epoch", "loss", "value", "seconds")

Row = dict[str, Any]


class Run:
    """The training of a task by a variant and a seed."""

    def __init__(self, domain: Domain, settings: Any, variant: str, seed: int, device: torch.device) -> None:
        self.variant, self.seed = variant, seed
        torch.manual_seed(seed)
        self.task: Task = domain.task(settings, seed, device)
        self.region: Region = prepare(self.task, variant)
        self.epochs: list[Row] = []
        batch = next(iter(self.task.batches(1)))
        report = brevact.memory_report(self.task.model, batch, lambda model, batch: self.task.loss(batch))
        self.kept_mib = (report.saved_bytes if is_packed(variant) else report.plain_bytes) / 2**20
        torch.manual_seed(seed)

    def train_epoch(self, bar: tqdm) -> None:
        """Trains, measures, and adds a row to `epochs`."""
        number, start = len(self.epochs) + 1, time.perf_counter()
        loss = self.task.train_epoch(number, self.region, bar.update)
        seconds = time.perf_counter() - start
        if not abs(loss) < float("inf"):
            raise RecipeError(f"the training loss became {loss} in epoch {number}; try a smaller --lr")
        row = {"variant": self.variant, "seed": self.seed, "epoch": number, "loss": loss}
        self.epochs.append({**row, "value": self.task.evaluate(), "seconds": seconds})

    def state_dict(self) -> Row:
        """All that the next epoch depends on."""
        state: Row = {"variant": self.variant, "seed": self.seed, "epochs": self.epochs}
        state |= {name: part.state_dict() for name, part in self._parts().items()}
        if torch.cuda.is_available():
            state["cuda_generator"] = torch.cuda.get_rng_state()
        state |= {"generator": torch.get_rng_state(), "noise_count": brevact.noise_count()}
        return {**state, "task": self.task.state_dict()}

    def load_state_dict(self, state: Row) -> None:
        """Goes on from a `state_dict` of a run with the same settings, variant and seed."""
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.task.load_state_dict(state["task"])
        self.epochs = list(state["epochs"])
        brevact.noise_count(state["noise_count"])
        torch.set_rng_state(state["generator"])
        if "cuda_generator" in state:
            torch.cuda.set_rng_state(state["cuda_generator"])

    def _parts(self) -> Row:
        parts = {"model": self.task.model, "optimizer": self.task.optimizer, "scheduler": self.task.scheduler}
        return {name: part for name, part in parts.items() if part is not None}


def train(
    domain: Domain, settings: Any, variants: Sequence[str], seeds: Sequence[int], device: torch.device, folder: Path
) -> tuple[list[Row], list[Row]]:
    """Trains each variant with each seed, those that the folder has already left out.

    Args:
        domain: whose task is trained.
        settings: of all runs.
        variants: "plain", "checkpoint" and names of policies.
        seeds: of the runs.
        device: to train on.
        folder: receives a row per run, a row per epoch, pictures of the first seed, and the run's checkpoint.

    Returns:
        Rows of all runs of these variants and seeds, with the keys `COLUMNS`; and those of their epochs.
    """
    rows, epochs = (files.read_rows(path) if (path := folder / name).exists() else [] for name in (RUNS, EPOCHS))
    done = {(row["variant"], int(row["seed"])) for row in rows}
    wanted = [(variant, seed) for seed in seeds for variant in variants]
    for variant, seed in wanted:
        if (variant, seed) in done:
            continue
        run = Run(domain, settings, variant, seed, device)
        _go_on(run, folder)
        label, steps = f"{variant}, seed {seed}", run.task.steps_per_epoch
        bar = tqdm(total=settings.epochs * steps, initial=len(run.epochs) * steps, desc=label, disable=None)
        with bar:
            while len(run.epochs) < settings.epochs:
                run.train_epoch(bar)
                files.write_checkpoint(folder / CHECKPOINT, run.state_dict())
        last = run.epochs[-1]
        tqdm.write(f"{label}: {domain.metric.words} {format(last['value'], domain.metric.spec)}")
        if seed == seeds[0]:
            run.task.show(folder / f"{domain.name}-{file_name(variant)}.png")
        seconds = sum(row["seconds"] for row in run.epochs)
        rows.append({**{name: last.get(name) for name in COLUMNS}, "kept_mib": run.kept_mib, "seconds": seconds})
        rows[-1] |= machine.place(device)
        epochs += run.epochs
        files.write_rows(folder / EPOCHS, COLUMNS_OF_EPOCHS, epochs)
        files.write_rows(folder / RUNS, COLUMNS, rows)
        (folder / CHECKPOINT).unlink()
    return tuple([row for row in each if (row["variant"], int(row["seed"])) in wanted] for each in (rows, epochs))


def file_name(variant: str) -> str:
    """A variant as a part of the name of a file."""
    return "".join(sign if sign.isalnum() or sign in "-_=." else "_" for sign in variant)


def _go_on(run: Run, folder: Path) -> None:
    """Loads the checkpoint of a folder, if it is of this run."""
    if (folder / CHECKPOINT).exists():
        state = files.read_checkpoint(folder / CHECKPOINT)
        if (state.get("variant"), state.get("seed")) == (run.variant, run.seed):
            run.load_state_dict(state)
