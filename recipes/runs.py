"""A training run in a folder of its own, which it updates after each epoch and can continue from.

| file | content |
|---|---|
| history.csv | one row per epoch |
| summary.json | settings, versions, final and best figures, stored bytes |
| checkpoint.pt | all that the next epoch depends on |
| memory.csv, memory.png | each layer's bytes for backward |
| history.png | the metric over the epochs |
| policy.json | the policy fitted to a budget |
| sample.txt | text of a language model |
"""

import copy
import itertools
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import brevact
from recipes import files, plots
from recipes.errors import RecipeError
from recipes.metrics import Metric
from recipes.models import Layers
from recipes.quantizers import find_quantizers
from recipes.recipe import BatchSource, Recipe
from recipes.settings import Settings
from recipes.training import Objective, Trainer

CHECKPOINT = "checkpoint.pt"
HISTORY = "history.csv"
POLICY = "policy.json"
SUMMARY = "summary.json"
COMPARISON = "comparison.json"
_RESULTS = (
    CHECKPOINT,
    HISTORY,
    SUMMARY,
    POLICY,
    "history.png",
    "memory.csv",
    "memory.png",
    COMPARISON,
    "comparison.csv",
    "comparison.png",
    "sample.txt",
)
MIB = 2**20
_FITTED_ON = 12
"""Batches."""


@dataclass(frozen=True)
class Result:
    """A run so far.

    Attributes:
        label: its name in tables and plots.
        metric: compares it with others.
        history: one dictionary of `columns(metric)` an epoch; losses are in nats, `seconds` are those of training.
        saved_bytes: bytes that one training batch stores for backward.
        plain_bytes: the same without backward quantization.
    """

    label: str
    metric: Metric
    history: list[dict[str, float]]
    saved_bytes: int
    plain_bytes: int

    @property
    def final(self) -> float:
        return self.history[-1][f"test_{self.metric.name}"]

    @property
    def best(self) -> float:
        return self.metric.best(row[f"test_{self.metric.name}"] for row in self.history)

    @property
    def times_less(self) -> float:
        return self.plain_bytes / self.saved_bytes

    @property
    def seconds_per_epoch(self) -> float:
        return sum(row["seconds"] for row in self.history) / len(self.history)


def columns(metric: Metric) -> tuple[str, ...]:
    scores = ("train_loss", f"train_{metric.name}", "test_loss", f"test_{metric.name}")
    return ("epoch", "lr", *scores, "seconds", "saved_mib")


def train(recipe: Recipe, settings: Settings, data: Any, folder: Path, *, resume: bool = False) -> Result:
    """Trains with `settings` and leaves all results in `folder`, complete after every epoch.

    Args:
        recipe: which kind of run it is.
        settings: of the run; those of its checkpoint when it is resumed.
        data: the recipe's data for them.
        folder: made if it is missing.
        resume: continue from the checkpoint in `folder`; otherwise a run that is in it is replaced.

    Returns:
        The finished run.

    Raises:
        RecipeError: something that the user can put right.
    """
    if resume:
        saved_settings(recipe, folder).resumed(asdict(settings))  # refuses a checkpoint of other settings
    device = settings.torch_device()
    torch.manual_seed(settings.seed)
    objective = build_objective(recipe, settings, data).to(device)
    train_batches, test_batches = recipe.make_batches(settings, data, device)
    if recipe.prepare is not None:
        recipe.prepare(objective.model, settings, train_batches)
    trainer = Trainer(objective, settings, device, len(train_batches))
    folder.mkdir(parents=True, exist_ok=True)
    policy = _fitted(trainer, settings, train_batches, folder / POLICY, resume=resume)
    if settings.adapt_every is not None:
        trainer.adapt(next(train_batches.epoch()), settings.adapt_every)
    with_loss = recipe.quantize_loss or policy is not None
    report = _measure_memory(trainer, train_batches, with_loss=with_loss, is_reference=settings.is_reference)
    result = Result(settings.label, recipe.metric, [], report.saved_bytes, report.plain_bytes)
    if resume:
        result.history.extend(_restore(trainer, folder / CHECKPOINT, recipe.metric))
        _write_results(folder, settings, result, trainer)
    else:
        clear_results(folder)
    if policy is not None:
        files.write_path_atomically(folder / POLICY, policy.save)
    files.write_path_atomically(folder / "memory.csv", report.to_csv)
    files.write_path_atomically(folder / "memory.png", report.plot)
    tqdm.write(
        f"{settings.label}: {report.saved_bytes / MIB:.2f} of {report.plain_bytes / MIB:.2f} MiB stored for backward"
    )
    steps = len(train_batches)
    bar = tqdm(total=settings.epochs * steps, initial=len(result.history) * steps, desc=settings.label, disable=None)
    with bar:
        for epoch in range(len(result.history) + 1, settings.epochs + 1):
            row = _run_epoch(trainer, epoch, (train_batches, test_batches), recipe.metric, bar.update)
            result.history.append(row | {"saved_mib": result.saved_bytes / MIB})
            state = {"settings": asdict(settings), "history": result.history, "trainer": trainer.state_dict()}
            files.write_checkpoint(folder / CHECKPOINT, state)
            _write_results(folder, settings, result, trainer)
            tqdm.write(_line(settings, recipe.metric, row))
    if recipe.finish is not None:
        recipe.finish(trainer.model, settings, data, folder)
    return result


