"""A potential that learns energies and forces of Lennard-Jones clusters: gradients that are differentiated again.

    python -m recipes.forces --policies 'DitherBackward4bit+*basis=None' DEFAULT --seeds 0 1 2

makes clusters of two kinds of particles on the spot (`recipes/data/lennard_jones.py` has the potential and its source),
and trains a small SchNet at full precision and with each policy, from the same weights and on the same batches for each
seed. Forces are gradients of the energy, and the loss differentiates them again (`create_graph=True`), which takes
`double_backward=True`. The table has mean absolute errors on clusters that were not trained on, in units of eps a
particle and of eps over sigma, and the difference of a policy's force error from that of full precision, seed by seed.

Each run is a row of forces.csv when it ends. An interrupted command goes on where it stopped if it is given again with
`--resume`, and ends in the weights of an uninterrupted one.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import brevact
from brevact.command_line.launcher import restart_with_mimalloc
from recipes import files, machine, schedules
from recipes.data.lennard_jones import Configurations, make_configurations
from recipes.errors import RecipeError
from recipes.folders import open_folder
from recipes.models.schnet import SchNet
from recipes.options import option, torch_device
from recipes.plots import curves_of, plot_seeds
from recipes.policy_names import NamedPolicy, named_policy
from recipes.runs import MIB

FULL_PRECISION = "None"
#: Forces have a large part of their noise from what stands for distances.
POLICY = "DitherBackward4bit+*basis=None"
ROWS, EPOCHS, PICTURE, CHECKPOINT = ("forces.csv", "epochs.csv", "forces.png", "checkpoint.pt")
COLUMNS = (
    *("policy", "seed", "energy_error", "force_error", "saved_mib", "plain_mib", "seconds"),
    *machine.COLUMNS,
)
COLUMNS_OF_EPOCHS = ("policy", "seed", "epoch", "loss", "energy_error", "force_error", "seconds")
_TEST_SEED = 2**20  # of the clusters, which are those of no run's training

Row = dict[str, object]


@dataclass(frozen=True)
class ForceSettings:
    """What decides the result of a run, but for its policy and its seed."""

    side: int
    train_size: int
    test_size: int
    width: int
    interactions: int
    epochs: int
    batch_size: int
    lr: float
    energy_weight: float
    device: str

    def __post_init__(self) -> None:
        least = {"side": 2, "train_size": self.batch_size, "test_size": 1, "width": 2, "interactions": 1}
        for name, value in {"batch_size": 1, "epochs": 1, **least}.items():
            if getattr(self, name) < value:
                raise RecipeError(f"{option(name)} {getattr(self, name)} is not possible: use at least {value}")
        if self.side > 8:
            raise RecipeError(
                f"--side {self.side} is not possible: all of {self.side**3} particles are neighbours of each other; "
                "use 8 at most"
            )
        for name in ("lr", "energy_weight"):
            if not getattr(self, name) > 0:
                raise RecipeError(f"{option(name)} {getattr(self, name)} is not possible: use a value above 0")


class ForceLoss(nn.Module):
    """A potential and the loss it trains with: (F - F*)^2 / s^2 + weight (E - E*)^2 / (s^2 N), s the scale of forces.

    Args:
        potential: on its device already.
        energy_weight: of energies beside forces.
    """

    def __init__(self, potential: SchNet, energy_weight: float) -> None:
        super().__init__()
        self.potential = potential
        self.energy_weight = energy_weight

    def forward(self, batch: Configurations) -> Tensor:
        energies, forces = self.potential(batch.kinds, batch.positions)
        scale = self.potential.scale**2
        of_energies = F.mse_loss(energies, batch.energies) / batch.kinds.shape[1]
        return (F.mse_loss(forces, batch.forces) + self.energy_weight * of_energies) / scale


class Run:
    """The training of one potential, by a policy and a seed.

    Args:
        settings: of the run.
        policy: of what is stored for backward.
        seed: of weights, training clusters, batches and random rounding.
        data: clusters for training and for testing, on their device.
    """

    def __init__(
        self, settings: ForceSettings, policy: NamedPolicy, seed: int, data: tuple[Configurations, Configurations]
    ) -> None:
        self.settings, self.policy, self.seed = settings, policy, seed
        self.train, self.test = data
        torch.manual_seed(seed)
        particles = self.train.kinds.shape[1]
        potential = SchNet(
            *(2, settings.width, settings.interactions),
            energy=float(self.train.energies.mean()) / particles,
            scale=float(self.train.forces.square().mean().sqrt()),
        ).to(self.train.kinds.device)
        self.loss = ForceLoss(potential, settings.energy_weight)
        if policy.source is not None:
            brevact.quantize_backward(self.loss, policy.source, **{**policy.settings, "double_backward": True})
        self.optimizer = torch.optim.Adam(potential.parameters(), lr=settings.lr)
        total = settings.epochs * (len(self.train) // settings.batch_size)
        self.scheduler = schedules.cosine(self.optimizer, total)
        self.epochs: list[Row] = []

    def stored(self) -> tuple[float, float]:
        """MiB that a step stores behind its first backward pass, and those of full precision."""
        batch = self.train.at(slice(0, self.settings.batch_size))
        report = brevact.memory_report(self.loss, (batch,))
        plain = report.plain_bytes / MIB
        return plain if self.policy.source is None else report.saved_bytes / MIB, plain

    def train_epoch(self, bar: tqdm) -> None:
        """Takes a step for each batch, measures, and adds a row to `epochs`."""
        number, start, losses = len(self.epochs) + 1, time.perf_counter(), []
        self.loss.train()
        for batch in self.train.batches(self.settings.batch_size, seed=1000 * self.seed + number):
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.loss(batch)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.detach())
            bar.update()
        mean, seconds = float(torch.stack(losses).mean()), time.perf_counter() - start
        if not mean < float("inf"):
            raise RecipeError(f"the training loss became {mean} in epoch {number}; try a smaller --lr")
        energy, force = self.errors()
        names = {"policy": self.policy.name, "seed": self.seed, "epoch": number, "loss": mean}
        self.epochs.append({**names, "energy_error": energy, "force_error": force, "seconds": seconds})

    def errors(self) -> tuple[float, float]:
        """Mean absolute errors on the test clusters: of energies a particle, and of forces in each direction."""
        self.loss.eval()
        energy = force = 0.0
        for batch in self.test.batches(self.settings.batch_size):
            energies, forces = self.loss.potential(batch.kinds, batch.positions)
            energy += float((energies.detach() - batch.energies).abs().sum()) / batch.kinds.shape[1]
            force += float((forces - batch.forces).abs().sum()) / batch.forces[0].numel()
        return energy / len(self.test), force / len(self.test)

    def state_dict(self) -> dict[str, object]:
        """All that the next epoch depends on."""
        parts = {"loss": self.loss, "optimizer": self.optimizer, "scheduler": self.scheduler}
        state: dict[str, object] = {name: part.state_dict() for name, part in parts.items()}
        state |= {"policy": self.policy.name, "seed": self.seed, "epochs": self.epochs}
        if self.train.kinds.is_cuda:
            state["cuda_generator"] = torch.cuda.get_rng_state()
        return {**state, "generator": torch.get_rng_state(), "noise_count": brevact.noise_count()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Goes on from a `state_dict` of a run with the same settings."""
        for name, part in {"loss": self.loss, "optimizer": self.optimizer, "scheduler": self.scheduler}.items():
            part.load_state_dict(state[name])
        self.epochs = list(state["epochs"])
        brevact.noise_count(state["noise_count"])
        torch.set_rng_state(state["generator"])
        if "cuda_generator" in state:
            torch.cuda.set_rng_state(state["cuda_generator"])


