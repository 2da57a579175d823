"""EfficientNetV2 with 2 bits an activation for backward: the nano size learns digits as well, in 15 times fewer bytes.

    python -m recipes.efficientnetv2 --compare StochBackward2bit

trains the nano size on scikit-learn's digits twice, with and without, and gave for --seed 0, 1, 2

    full precision     98.6 %  98.9 %  99.7 %   33.5 MiB stored for backward
    StochBackward2bit  99.4 %  99.4 %  99.7 %    2.2 MiB (15.1x less)

of 360 test images (three of them are 0.8 %), after 8 epochs in batches of 32; a step took about 1.6 times as long as at
full precision, on two CPU cores. Larger models and data sets were not part of this measurement.

The S size with the settings of J. Li, master's thesis, Heidelberg University, 2025, section 6.3 (AdamW, learning rate
0.001, 50 epochs, batches of 128), on CIFAR-10, CIFAR-100 or Tiny ImageNet:

    python -m recipes.efficientnetv2 --dataset cifar10 --model s --act-quant StochBackward2bit \\
        --epochs 50 --batch-size 128 --lr 1e-3 --clip-grad-norm 1
    python -m recipes.efficientnetv2 --dataset tiny-imagenet --model s --act-quant StochBackward2bit \\
        --schedule onecycle --warmup-epochs 15 --epochs 50 --batch-size 128 --lr 1e-3 --clip-grad-norm 1 --amp bf16

Forward quantizers of Brevitas beside a backward one with smaller buckets:

    python -m recipes.efficientnetv2 --weight-quant Int8WeightPerTensorFloat --input-quant Int8ActPerTensorFloat \\
        --act-quant StochBackward4bit --act-override bucket_size=256

An interrupted run or comparison goes on with `--resume DIR`, and ends in the weights of an uninterrupted one.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.comparison import FULL_PRECISION, begin, begun, compare, make_cases
from recipes.errors import RecipeError
from recipes.files import check_writable
from recipes.quantizers import find_quantizers
from recipes.runs import COMPARISON, MIB, holds_results, load_data, saved_settings, train
from recipes.settings import Command, Settings, parse

PROG = "python -m recipes.efficientnetv2"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit status: 0, 2 for what the user can put right, 130 when stopped."""
    try:
        run(parse(arguments, prog=PROG, description=__doc__))
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; every finished epoch is kept, and --resume DIR goes on after it", file=sys.stderr)
        return 130
    return 0


def run(command: Command) -> None:
    """Trains what the command asks for, prints the outcome and says where the files are.

    Args:
        command: the parsed command line.

    Raises:
        RecipeError: something that the user can put right.
    """
    resume = command.resume is not None
    settings, quantizers = resumed(command) if resume else (Settings(**command.given), command.compare)
    folder = command.resume or command.out_dir or default_folder(settings, quantizers)
    if quantizers is None:
        check_settings(settings)
        check_folder(folder, command)
        result = train(settings, load_data(settings), folder, resume=resume)
        print(f"test accuracy {result.accuracy:.2%}, {result.saved_bytes / MIB:.2f} MiB stored for backward")
    else:
        cases = make_cases(settings, quantizers)
        for name, case in cases.items():
            check_settings(case)
            check_folder(folder / name, command)
        check_folder(folder, command)
        data = load_data(settings)
        if not resume:
            begin(settings, quantizers, folder)
        print(compare(cases, data, folder, resume=resume))
    print(f"files are in {folder}")


def resumed(command: Command) -> tuple[Settings, tuple[str, ...] | None]:
    """Settings of the run or the comparison in the folder to resume, and the quantizers that it compares.

    Args:
        command: with a folder to resume.

    Raises:
        RecipeError: the command line contradicts what is in the folder, or there is nothing that can be resumed.
    """
    folder, names = command.resume, command.compare
    if not (folder / COMPARISON).exists():
        if names is not None:
            raise RecipeError(f"{folder} holds no comparison (there is no {folder / COMPARISON}); start a new one")
        return saved_settings(folder).resumed(command.given), None
    settings, quantizers = begun(folder)
    if names is not None and names != quantizers:
        raise RecipeError(
            f"the comparison to resume was started with --compare {' '.join(quantizers)} (now {' '.join(names)}); "
            "leave the option out, or start a new one"
        )
    return settings.resumed(command.given), quantizers


def default_folder(settings: Settings, quantizers: Sequence[str] | None) -> Path:
    """The folder of a run or comparison that the command line gives none for, named after what it trains."""
    kind = "comparison" if quantizers else settings.act_quant or FULL_PRECISION
    name = "-".join([settings.dataset, settings.model, kind, *settings.quantizer_changes])
    return Path("runs") / re.sub(r"[^\w.,=+-]+", "_", name)


def check_settings(settings: Settings) -> None:
    """Finds out before any training whether the quantizers and the device can be used."""
    find_quantizers(settings)
    settings.torch_device()


def check_folder(folder: Path, command: Command) -> None:
    """Finds out before any training whether results can be written to a folder, and whether they may."""
    check_writable(folder)
    if command.resume is None and not command.overwrite and holds_results(folder):
        raise RecipeError(f"{folder} already holds a run; continue it with --resume, or replace it with --overwrite")


if __name__ == "__main__":
    sys.exit(main())
