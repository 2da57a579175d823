"""Figures that pages may name, from the rows of measurements: each kind of row is a function of `KINDS`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.records import estimate_text
from scripts.figure_results import Results, Row, mib, noise_text, range_text, table


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
        found |= {f"step.{model}.plain": mib(plain["kept_mib"]), f"step.{model}.kept": mib(packed["kept_mib"])}
        found |= {f"step.{model}.less": less["kept"], f"step.{model}.ratio": step, f"step.{model}.same-heap": same_heap}
        line = [words]
        for kind in ("kept", "resident"):
            line += [mib(plain[f"{kind}_mib"]), f"{mib(packed[f'{kind}_mib'])} ({less[kind]} times less)"]
        cells.append((*line, step, same_heap))
    return found | {"steps": table(cells)}


def of_first_steps(results: Results) -> dict[str, str]:
    """Of first_step.csv: seconds."""
    last = results.last("first_step", "model", "case")
    return {f"first.{model}.{case}": f"{float(row['seconds']):.1f}" for (model, case), row in last.items()}


def of_qat(results: Results) -> dict[str, str]:
    """Of qat.csv: bytes, peaks, and steps as multiples of those of stock Brevitas and of the float model, paired.

    Names without a net are ranges over all nets.
    """
    found: dict[str, dict[tuple[str, str], str]] = {kind: {} for kind in ("kept", "less", "of-float", "peak", *_STEPS)}
    for key, row in results.last("qat", "net", "trains").items():
        found["peak"][key] = mib(row["peak_mib"])
        if row["kept_mib"]:  # of a compiled net nobody sees what it keeps
            found["kept"][key] = mib(row["kept_mib"])
            found["less"][key] = f"{float(row['brevitas_ratio']):.1f}"
            found["of-float"][key] = f"{float(row['of_float']):.2f}"
        for kind, column in _STEPS.items():
            found[kind][key] = f"{float(row[column]):.2f}"
    ranges = {}
    for kind, values in found.items():
        for trains in dict.fromkeys(trains for _, trains in values):
            mine = [value for (_, other), value in values.items() if other == trains]
            ranges[f"qat.{trains}.{kind}"] = " to ".join((min(mine, key=_number), max(mine, key=_number)))
    return ranges | {"qat.kept": _qat_table(found), "qat.steps": _qat_steps(found), "qat.peaks": _qat_peaks(found)}


#: Steps as multiples of those of another training.
_STEPS = {"step-to-brevitas": "step_to_brevitas", "step-to-float": "step_to_float"}
_NETS = {
    "conv": "conv-BN-ReLU, W4A4",
    "mobile": "depthwise separable, W8A8",
    "vit": "ViT block, W4A4",
    "resnet18": "ResNet-18, W4A4",
    "mobilenetv2": "MobileNetV2, W8A8",
    "lstm": "QuantLSTM, W8A8",
    "llm": "decoder, W8A8",
}
_TRAINS = {
    "Brevitas": "stock Brevitas",
    "compiled": "stock, compiled",
    "LosslessBackward": "`LosslessBackward`",
    "LosslessBackward:residual_bit_width=2": "`residual_bit_width=2`",
    "StochBackward2bit": "`StochBackward2bit`",
    "DEFAULT": "`DEFAULT`",
}


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _qat_table(found: Mapping[str, Mapping[tuple[str, str], str]]) -> str:
    """Bytes of each net and quantizer, as parts of stock's and of the float model's."""
    kept, measured = found["kept"], {trains for _, trains in found["kept"]}
    trains = [name for name in _TRAINS if name in measured]
    cells: list[Sequence[str]] = [("", "float model", *(_TRAINS[name] for name in trains))]
    for net in dict.fromkeys(net for net, _ in kept):
        keys = [(net, name) for name in trains]
        parts = (f"{kept[key]} ({found['less'][key]}, {found['of-float'][key]})" if key in kept else "" for key in keys)
        cells.append((_NETS.get(net, net), kept.get((net, "float"), ""), *parts))
    return table(cells)


def _qat_steps(found: Mapping[str, Mapping[tuple[str, str], str]]) -> str:
    """Steps of each net and quantizer, as multiples of stock's and of the float model's."""
    steps = [found[kind] for kind in _STEPS]
    trains = [name for name in _TRAINS if any(name == other for _, other in steps[0])]
    cells: list[Sequence[str]] = [("", *(_TRAINS[name] for name in trains))]
    for net in dict.fromkeys(net for net, _ in steps[0]):
        ratios = ([each.get((net, name), "-") for each in steps] for name in trains)
        cells.append((_NETS.get(net, net), *map(", ".join, ratios)))
    return table(cells)


def _qat_peaks(found: Mapping[str, Mapping[tuple[str, str], str]]) -> str:
    """Peaks of each net and quantizer."""
    peaks = found["peak"]
    trains = [name for name in ("float", *_TRAINS) if any(name == other for _, other in peaks)]
    cells: list[Sequence[str]] = [("", *({"float": "float model", **_TRAINS}[name] for name in trains))]
    for net in dict.fromkeys(net for net, _ in peaks):
        cells.append((_NETS.get(net, net), *(peaks.get((net, name), "") for name in trains)))
    return table(cells)


def of_noise(results: Results) -> dict[str, str]:
    """Of noise.csv."""
    found = {}
    for (model, policy), row in results.last("noise", "model", "policy").items():
        name = f"noise.{model}.{policy}"
        found[name], found[f"{name}.bias2"] = noise_text(row["noise"]), noise_text(row["bias2"])
        found[f"{name}.with-error"] = estimate_text(row["noise"], row["noise_se"])
        found[f"{name}.kept"] = f"{int(row['saved_bytes']) / 2**20:.1f}"
        found[f"{name}.plain"] = f"{int(row['plain_bytes']) / 2**20:.1f}"
        found[f"{name}.less"] = f"{float(row['ratio']):.1f}"
    last = results.last("noise", "model", "policy")
    times = (
        float(row["noise"]) / float(last[model, "DitherBackward2bit"]["noise"])
        for (model, policy), row in last.items()
        if policy == "StochBackward2bit" and (model, "DitherBackward2bit") in last
    )
    found["noise.stochastic-over-dithered"] = range_text(times)
    return found | _noise_tables(results) | {"noise.policies": _policies_table(found)}


def _noise_tables(results: Results) -> dict[str, str]:
    """A table a model, a row a policy."""
    found, models = {}, {}  # type: ignore[var-annotated]
    for row in results.last("noise", "model", "policy").values():
        models.setdefault(row["model"], []).append(row)
    for model, rows in models.items():
        cells = [("policy", "noise", "bias²", "times less")]
        for row in rows:
            errors = [estimate_text(row[kind], row[f"{kind}_se"]) for kind in ("noise", "bias2")]
            cells.append((f"`{row['policy']}`", *errors, row["ratio"]))
        first = rows[0]
        run = (
            f"Data: {first['data']}; {first['batches']} batches of {first['batch_size']}, {first['draws']} seeds each, "
            f"the unit from {first['unit_batches']}; loss {float(first['loss']):.2f}. Full precision keeps "
            f"{int(first['plain_bytes']) / 2**20:.2f} MiB a batch."
        )
        found[f"noise.{model}"] = f"\n\n{run}{table(cells)}"
    return found


def _policies_table(found: Mapping[str, str]) -> str:
    """Noise and MiB of some policies on each model; in its rows what has been measured."""
    widths = {f"{bits} bits": f"DitherBackward{bits}bit" for bits in (2, 3, 4)}
    policies = {"`DEFAULT`": "DEFAULT", "`fit`, bytes of `DEFAULT`": "fit:bytes=DEFAULT", **widths}
    policies |= {"`CONV_NET`": "CONV_NET", "`TRANSFORMER`": "TRANSFORMER"}
    cells = [("", "full precision", *policies)]
    for model in ("EfficientNetV2 nano", "ResNet-20", "GPT nano", "ViT nano"):
        line = [model, found[f"noise.{model}.DEFAULT.plain"]]
        for policy in policies.values():
            name = f"noise.{model}.{policy}"
            line.append(f"{found[name]}, {found[f'{name}.kept']}")
        cells.append(tuple(line))
    return table(cells)


def of_formats(results: Results) -> dict[str, str]:
    """Of formats.csv: a table, a row a quantizer."""
    last = results.last("formats", "quantizer", "data")
    kinds = ("normal", "after ReLU", "long-tailed", "EfficientNetV2")
    cells = [("quantizer", "bits", "normal", "ReLU", "tailed", "net", "bias", "pack", "decode")]
    for quantizer in dict.fromkeys(name for name, _ in last):
        errors = [last[quantizer, kind]["error"] for kind in kinds]
        row = last[quantizer, kinds[-1]]
        cells.append((f"`{quantizer}`", row["bits"], *errors, row["bias"], row["quantize"], row["decode"]))
    return {"formats": table(cells)}


def of_peaks(results: Results) -> dict[str, str]:
    """Of process_memory.csv: growth of the process at its peak, MiB."""
    rows = results.last("process_memory", "model", "allocator", "variant", "steps")
    last, four = ({key[:3]: row for key, row in rows.items() if key[3] == steps} for steps in ("2", "4"))
    found = {
        f"peak.{'.'.join(key)}": f"{float(row['growth_mib']):,.0f}" for key, row in last.items() if not row["error"]
    }
    return found | {"peak.all": _peaks_table(last), "peak.models": _peaks_of_models(four)}


def _peaks_of_models(last: Mapping[tuple[str, ...], Row]) -> str:
    """Growth and processor time of a step of each model with glibc, and what part of plain's growth is DEFAULT's."""
    ways = ("plain", "checkpoint", "DEFAULT", "DEFAULT+checkpoint", "RECOMPUTE")
    cells = [("model", "plain", "checkpoint", "`DEFAULT`", "both", "`RECOMPUTE`", "`DEFAULT`, part of plain")]
    for model, words in _WORKLOADS.items():
        rows = [last.get((model, "glibc", way), {"error": "not measured"}) for way in ways]
        found = {
            way: (float(row["growth_mib"]), float(row["cpu_s"]))
            for way, row in zip(ways, rows, strict=True)
            if not row["error"]
        }
        texts = [f"{found[way][0]:,.0f} ({found[way][1]:.1f} s)" if way in found else "-" for way in ways]
        part = f"{found['DEFAULT'][0] / found['plain'][0]:.2f}" if {"plain", "DEFAULT"} <= found.keys() else "-"
        cells.append((words, *texts, part))
    return table(cells)


_WORKLOADS = {
    "gpt2-lora": "GPT-2 with LoRA, 4 x 128 tokens",
    "gpt2-lora-bf16": "the same, bfloat16",
    "bert": "BERT of 6 layers, 16 x 128 tokens",
    "efficientnetv2-s": "EfficientNetV2-S, 64 images of 32x32",
    "mobilenet-w4a4": "MobileNet W4A4, 64 images of 32x32",
    "resnet50": "ResNet-50, 8 images of 224x224",
    "unet3d": "3-D U-Net, 2 volumes of 96x96x96",
    "unet3d-6": "the same, 6 volumes",
}


def _peaks_table(last: Mapping[tuple[str, ...], Row]) -> str:
    """Growth of each model with each allocator, and the shares of the bytes not kept by which peaks fall."""
    ways = {"plain": "plain", "checkpoint": "checkpoint", "`DEFAULT`": "DEFAULT", "both": "DEFAULT+checkpoint"}
    cells = [("model", "allocator", *ways, "fall of growth", "fall of process")]
    for model, words in _PEAK_MODELS.items():
        for allocator in ("glibc", "glibc-learning", "tcmalloc", "jemalloc", "mimalloc"):
            rows = [last[model, allocator, way] for way in ways.values()]
            growth = (f"{float(row['growth_mib']):,.0f}" for row in rows)
            felt = (f"{float(rows[2][name]):.0%}".replace("%", " %") for name in ("felt", "felt_of_process"))
            cells.append((words, allocator, *growth, *felt))
    return table(cells)


_PEAK_MODELS = {"efficientnetv2-s": "EfficientNetV2-S", "mlp": "MLP", "gpt2": "GPT-2 small"}


def of_alternatives(results: Results) -> dict[str, str]:
    """Of alternatives.csv: a table of bytes."""
    last = results.last("alternatives", "model", "way")
    cells, found = [("model", "way", "kept", "states", "peak")], {}
    for (model, way), row in last.items():
        found[f"alternatives.{model}.{way}.kept"] = mib(row["kept_mib"])
        cells.append((model, way, *(mib(row[f"{kind}_mib"]) for kind in ("kept", "states", "peak"))))
    return found | {"alternatives": table(cells)}


#: From the rows of a folder to figures by name.
KINDS = (of_steps, of_first_steps, of_qat, of_noise, of_formats, of_peaks, of_alternatives)
