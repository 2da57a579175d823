"""A trained ResNet-20 whose batch norms go over to few levels: accuracy at once, and after fine-tuning.

    python -m recipes.retrofit --dataset cifar10 --data-dir data --epochs 30 --fine-tune-epochs 5

trains at full precision, or takes `--pretrained FILE`; then, for each of `--formats`, lets all batch norms (or all but
the first) compute their output from quantized normalized values, measures, fine-tunes and measures again. Such a norm
stores codes of 4 or 5 bits an element and nothing else, exactly what its forward pass used. `--act-quant` names a
backward quantizer for all that other layers keep, whose forward passes stay as they are.

Source: B. Graham, arXiv:1702.08231, section 2.4, where DenseNets and a ResNet-18 for ImageNet are fine-tuned.
"""

import argparse
import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

import brevact
from brevact.command_line.launcher import restart_with_mimalloc
from recipes import files
from recipes.data import LOADERS, Batches, ImageDataset
from recipes.errors import RecipeError
from recipes.images import ImageSettings, load_data, make_batches
from recipes.models import ResNet20
from recipes.quantizers import backward_quantizer
from recipes.runs import MIB
from recipes.settings import Settings
from recipes.training import Objective, Trainer

SCOPES = ("all", "all-but-first")
COLUMNS = ("norms", "scope", "accuracy", "fine_tuned_accuracy", "saved_mib", "plain_mib")
WEIGHTS = "full-precision.pt"

Row = dict[str, object]


