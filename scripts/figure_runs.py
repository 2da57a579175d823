"""Figures that pages may name, from the rows of whole trainings."""

from __future__ import annotations

import statistics

from recipes.study import records
from recipes.study.analysis import ACCURACY, TRAIN_LOSS, comparisons, difference_text
from recipes.study.definitions import STUDIES
from scripts.figure_results import Results, table


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


def of_forces(results: Results) -> dict[str, str]:
    """Of forces.csv: mean errors and bytes, and differences from full precision ± one standard error."""
    last = results.last("forces", "policy", "seed")
    names = {"None": "full precision", "DEFAULT": "`DEFAULT`"}
    cells = [("stored by", "energy error", "force error", "difference from full precision", "stored")]
    for policy in dict.fromkeys(policy for policy, _ in last):
        seeds = [seed for other, seed in last if other == policy and ("None", seed) in last]
        energy, force, saved, plain = (
            statistics.mean(float(last[policy, seed][column]) for seed in seeds)
            for column in ("energy_error", "force_error", "saved_mib", "plain_mib")
        )
        values = [float(last[policy, seed]["force_error"]) - float(last["None", seed]["force_error"]) for seed in seeds]
        more = f"{statistics.mean(values):+.3f} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}"
        less = f" ({plain / saved:.1f} times less)" if saved < plain else ""
        words = names.get(policy, f"`{policy}`")
        cells.append(
            (words, f"{energy:.4f}", f"{force:.3f}", "" if policy == "None" else more, f"{saved:.1f} MiB{less}")
        )
    return {"forces": table(cells)}


def of_cifar10(results: Results) -> dict[str, str]:
    """Of cifar10.csv: the accuracy of each seed, and bytes."""
    last = results.last("cifar10", "stored", "seed")
    seeds = list(dict.fromkeys(seed for _, seed in last))
    cells = [("stored", *(f"seed {seed}" for seed in seeds), "kept")]
    for stored in dict.fromkeys(stored for stored, _ in last):
        rows = [last[stored, seed] for seed in seeds]
        accuracies = (f"{float(row['test_accuracy']):.2%}".replace("%", " %") for row in rows)
        words = f"`{stored}`" if stored.endswith("bit") else stored
        cells.append((words, *accuracies, f"{int(rows[0]['saved_bytes']) / 2**20:.1f} MiB"))
    return {"cifar10": table(cells)}


KINDS = (of_paired_training, of_studies, of_forces, of_cifar10)
