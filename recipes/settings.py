"""The settings of a run, and the command line that gives them.

`Settings` holds every default; the parser leaves out options that were not given, so that a resumed run can take all
settings from its checkpoint and object to a contradiction.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import torch

from recipes.budgets import budget_of
from recipes.errors import RecipeError
from recipes.options import Limit, add_option, check_limits, option, setting, torch_device

SCHEDULES = ("cosine", "onecycle", "constant")
AMP_DTYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SAVE_MODES = ("save_quantized", "quantize_on_backward")


@dataclass(frozen=True)
class Settings:
    """Settings that decide the result of a run. Every field is a command-line option of the same name.

    A recipe adds fields of its own, and limits of them, in a subclass.
    """

    LIMITS: ClassVar[tuple[Limit, ...]] = (
        ("epochs", lambda value: value >= 1, "use at least 1"),
        ("noise", lambda value: value > 0, "use a value above 0, or leave it out"),
        ("adapt_every", lambda value: value >= 1, "use at least 1, or leave it out"),
        ("batch_size", lambda value: value >= 1, "use at least 1"),
        ("lr", lambda value: value > 0, "use a value above 0"),
        ("weight_decay", lambda value: value >= 0, "use 0 or more"),
        ("warmup_epochs", lambda value: value >= 0, "use 0 or more"),
        ("label_smoothing", lambda value: 0 <= value < 1, "use a value from 0 to below 1"),
        ("clip_grad_norm", lambda value: value > 0, "use a value above 0, or leave it out"),
        ("dropout", lambda value: 0 <= value < 1, "use a value from 0 to below 1"),
        ("stochastic_depth", lambda value: 0 <= value < 1, "use a value from 0 to below 1"),
        ("seed", lambda value: 0 <= value < 2**40, "use 0 to 2**40 - 1"),
    )
    #: How tables and plots call a run without a backward quantizer.
    REFERENCE: ClassVar[str] = "full precision"
    MAY_CHANGE_ON_RESUME: ClassVar[frozenset[str]] = frozenset({"data_dir", "device"})

    act_quant: str | None = setting(
        None, "backward quantizer of brevact, such as StochBackward2bit, or policy, such as DEFAULT"
    )
    act_override: tuple[str, ...] = setting(
        (), "setting of the backward quantizer, such as bucket_size=256; repeatable", action="append"
    )
    budget: str | None = setting(
        None,
        "in place of --act-quant: the policy of least gradient noise that stores 24x less, or 512MiB at most, or whose "
        "steps have a peak=2GiB at most",
    )
    noise: float | None = setting(
        None, "in place of --act-quant: the policy of least bytes with this much of the minibatch noise", type=float
    )
    adapt_every: int | None = setting(
        None, "steps from one measurement of the layers' sensitivities to the next; bits move, bytes stay", type=int
    )
    save_mode: str = setting("save_quantized", "when saved activations are quantized", choices=SAVE_MODES)
    weight_quant: str | None = setting(None, "forward weight quantizer of brevitas.quant: Int8WeightPerTensorFloat")
    input_quant: str | None = setting(None, "forward input quantizer of brevitas.quant: Int8ActPerTensorFloat")

    epochs: int = setting(8, "passes over the training data", type=int)
    batch_size: int = setting(32, "samples in a training step", type=int)
    lr: float = setting(3e-3, "largest learning rate of AdamW", type=float)
    weight_decay: float = setting(0.05, "decoupled weight decay; not for norms and biases", type=float)
    schedule: str = setting("cosine", "learning rate over the run", choices=SCHEDULES)
    warmup_epochs: float = setting(1.0, "epochs of linear warm-up (onecycle: of its rise)", type=float)
    label_smoothing: float = setting(0.05, "share of the target spread over all classes", type=float)
    clip_grad_norm: float | None = setting(None, "largest norm of all gradients together", type=float)
    dropout: float = setting(0.2, "dropout before the classifier", type=float)
    stochastic_depth: float = setting(0.0, "probability of dropping the last residual branch", type=float)
    amp: str = setting("off", "autocast to this type", choices=tuple(AMP_DTYPES))
    seed: int = setting(0, "of weights, batches, dropout and random rounding", type=int)
    captured: bool = setting(False, "replay the step as a CUDA graph, on a GPU", action="store_true")
    device: str = setting("auto", "torch device; auto takes CUDA where there is one")

    def __post_init__(self) -> None:
        check_limits(self, self.LIMITS)
        given = [name for name in ("act_quant", "budget", "noise") if getattr(self, name) is not None]
        if len(given) > 1:
            raise RecipeError(f"{' and '.join(map(option, given))} each say what is stored: leave all but one out")
        if self.budget is not None:
            budget_of(self.budget)
        if self.warmup_epochs >= self.epochs and self.schedule != "constant":
            raise RecipeError(
                f"--warmup-epochs {self.warmup_epochs:g} leaves nothing of --epochs {self.epochs}; use a smaller value"
            )

    @property
    def label(self) -> str:
        return self.REFERENCE if self.is_reference else " ".join([self.backward_name, *self.quantizer_changes])

    @property
    def is_reference(self) -> bool:
        """Whether there is no backward quantizer."""
        return self.act_quant is None and not self.fit_arguments

    @property
    def fit_arguments(self) -> dict[str, float]:
        """The budget that `brevact.fit` takes; empty where none is given."""
        if self.budget is not None:
            return budget_of(self.budget)
        return {} if self.noise is None else {"noise": self.noise}

    @property
    def backward_name(self) -> str:
        """The backward quantizer, or the budget of a fitted policy."""
        return self.act_quant or (f"fit {self.budget}" if self.budget is not None else f"fit noise={self.noise}")

    @property
    def reference_folder(self) -> str:
        """How folders of such a run are called."""
        return self.REFERENCE.replace(" ", "-")

    @property
    def quantizer_changes(self) -> tuple[str, ...]:
        """Differences from the backward quantizer of that name."""
        mode = (self.save_mode,) if self.save_mode != Settings.save_mode else ()
        adapted = () if self.adapt_every is None else (f"adapt_every={self.adapt_every}",)
        return (*self.act_override, *mode, *adapted)

    @classmethod
    def restored(cls, content: object, path: Path) -> "Settings":
        """Settings from the dictionary that `dataclasses.asdict` made of them."""
        names = {item.name for item in fields(cls)}
        if not isinstance(content, dict) or content.keys() != names:
            differing = sorted(map(str, content.keys() ^ names)) if isinstance(content, dict) else ["all"]
            raise RecipeError(
                f"{path} does not hold the settings of a run of this version (different: {', '.join(differing)}); "
                "start a new run"
            )
        try:
            return cls(**content | {"act_override": tuple(content["act_override"])})
        except TypeError as error:
            raise RecipeError(f"{path} holds settings of a wrong type ({error}); start a new run") from error

    def torch_device(self) -> torch.device:
        """The device to train on."""
        return torch_device(self.device)

    def resumed(self, given: dict[str, object]) -> "Settings":
        """These settings of a checkpoint, with the changes that a resumed run allows."""
        own = asdict(self)
        changed = {name: value for name, value in given.items() if own[name] != value}
        if wrong := sorted(changed.keys() - self.MAY_CHANGE_ON_RESUME):
            facts = ", ".join(f"{option(name)} {own[name]} (now {changed[name]})" for name in wrong)
            raise RecipeError(f"the run to resume was started with {facts}; leave the option out, or start a new run")
        return replace(self, **changed)


@dataclass(frozen=True)
class Command:
    """The request of a command line.

    Attributes:
        given: the settings named on it, by field of `Settings`.
        out_dir: folder of the run; None for one named after the settings.
        overwrite: whether a run that is already in that folder may be replaced.
        resume: folder of a run to continue.
        compare: backward quantizers to compare with full precision; None for a single run.
    """

    given: dict[str, object]
    out_dir: Path | None
    overwrite: bool
    resume: Path | None
    compare: tuple[str, ...] | None


def parse(
    arguments: Sequence[str] | None, *, prog: str, description: str, settings: type[Settings] = Settings
) -> Command:
    """Reads a command line."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    shared = {item.name for item in fields(Settings)}
    for item in sorted(fields(settings), key=lambda item: item.name in shared):
        add_option(parser, item)
    parser.add_argument("--out-dir", type=Path, default=None, help="folder of the run (default: runs/<its settings>)")
    parser.add_argument("--overwrite", action="store_true", default=False, help="replace a run that is already there")
    parser.add_argument("--resume", type=Path, default=None, metavar="DIR", help="continue the run in this folder")
    parser.add_argument(
        "--compare",
        nargs="+",
        default=None,
        metavar="NAME",
        help="train at full precision and with each of these (DEFAULT)",
    )
    given = vars(parser.parse_args(arguments))
    out_dir, overwrite, resume, compare = (given.pop(name) for name in ("out_dir", "overwrite", "resume", "compare"))
    if "act_override" in given:
        given["act_override"] = tuple(given["act_override"])
    if resume and (out_dir or overwrite):
        parser.error("--resume DIR continues in DIR: leave out --out-dir and --overwrite")
    for name in ("act_quant", "budget", "noise"):
        if compare and name in given:
            parser.error(f"--compare names the backward quantizers itself: leave out {option(name)}")
    return Command(given, out_dir, overwrite, resume, tuple(compare) if compare else None)