@dataclass(frozen=True)
class Plan:
    """What to do to the trained model.

    Args:
        formats: of the norms: L2, ..., O4.
        scopes: which norms go over; see `SCOPES`.
        fine_tune: settings of the fine-tuning.
        act_quant: backward quantizer of the other layers, or None.
    """

    formats: tuple[str, ...]
    scopes: tuple[str, ...]
    fine_tune: Settings
    act_quant: str | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit status: 0, 2 for what the user can put right, 130 when stopped."""
    options = _parse(arguments)
    if arguments is None:
        restart_with_mimalloc()
    try:
        run(options)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    return 0


def run(options: argparse.Namespace) -> None:
    """Trains or loads, retrofits, prints a table and writes retrofit.csv.

    Args:
        options: of the command line.

    Raises:
        RecipeError: something that the user can put right.
    """
    settings = _settings(options, options.epochs, options.lr, warmup=min(1.0, options.epochs / 4))
    fine_tune = _settings(options, options.fine_tune_epochs, options.fine_tune_lr, warmup=0.0)
    plan = Plan(tuple(options.formats), tuple(options.scopes), fine_tune, options.act_quant)
    rules(nn.Sequential(nn.BatchNorm2d(1)), plan, plan.formats[0], "all")  # names a quantizer that is not known
    files.check_writable(options.out_dir)
    data = load_data(settings)
    device = settings.torch_device()
    torch.manual_seed(settings.seed)
    model = ResNet20(classes=data.classes, channels_in=data.channels).to(device)
    options.out_dir.mkdir(parents=True, exist_ok=True)
    batches = make_batches(settings, data, device)
    if options.pretrained is None:
        _train(model, settings, batches, "full precision")
        files.write_checkpoint(options.out_dir / WEIGHTS, model.state_dict())
    else:
        _load(model, options.pretrained)
    rows = retrofit(model, data, plan, settings)
    files.write_rows(options.out_dir / "retrofit.csv", COLUMNS, rows)
    print(table(rows))
    print(f"files are in {options.out_dir}")


def retrofit(model: nn.Module, data: ImageDataset, plan: Plan, settings: Settings) -> list[Row]:
    """Accuracies of a trained model as it is, and with its norms quantized, before and after fine-tuning.

    Args:
        model: trained; it is left as it is.
        data: the images.
        plan: what to do.
        settings: of the batches on which bytes are measured.

    Returns:
        Rows with the keys `COLUMNS`, full precision first.
    """
    device = next(model.parameters()).device
    batches = make_batches(settings, data, device)
    exact = brevact.quantize_backward(copy.deepcopy(model), {"*": None})
    rows = [_measured(exact, plan, batches, {"norms": "full precision", "scope": ""}, tune=False)]
    for name in plan.formats:
        for scope in plan.scopes:
            changed = brevact.quantize_backward(copy.deepcopy(model), rules(model, plan, name, scope))
            rows.append(_measured(changed, plan, batches, {"norms": name, "scope": scope}, tune=True))
    return rows


def rules(model: nn.Module, plan: Plan, name: str, scope: str) -> dict[object, type | None]:
    """The policy of `brevact.quantize_backward` for a format and a scope.

    Args:
        model: whose first batch norm may be left out.
        plan: names the quantizer of other layers.
        name: of the format.
        scope: one of `SCOPES`.

    Returns:
        Its rules.

    Raises:
        RecipeError: a quantizer is not known.
    """
    norm = backward_quantizer(f"{name}ForwardBackward", (), "save_quantized")
    other = backward_quantizer(plan.act_quant, (), "save_quantized") if plan.act_quant else None
    others = other.rules if isinstance(other, brevact.Policy) else {} if other is None else {"*": other}
    first = next(key for key, module in model.named_modules() if isinstance(module, nn.BatchNorm2d))
    left_out = {first: others.get("*")} if scope == "all-but-first" else {}
    return {**left_out, nn.BatchNorm2d: norm, **others}


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    lines = [f"{'batch norms':28}  accuracy  fine-tuned  stored for backward"]
    for row in rows:
        tuned = row["fine_tuned_accuracy"]
        lines.append(
            f"{row['norms']} {row['scope']:{27 - len(str(row['norms']))}}  {row['accuracy']:8.2%}  "
            f"{format(tuned, '10.2%') if tuned != '' else '':10}  {row['saved_mib']:.2f} of {row['plain_mib']:.2f} MiB"
        )
    return "\n".join(lines)


def _measured(model: nn.Module, plan: Plan, batches: tuple[Batches, Batches], row: Row, *, tune: bool) -> Row:
    train_batches, test_batches = batches
    images, _ = next(iter(train_batches.epoch(1)))
    report = brevact.memory_report(copy.deepcopy(model), images)
    trainer = Trainer(
        Objective(model, plan.fine_tune.label_smoothing), plan.fine_tune, images.device, len(train_batches)
    )
    accuracy = trainer.evaluate(test_batches).accuracy
    tuned: float | str = ""
    if tune:
        label = f"{row['norms']} {row['scope']}"
        tuned = _train(model, plan.fine_tune, batches, label)
    saved, plain = report.saved_bytes / MIB, report.plain_bytes / MIB
    return {**row, "accuracy": accuracy, "fine_tuned_accuracy": tuned, "saved_mib": saved, "plain_mib": plain}


def _train(model: nn.Module, settings: Settings, batches: tuple[Batches, Batches], label: str) -> float:
    """Train, with a progress bar, and return the test accuracy."""
    train_batches, test_batches = batches
    trainer = Trainer(
        Objective(model, settings.label_smoothing), settings, next(model.parameters()).device, len(train_batches)
    )
    with tqdm(total=settings.epochs * len(train_batches), desc=label, disable=None) as bar:
        for epoch in range(1, settings.epochs + 1):
            trainer.train_epoch(train_batches, epoch, bar.update)
            accuracy = trainer.evaluate(test_batches).accuracy
            tqdm.write(f"{label}: epoch {epoch}/{settings.epochs}, test {accuracy:.2%}")
    return accuracy


def _load(model: nn.Module, path: Path) -> None:
    try:
        model.load_state_dict(files.read_checkpoint(path))
    except RuntimeError as error:
        raise RecipeError(
            f"--pretrained {path} does not hold a ResNet-20 for this data set ({str(error).splitlines()[0]}); it takes "
            f"the {WEIGHTS} of an earlier run"
        ) from error


def _settings(options: argparse.Namespace, epochs: int, lr: float, warmup: float) -> ImageSettings:
    names = ("dataset", "data_dir", "train_size", "test_size", "batch_size", "seed", "device")
    shared = {name: getattr(options, name) for name in names}
    return ImageSettings(**shared, epochs=epochs, lr=lr, warmup_epochs=warmup, weight_decay=5e-4, label_smoothing=0.0)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m recipes.retrofit", description=__doc__, formatter_class=formatter)
    parser.add_argument("--dataset", choices=tuple(LOADERS), default="cifar10")
    parser.add_argument("--data-dir", default="data", help="folder that holds the data set; digits needs none")
    parser.add_argument("--train-size", type=int, help="train on this many images only")
    parser.add_argument("--test-size", type=int, help="test on this many images only")
    parser.add_argument(
        "--formats", nargs="+", choices=[f.value for f in brevact.NormalizedFormat], default=["L4", "L5"]
    )
    parser.add_argument("--scopes", nargs="+", choices=SCOPES, default=list(SCOPES), help="which batch norms go over")
    parser.add_argument("--act-quant", help="backward quantizer of the other layers, such as StochBackward2bit")
    parser.add_argument("--pretrained", type=Path, metavar="FILE", help=f"{WEIGHTS} of an earlier run")
    parser.add_argument("--epochs", type=int, default=30, help="of training at full precision (default: %(default)s)")
    parser.add_argument("--fine-tune-epochs", type=int, default=5, help="for each row (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="largest rate of AdamW (default: %(default)s)")
    parser.add_argument(
        "--fine-tune-lr", type=float, default=5e-4, help="the same of fine-tuning (default: %(default)s)"
    )
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="torch device; auto takes CUDA where there is one")
    parser.add_argument("--out-dir", type=Path, default=Path("runs/retrofit"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
