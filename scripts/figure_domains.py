"""Tables of the recipes of fields, from the rows of domains.csv."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence

from recipes.domains import Domain
from scripts.figure_results import Results, Row, mib, table

#: Settings that tell tables of one recipe apart, where they are not the default.
_KINDS = ("model", "net", "architecture", "size", "method", "dataset", "bf16")


def of_domains(results: Results) -> dict[str, str]:
    """Of domains.csv: a table for each recipe, and for each of its kinds, such as `domains.finetune.method=lora`.

    `domains.segmentation3d.DEFAULT.largest` and the like are the largest sizes.
    """
    tables: dict[str, dict[str, Row]] = {}
    domains: dict[str, Domain] = {}
    for row in results.rows("domains"):
        recipe = row["recipe"]
        if recipe not in domains:
            domains[recipe] = importlib.import_module(f"recipes.{recipe}").DOMAIN
        tables.setdefault(_name(row, domains[recipe]), {})[row["variant"]] = row
    found = {
        f"domains.{name}.{variant}.largest": row["largest"]
        for name, rows in tables.items()
        for variant, row in rows.items()
        if row["largest"]
    }
    for name, rows in tables.items():
        found[f"domains.{name}"] = table(_cells(list(rows.values()), domains[name.partition(".")[0]]))
    return found


def _name(row: Row, domain: Domain) -> str:
    settings = dict(words.split("=", 1) for words in row["settings"].split(" ") if "=" in words)
    defaults = {item.name: str(item.default) for item in dataclasses.fields(domain.settings)}
    kinds = (
        f"{name}={settings[name]}" for name in _KINDS if settings.get(name, default := defaults.get(name)) != default
    )
    return ".".join([row["recipe"], *kinds])


def _cells(rows: Sequence[Row], domain: Domain) -> list[list[str]]:
    """Columns that have a figure."""
    columns = {
        _at(rows, domain): lambda row: row["variant"] if row["variant"].islower() else f"`{row['variant']}`",
        "kept, MiB": _kept,
        "peak, MiB": lambda row: row["peak_mib"] and f"{float(row['peak_mib']):,.0f}",
        "time of a step": lambda row: row["cpu_ratio"] and f"{float(row['cpu_ratio']):.2f}",
        domain.metric.words: lambda row: _mean(row, "value", domain.metric.spec),
        "difference from plain": lambda row: _mean(row, "difference", f"+{domain.metric.spec}"),
        _largest(rows): lambda row: row["largest"] and f"{int(row['largest']):,}",
    }
    lines = [[name, *(text(row) for row in rows)] for name, text in columns.items()]
    return [list(line) for line in zip(*(line for line in lines if any(line[1:])), strict=True)]


def _at(rows: Sequence[Row], domain: Domain) -> str:
    """The size at which bytes, peak and step were measured, if it is not that of the trainings."""
    row, size = rows[0], domain.size
    at = row.get("measured_at", "")
    if not size or not at or f"{size.field}={at}" in row["settings"].split():
        return ""
    return f"at `--{size.field.replace('_', '-')} {at}`"


def _largest(rows: Sequence[Row]) -> str:
    found: Mapping[str, str] = next((row for row in rows if row["largest"]), {})
    return f"largest `--{found['size'].replace('_', '-')}` in {int(found['memory_mib']):,} MiB" if found else "largest"


def _kept(row: Row) -> str:
    less = f" ({float(row['kept_less']):.1f} times less)" if row["kept_mib"] and row["variant"] != "plain" else ""
    return row["kept_mib"] and f"{mib(row['kept_mib'])}{less}"


def _mean(row: Row, column: str, spec: str) -> str:
    if not row[column] or (column == "difference" and row["variant"] == "plain"):
        return ""
    error = f" ± {float(row[f'{column}_se']):{spec.lstrip('+')}}" if row[f"{column}_se"] else ""
    return f"{float(row[column]):{spec}}{error}"