def build_objective(recipe: Recipe, settings: Settings, data: Any) -> Objective:
    """The model of a run and its loss, with their forward and backward quantizers."""
    weight_quant, input_quant, act_quant = find_quantizers(settings)
    forward_quantized = weight_quant is not None or input_quant is not None
    layers = Layers(weight_quant, input_quant) if forward_quantized else recipe.layers
    objective = Objective(recipe.build_model(settings, data, layers), settings.label_smoothing)
    if act_quant is not None:
        brevact.quantize_backward(objective if recipe.quantize_loss else objective.model, act_quant)
    return objective


def _fitted(
    trainer: Trainer, settings: Settings, batches: BatchSource, path: Path, *, resume: bool
) -> brevact.Policy | None:
    """Gives the model and its loss the policy of a budget: one that is fitted, or that the run began with.

    Args:
        trainer: of a model without a policy.
        settings: of the run.
        batches: for training; the policy is fitted on the first ones.
        path: of the policy of a run to resume.
        resume: whether there is one.

    Returns:
        The policy; None for a run without a budget.

    Raises:
        RecipeError: the budget is not possible, or there is no such policy.
    """
    if not settings.fit_arguments:
        return None
    try:
        if resume:
            policy = brevact.Policy.load(path)
        else:
            policy = trainer.fit(list(itertools.islice(batches.epoch(), _FITTED_ON)), settings.fit_arguments)
        brevact.quantize_backward(trainer.objective, policy)
    except (OSError, ValueError) as error:
        raise RecipeError(f"{settings.backward_name}: {error}") from error
    tqdm.write(str(policy.report))
    return policy


def saved_settings(recipe: Recipe, folder: Path) -> Settings:
    path = folder / CHECKPOINT
    return recipe.settings.restored(files.read_checkpoint(path).get("settings"), path)


def holds_results(folder: Path) -> bool:
    """Whether `folder` holds results of a run or a comparison, complete or not."""
    return any((folder / name).exists() for name in (CHECKPOINT, HISTORY, SUMMARY, COMPARISON))


def clear_results(folder: Path) -> None:
    """Removes the files of an earlier run or comparison from `folder`, and no others."""
    for name in _RESULTS:
        (folder / name).unlink(missing_ok=True)


def _measure_memory(
    trainer: Trainer, batches: BatchSource, *, with_loss: bool, is_reference: bool
) -> brevact.MemoryReport:
    inputs, targets = next(batches.epoch())
    with trainer.autocast():
        model, batch = (trainer.objective, (inputs, targets)) if with_loss else (trainer.model, inputs)
        if is_reference:  # in full precision, without the default policy
            model = brevact.quantize_backward(copy.deepcopy(model), {"*": None})
        return brevact.memory_report(model, batch)


def _restore(trainer: Trainer, path: Path, metric: Metric) -> list[dict[str, float]]:
    """Puts the state of a checkpoint into `trainer` and returns the history."""
    state = files.read_checkpoint(path)
    try:
        history = [{column: row[column] for column in columns(metric)} for row in state["history"]]
        if not history:
            raise ValueError("it holds no epoch")
        trainer.load_state_dict(state["trainer"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RecipeError(f"{path} does not fit this run: {type(error).__name__} {reason}; start a new run") from error
    return history


def _run_epoch(
    trainer: Trainer,
    epoch: int,
    batches: tuple[BatchSource, BatchSource],
    metric: Metric,
    on_step: Callable[[], object],
) -> dict[str, float]:
    train_batches, test_batches = batches
    lr = trainer.lr
    start = time.perf_counter()
    trained = trainer.train_epoch(train_batches, epoch, on_step)
    seconds = time.perf_counter() - start
    tested = trainer.evaluate(test_batches)
    return {
        "epoch": epoch,
        "lr": lr,
        "train_loss": trained.loss,
        f"train_{metric.name}": metric.of(trained),
        "test_loss": tested.loss,
        f"test_{metric.name}": metric.of(tested),
        "seconds": seconds,
    }


def _write_results(folder: Path, settings: Settings, result: Result, trainer: Trainer) -> None:
    metric, device, adaptive = result.metric, trainer.device, trainer.adaptive
    files.write_rows(folder / HISTORY, columns(metric), result.history)
    files.write_json(
        folder / SUMMARY,
        {
            "finished": len(result.history) == settings.epochs,
            "epochs": len(result.history),
            "test_loss": result.history[-1]["test_loss"],
            f"test_{metric.name}": result.final,
            f"best_test_{metric.name}": result.best,
            "seconds_per_epoch": result.seconds_per_epoch,
            "saved_bytes": result.saved_bytes,
            "plain_bytes": result.plain_bytes,
            "policy": files.read_json(folder / POLICY) if settings.fit_arguments else None,
            "bit_widths": None if adaptive is None else adaptive.bit_widths,
            "peak_cuda_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "brevitas")},
            "settings": asdict(settings),
        },
    )
    plots.plot_history(folder / "history.png", result.label, metric, result.history)


def _line(settings: Settings, metric: Metric, row: dict[str, float]) -> str:
    train, test = (
        f"{split} {row[f'{split}_loss']:.3f} {format(row[f'{split}_{metric.name}'], metric.spec)}"
        for split in ("train", "test")
    )
    return f"{settings.label}  epoch {row['epoch']}/{settings.epochs}  {train}  {test}  {row['seconds']:.1f} s"
