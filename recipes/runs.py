"""A training run in a folder of its own: what it writes after each epoch, and how it is continued.

| file | content |
|---|---|
| history.csv | one row an epoch |
| summary.json | settings, versions, final and best accuracy, stored bytes |
| checkpoint.pt | all that the next epoch depends on |
| memory.csv, memory.png | what each layer stores for backward |
| accuracy.png | accuracy over the epochs |
"""

import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

import brevact
from recipes import files, plots
from recipes.data import LOADERS, Batches, ImageDataset
from recipes.errors import RecipeError
from recipes.models import Layers, efficientnetv2
from recipes.quantizers import find_quantizers
from recipes.settings import Settings
from recipes.training import Trainer

CHECKPOINT = "checkpoint.pt"
HISTORY = "history.csv"
SUMMARY = "summary.json"
COMPARISON = "comparison.json"
_RESULTS = (
    CHECKPOINT,
    HISTORY,
    SUMMARY,
    "accuracy.png",
    "memory.csv",
    "memory.png",
    COMPARISON,
    "comparison.csv",
    "comparison.png",
)
COLUMNS = ("epoch", "lr", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "seconds", "saved_mib")
MIB = 2**20


@dataclass(frozen=True)
class Result:
    """A run so far.

    Attributes:
        label: what tables and plots call it.
        history: one dictionary of `COLUMNS` an epoch; accuracies are in 0..1, `seconds` are those of training.
        saved_bytes: bytes that one training batch stores for backward.
        plain_bytes: the same without backward quantization.
    """

    label: str
    history: list[dict[str, float]]
    saved_bytes: int
    plain_bytes: int

    @property
    def accuracy(self) -> float:
        return self.history[-1]["test_accuracy"]

    @property
    def best_accuracy(self) -> float:
        return max(row["test_accuracy"] for row in self.history)

    @property
    def times_less(self) -> float:
        return self.plain_bytes / self.saved_bytes

    @property
    def seconds_per_epoch(self) -> float:
        return sum(row["seconds"] for row in self.history) / len(self.history)


def load_data(settings: Settings) -> ImageDataset:
    """The images that the settings name."""
    return LOADERS[settings.dataset](Path(settings.data_dir), settings.train_size, settings.test_size)


def train(settings: Settings, data: ImageDataset, folder: Path, *, resume: bool = False) -> Result:
    """Trains with `settings` and leaves all results in `folder`, complete after every epoch.

    Args:
        settings: of the run; those of its checkpoint when it is resumed.
        data: what `load_data` returns for them.
        folder: made if it is missing.
        resume: continue from the checkpoint in `folder`; otherwise a run that is in it is replaced.

    Returns:
        The finished run.

    Raises:
        RecipeError: something that the user can put right.
    """
    if resume:
        saved_settings(folder).resumed(asdict(settings))  # refuses a checkpoint of other settings
    device = settings.torch_device()
    torch.manual_seed(settings.seed)
    model = build_model(settings, data).to(device)
    train_batches, test_batches = make_batches(settings, data, device)
    trainer = Trainer(model, settings, device, len(train_batches))
    folder.mkdir(parents=True, exist_ok=True)
    report = _measure_memory(model, trainer, train_batches)
    result = Result(settings.label, [], report.saved_bytes, report.plain_bytes)
    if resume:
        result.history.extend(_restore(trainer, folder / CHECKPOINT))
        _write_results(folder, settings, result, device)
    else:
        clear_results(folder)
    files.write_path_atomically(folder / "memory.csv", report.to_csv)
    files.write_path_atomically(folder / "memory.png", report.plot)
    tqdm.write(
        f"{settings.label}: {report.saved_bytes / MIB:.2f} of {report.plain_bytes / MIB:.2f} MiB stored for backward"
    )
    steps = len(train_batches)
    bar = tqdm(total=settings.epochs * steps, initial=len(result.history) * steps, desc=settings.label, disable=None)
    with bar:
        for epoch in range(len(result.history) + 1, settings.epochs + 1):
            row = _run_epoch(trainer, epoch, train_batches, test_batches, bar.update)
            result.history.append(row | {"saved_mib": result.saved_bytes / MIB})
            state = {"settings": asdict(settings), "history": result.history, "trainer": trainer.state_dict()}
            files.write_checkpoint(folder / CHECKPOINT, state)
            _write_results(folder, settings, result, device)
            tqdm.write(_line(settings, row))
    return result


