"""Figures that pages may name, from the rows in `benchmarks/results`: each kind of row is a function of `KINDS`."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from recipes.study import records
from recipes.study.analysis import ACCURACY, TRAIN_LOSS, comparisons, difference_text
from recipes.study.definitions import STUDIES

Row = Mapping[str, str]


@dataclass(frozen=True)
class Results:
    """The rows of a folder of CSV files."""

    folder: Path

    def rows(self, name: str) -> list[Row]:
        """All rows of a file."""
        with open(self.folder / f"{name}.csv", encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def last(self, name: str, *columns: str) -> dict[tuple[str, ...], Row]:
        """The last row for each value of these columns."""
        return {tuple(row[column] for column in columns): row for row in self.rows(name)}


def of_steps(results: Results) -> dict[str, str]:
    """Of training_step.csv: bytes of the last run, and the median of the ratios of its day by the plain step's heap."""
    models = {"efficientnetv2-s": "EfficientNetV2-S", "resnet50": "ResNet-50", "gpt2": "GPT-2 small"}
    cells = [("model", "kept, plain", "kept, `DEFAULT`", "resident, plain", "resident, `DEFAULT`", "step", "same heap")]
    found = {}
    for model, words in models.items():
        rows = [row for row in results.rows("training_step") if row["model"] == model and row["heap"]]
        ratios: dict[str, list[float]] = {"glibc": [], "package": []}
        heap = ""  # of the plain step of the run
        for row in rows:
            heap = row["heap"] if row["stored"] == "plain" else heap
            if row["stored"] == "DEFAULT" and row["time"][:10] == rows[-1]["time"][:10]:
                ratios[heap].append(float(row["step_ratio"]))
        plain, packed = ([row for row in rows if row["stored"] == stored][-1] for stored in ("plain", "DEFAULT"))
        less = {kind: f"{float(packed[f'{kind}_ratio']):.1f}" for kind in ("kept", "resident")}
        step, same_heap = (f"{statistics.median(values):.2f}" for values in ratios.values())
        found |= {f"step.{model}.plain": _mib(plain["kept_mib"]), f"step.{model}.kept": _mib(packed["kept_mib"])}
        found |= {f"step.{model}.less": less["kept"], f"step.{model}.ratio": step, f"step.{model}.same-heap": same_heap}
        line = [words]
        for kind in ("kept", "resident"):
            line += [_mib(plain[f"{kind}_mib"]), f"{_mib(packed[f'{kind}_mib'])} ({less[kind]} times less)"]
        cells.append((*line, step, same_heap))
    return found | {"steps": _table(cells)}


def of_first_steps(results: Results) -> dict[str, str]:
    """Of first_step.csv: seconds."""
    last = results.last("first_step", "model", "case")
    return {f"first.{model}.{case}": f"{float(row['seconds']):.1f}" for (model, case), row in last.items()}


def of_qat(results: Results) -> dict[str, str]:
    """Of qat.csv: bytes, and steps as multiples of those of stock Brevitas and of the float model in the same run."""
    found, run = {}, {}  # type: ignore[var-annotated]
    for row in results.rows("qat"):
        name, step = f"qat.{row['net']}.{row['trains']}", float(row["step_ms"])
        run[row["net"], row["trains"]] = step
        found[f"{name}.kept"] = _mib(row["kept_mib"])
        found[f"{name}.less"] = f"{float(row['brevitas_ratio']):.1f}"
        found[f"{name}.of-float"] = f"{float(row['of_float']):.2f}"
        for other in ("float", "Brevitas"):
            if (row["net"], other) in run:
                found[f"{name}.step-to-{other}"] = f"{step / run[row['net'], other]:.2f}"
    return found | {"qat.kept": _qat_table(found), "qat.steps": _qat_steps(found)}


_NETS = {"conv": "conv-BN-ReLU, W4A4", "mobile": "depthwise separable, W8A8", "vit": "ViT block, W4A4"}
_TRAINS = {"Brevitas": "stock Brevitas"} | {
    name: f"`{name}`" for name in ("LosslessBackward", "StochBackward2bit", "DEFAULT")
}


def _qat_table(found: Mapping[str, str]) -> str:
    """Bytes of each net and quantizer, as parts of stock's and of the float model's."""
    cells = [("", "float model", *_TRAINS.values())]
    for net, words in _NETS.items():
        line = [words, found[f"qat.{net}.float.kept"]]
        for name in _TRAINS:
            stem = f"qat.{net}.{name}"
            line.append(f"{found[f'{stem}.kept']} ({found[f'{stem}.less']}, {found[f'{stem}.of-float']})")
        cells.append(tuple(line))
    return _table(cells)


def _qat_steps(found: Mapping[str, str]) -> str:
    """Steps of each net and quantizer, as multiples of stock's and of the float model's."""
    cells = [("", *_TRAINS.values())]
    for net, words in _NETS.items():
        steps = [f"{found[f'qat.{net}.{name}.step-to-{other}']}" for name in _TRAINS for other in ("Brevitas", "float")]
        cells.append((words, *(f"{one}, {other}" for one, other in zip(steps[::2], steps[1::2], strict=True))))
    return _table(cells)


def of_noise(results: Results) -> dict[str, str]:
    """Of noise.csv."""
    found = {}
    for (model, policy), row in results.last("noise", "model", "policy").items():
        name = f"noise.{model}.{policy}"
        noise = Decimal(row["noise"])
        decimals = (
            Decimal("0.0001")
            if noise < Decimal("0.001")
            else Decimal("0.001")
            if noise < Decimal("0.1")
            else Decimal("0.01")
        )
        found[name] = str(noise.quantize(decimals, ROUND_HALF_UP))
        found[f"{name}.kept"] = f"{int(row['saved_bytes']) / 2**20:.1f}"
        found[f"{name}.plain"] = f"{int(row['plain_bytes']) / 2**20:.1f}"
        found[f"{name}.less"] = f"{float(row['ratio']):.1f}"
    return found | {"noise.policies": _policies_table(found)}