def train(settings: ForceSettings, policies: Sequence[NamedPolicy], seeds: Sequence[int], folder: Path) -> list[Row]:
    """Trains each policy with each seed, those that the folder has already left out.

    Args:
        settings: of all runs.
        policies: full precision first.
        seeds: of the runs.
        folder: receives a row a run, a row an epoch, and the checkpoint of the run that goes on.

    Returns:
        The rows of all runs, with the keys `COLUMNS`.
    """
    device = torch_device(settings.device)
    test = make_configurations(settings.test_size, settings.side, _TEST_SEED).to(device)
    rows, epochs = (files.read_rows(path) if (path := folder / name).exists() else [] for name in (ROWS, EPOCHS))
    done = {(row["policy"], int(row["seed"])) for row in rows}
    steps = settings.epochs * (settings.train_size // settings.batch_size)
    for seed in seeds:
        data = make_configurations(settings.train_size, settings.side, seed).to(device), test
        for policy in policies:
            if (policy.name, seed) in done:
                continue
            run = Run(settings, policy, seed, data)
            saved, plain = run.stored()
            torch.manual_seed(seed)  # of random rounding
            _go_on(run, folder)
            label = f"{_label(policy.name)}, seed {seed}"
            with tqdm(total=steps, initial=steps // settings.epochs * len(run.epochs), desc=label, disable=None) as bar:
                while len(run.epochs) < settings.epochs:
                    run.train_epoch(bar)
                    files.write_checkpoint(folder / CHECKPOINT, run.state_dict())
            last = run.epochs[-1]
            tqdm.write(f"{label}: energy {last['energy_error']:.4f}, force {last['force_error']:.3f}")
            seconds = sum(row["seconds"] for row in run.epochs)
            rows.append({**{name: last.get(name) for name in COLUMNS[:4]}, "seconds": seconds})
            rows[-1] |= {"saved_mib": saved, "plain_mib": plain, **machine.place(device)}
            epochs += run.epochs
            files.write_rows(folder / EPOCHS, COLUMNS_OF_EPOCHS, epochs)
            files.write_rows(folder / ROWS, COLUMNS, rows)
            (folder / CHECKPOINT).unlink()
    wanted = {(policy.name, seed) for policy in policies for seed in seeds}
    curves = curves_of(epochs, "policy", "force_error", wanted)
    title = "SchNet on Lennard-Jones clusters"
    labelled = {_label(name): values for name, values in curves.items()}
    plot_seeds(folder / PICTURE, labelled, title=title, ylabel="test force error", yscale="log")
    return [row for row in rows if (row["policy"], int(row["seed"])) in wanted]


def _go_on(run: Run, folder: Path) -> None:
    """Loads the checkpoint of a folder, if it is of this run."""
    if (folder / CHECKPOINT).exists():
        state = files.read_checkpoint(folder / CHECKPOINT)
        if (state.get("policy"), state.get("seed")) == (run.policy.name, run.seed):
            run.load_state_dict(state)


def _label(policy: str) -> str:
    return "full precision" if policy == FULL_PRECISION else policy


def table(rows: Sequence[Row]) -> str:
    """Errors of each policy: means over the seeds, and differences of the same seed from full precision, ± se."""
    by_policy: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_policy.setdefault(str(row["policy"]), {})[int(row["seed"])] = row
    width = max(len(_label(name)) for name in by_policy)
    lines = [f"{'':{width}}  energy error  force error  force - full precision  stored for backward  s/run"]
    for name, own in by_policy.items():
        energy, force, saved, plain, seconds = (
            statistics.mean(float(row[column]) for row in own.values()) for column in COLUMNS[2:7]
        )
        differences = [
            float(row["force_error"]) - float(by_policy[FULL_PRECISION][seed]["force_error"])
            for seed, row in own.items()
        ]
        text = ""
        if name != FULL_PRECISION:
            text = f"{statistics.mean(differences):+.4f}"
            if len(differences) > 1:
                text += f" ± {statistics.stdev(differences) / len(differences) ** 0.5:.4f}"
        less = f" ({plain / saved:.1f}x less)" if saved < plain else ""
        lines.append(
            f"{_label(name):{width}}  {energy:12.4f}  {force:11.4f}  {text:>22}  {f'{saved:.1f} MiB{less}':>19}  "
            f"{seconds:5.0f}"
        )
    return "\n".join(lines)


def run(options: argparse.Namespace) -> None:
    """Trains, prints the table and says where the files are.

    Args:
        options: of the command line.

    Raises:
        RecipeError: something that the user can put right.
    """
    settings = ForceSettings(**{name: getattr(options, name) for name in ForceSettings.__dataclass_fields__})
    folder = options.out_dir
    content = {name: getattr(settings, name) for name in ForceSettings.__dataclass_fields__ if name != "device"}
    open_folder(folder, content, resume=options.resume)
    policies = [named_policy(FULL_PRECISION), *options.policies]
    unique = {policy.name: policy for policy in policies}
    rows = train(settings, list(unique.values()), list(dict.fromkeys(options.seeds)), folder)
    print(table(rows))
    print(f"files are in {folder}")


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
        print("\nstopped; every finished epoch is kept, and --resume goes on after it", file=sys.stderr)
        return 130
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m recipes.forces", description=__doc__, formatter_class=formatter)
    parser.add_argument("--policies", nargs="+", type=named_policy, default=[named_policy(POLICY)], metavar="POLICY")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="a run of each policy for each of them")
    parser.add_argument("--side", type=int, default=3, help="particles along an edge of a cluster (default: 3)")
    parser.add_argument("--train-size", type=int, default=512, help="clusters to train on (default: %(default)s)")
    parser.add_argument("--test-size", type=int, default=128, help="clusters to test on (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="features of a particle (default: %(default)s)")
    parser.add_argument("--interactions", type=int, default=3, help="blocks of the SchNet (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the clusters (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="clusters in a step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="largest rate of Adam (default: %(default)s)")
    parser.add_argument("--energy-weight", type=float, default=1.0, help="of energies beside forces (default: 1)")
    parser.add_argument("--device", default="auto", help="torch device; auto takes CUDA where there is one")
    parser.add_argument("--out-dir", type=Path, default=Path("runs/forces"))
    parser.add_argument("--resume", action="store_true", help="go on with the runs in the folder")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