def build_model(settings: Settings, data: ImageDataset) -> nn.Module:
    """The model of a run, with its forward and backward quantizers, for the images of `data`."""
    weight_quant, input_quant, act_quant = find_quantizers(settings)
    model = efficientnetv2(
        settings.model,
        image_size=data.image_size,
        classes=data.classes,
        channels_in=data.channels,
        dropout=settings.dropout,
        stochastic_depth=settings.stochastic_depth,
        layers=Layers(weight_quant, input_quant),
    )
    return model if act_quant is None else brevact.quantize_backward(model, act_quant)


def make_batches(settings: Settings, data: ImageDataset, device: torch.device) -> tuple[Batches, Batches]:
    """Batches for training and for testing."""
    train_batches = Batches(
        data.train,
        data.normalization,
        settings.batch_size,
        device=device,
        train=True,
        augment=data.augment,
        seed=settings.seed,
    )
    return train_batches, Batches(data.test, data.normalization, settings.batch_size, device=device)


def saved_settings(folder: Path) -> Settings:
    """The settings of the run in `folder`."""
    path = folder / CHECKPOINT
    return Settings.restored(files.read_checkpoint(path).get("settings"), path)


def holds_results(folder: Path) -> bool:
    """Whether `folder` holds what a run or a comparison has found, were it only a part."""
    return any((folder / name).exists() for name in (CHECKPOINT, HISTORY, SUMMARY, COMPARISON))


def clear_results(folder: Path) -> None:
    """Removes the files of an earlier run or comparison from `folder`, and no others."""
    for name in _RESULTS:
        (folder / name).unlink(missing_ok=True)


def _measure_memory(model: nn.Module, trainer: Trainer, batches: Batches) -> brevact.MemoryReport:
    images, _ = next(batches.epoch())
    with trainer.autocast():
        return brevact.memory_report(model, images)


def _restore(trainer: Trainer, path: Path) -> list[dict[str, float]]:
    """Puts the state of a checkpoint into `trainer` and returns the history."""
    state = files.read_checkpoint(path)
    try:
        history = [{column: row[column] for column in COLUMNS} for row in state["history"]]
        if not history:
            raise ValueError("it holds no epoch")
        trainer.load_state_dict(state["trainer"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RecipeError(f"{path} does not fit this run: {type(error).__name__} {reason}; start a new run") from error
    return history


def _run_epoch(
    trainer: Trainer, epoch: int, train_batches: Batches, test_batches: Batches, on_step: Callable[[], object]
) -> dict[str, float]:
    lr = trainer.lr
    start = time.perf_counter()
    trained = trainer.train_epoch(train_batches, epoch, on_step)
    seconds = time.perf_counter() - start
    tested = trainer.evaluate(test_batches)
    return {
        "epoch": epoch,
        "lr": lr,
        "train_loss": trained.loss,
        "train_accuracy": trained.accuracy,
        "test_loss": tested.loss,
        "test_accuracy": tested.accuracy,
        "seconds": seconds,
    }


def _write_results(folder: Path, settings: Settings, result: Result, device: torch.device) -> None:
    files.write_rows(folder / HISTORY, COLUMNS, result.history)
    files.write_json(
        folder / SUMMARY,
        {
            "finished": len(result.history) == settings.epochs,
            "epochs": len(result.history),
            "test_accuracy": result.accuracy,
            "best_test_accuracy": result.best_accuracy,
            "seconds_per_epoch": result.seconds_per_epoch,
            "saved_bytes": result.saved_bytes,
            "plain_bytes": result.plain_bytes,
            "peak_cuda_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "brevitas")},
            "settings": asdict(settings),
        },
    )
    plots.plot_accuracy(folder / "accuracy.png", result.label, result.history)


def _line(settings: Settings, row: dict[str, float]) -> str:
    return (
        f"{settings.label}  epoch {row['epoch']}/{settings.epochs}  "
        f"train {row['train_loss']:.3f} {row['train_accuracy']:.1%}  "
        f"test {row['test_loss']:.3f} {row['test_accuracy']:.1%}  {row['seconds']:.1f} s"
    )