def _policies_table(found: Mapping[str, str]) -> str:
    """Noise and MiB of some policies on each model; in its rows what has been measured."""
    widths = {f"{bits} bits": f"DitherBackward{bits}bit" for bits in (2, 3, 4)}
    policies = {"`DEFAULT`": "DEFAULT", "`fit`, bytes of `DEFAULT`": "fit:bytes=DEFAULT", **widths}
    policies |= {"`CONV_NET`": "CONV_NET", "`TRANSFORMER`": "TRANSFORMER"}
    cells = [("", "full precision", *policies)]
    for model in ("EfficientNetV2 nano", "ResNet-20", "GPT nano", "ViT nano"):
        line = [model, f"{found[f'noise.{model}.DEFAULT.plain']} MiB"]
        for policy in policies.values():
            name = f"noise.{model}.{policy}"
            line.append(f"{found[name]}, {found[f'{name}.kept']} MiB")
        cells.append(tuple(line))
    return _table(cells)


def of_peaks(results: Results) -> dict[str, str]:
    """Of process_memory.csv: growth of the process at its peak, MiB."""
    last = results.last("process_memory", "model", "allocator", "variant")
    whole = {key: float(row["growth_mib"]) for key, row in last.items() if not row["error"]}
    ways = ("plain", "checkpoint", "DEFAULT")
    cells = [("", *(f"{allocator}: {way}" for allocator in ("glibc", "mimalloc") for way in ways))]
    for model, words in (("efficientnetv2-s", "EfficientNetV2-S"), ("mlp", "MLP"), ("gpt2", "GPT-2 small")):
        cells.append((words, *(f"{whole[model, one, way]:,.0f}" for one in ("glibc", "mimalloc") for way in ways)))
    return {"peak.table": _table(cells)}


def of_alternatives(results: Results) -> dict[str, str]:
    """Of alternatives.csv: a table, with times relative to plain PyTorch's."""
    last = results.last("alternatives", "model", "way")
    cells = [("model", "way", "kept", "states", "peak", "CPU")]
    for (model, way), row in last.items():
        cpu = float(row["cpu_s"]) / float(last[model, "plain PyTorch"]["cpu_s"])
        cells.append((model, way, *(_mib(row[f"{kind}_mib"]) for kind in ("kept", "states", "peak")), f"{cpu:.2f}"))
    return {"alternatives": _table(cells)}


def of_paired_training(results: Results) -> dict[str, str]:
    """Of paired_training.csv: mean differences from full precision ± one standard error."""
    last = results.last("paired_training", "model", "policy", "seed")
    found = {}
    for model, policy in dict.fromkeys((model, policy) for model, policy, _ in last if policy != "None"):
        seeds = [seed for one, other, seed in last if (one, other) == (model, policy) and (model, "None", seed) in last]
        for column, factor, decimals in (("train_loss", 1, 3), ("test_loss", 1, 3), ("test_accuracy", 100, 1)):
            pairs = [last[model, policy, seed][column] for seed in seeds]
            exact = [last[model, "None", seed][column] for seed in seeds]
            values = [factor * (float(one) - float(other)) for one, other in zip(pairs, exact, strict=True)]
            error = statistics.stdev(values) / len(values) ** 0.5
            found[f"paired.{model}.{policy}.{column}"] = (
                f"{statistics.mean(values):+.{decimals}f} ± {error:.{decimals}f}"
            )
    return found


def of_studies(results: Results) -> dict[str, str]:
    """Of study.csv: how far the loss ends above that of the other case and the accuracy below, with 95 % intervals."""
    rows = records.read(results.folder / "study.csv")
    found = {}
    for name, study in STUDIES.items():
        for each in comparisons(study, rows, study.size, range(study.seeds)):
            if each.against is None or not each.differences:
                continue
            stem = f"study.{name}.{each.case.label}"
            stem += f" to {each.against.label}" if each.against is not study.cases[0] else ""
            found[f"{stem}.runs"] = str(len(each.rows))
            row = next(iter(each.rows.values()))
            found[f"{stem}.less"] = f"{int(row['plain_bytes']) / int(row['saved_bytes']):.1f}"
            for measure, word, sign in ((TRAIN_LOSS, "loss-above", 1), (ACCURACY, "accuracy-below", -1)):
                difference = each.differences[measure.column]
                ends = (sign * difference.mean + half for half in (-difference.half_width, difference.half_width))
                found[f"{stem}.{word.partition('-')[0]}"] = difference_text(difference, measure)
                found[f"{stem}.{word}"] = f"{sign * difference.mean:.{measure.decimals}f}"
                found[f"{stem}.{word}-interval"] = " to ".join(f"{end:.{measure.decimals}f}" for end in ends)
    return found


def _table(cells: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, with the empty lines that it needs between marks."""
    lines = [f"| {' | '.join(line)} |" for line in cells]
    return "\n\n" + "\n".join([lines[0], "|" + "---|" * len(cells[0]), *lines[1:]]) + "\n\n"


def _mib(value: str) -> str:
    return f"{float(value):,.1f}"


#: From the rows of a folder to figures by name.
KINDS = (of_steps, of_first_steps, of_qat, of_noise, of_peaks, of_alternatives, of_paired_training, of_studies)
