"""Tables that pages may name, from the rows of measurements."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks import layer_noise
from benchmarks.records import estimate_text
from scripts.figure_results import Results, Row, mib, noise_text, range_text, table


def of_adaptive(results: Results) -> dict[str, str]:
    """Of adaptive.csv: noise on ResNet-20 by who has the bits."""
    last = results.last("adaptive", "model", "stored", "strategy", "bit_width")
    strategies = {"one width": "fixed", "by samples' ranges": "samples", "by layers": "layers"}
    strategies["by layers and samples"] = "layers and samples"
    cells = [("stored", "mean bits", "kept, MiB", *strategies)]
    for stored, words in (("own", "a tensor a layer"), ("chains", "chains")):
        for bits in ("1.5", "2", "3"):
            rows = [last.get(("ResNet-20", stored, strategy, bits)) for strategy in strategies.values()]
            noises = (estimate_text(row["noise"], row["noise_se"]) if row else "" for row in rows)
            kept = statistics.median(int(row["saved_bytes"]) for row in rows if row) / 2**20
            cells.append((words, bits, f"{kept:.2f}", *noises))
    found = {f"adaptive.{'.'.join(key)}": noise_text(row["noise"]) for key, row in last.items()}
    for kind in ("saved", "plain"):
        mibs = {key: f"{int(row[f'{kind}_bytes']) / 2**20:.1f}" for key, row in last.items()}
        found |= {f"adaptive.{'.'.join(key)}.{kind}": text for key, text in mibs.items()}
    gains = (
        100 - 100 * float(row["noise"]) / float(last[(*key[:2], "layers", key[3])]["noise"])
        for key, row in last.items()
        if key[2] == "layers and samples"
    )
    return found | {"adaptive": table(cells), "adaptive.gain-of-samples": range_text(gains, 0)}


def of_small_tensors(results: Results) -> dict[str, str]:
    """Of small_tensors.csv: bytes and steps by `min_numel`."""
    last = results.last("small_tensors", "model", "min_numel")
    least = ("4096", "1024", "256")
    cells = [("model", *(f"{int(each):,}" for each in least))]
    for model in dict.fromkeys(model for model, _ in last):
        rows = [last[model, each] for each in least]
        cells.append((model, *(f"{row['times_less']}, {float(row['step']):.1f}" for row in rows)))
    return {"small-tensors": table(cells)}


_EXACT = ("LosslessBackward:recompute=1024",)
FITS_OF_RECOMPUTE = {f"fit {ratio}x": f"`fit(..., ratio={ratio}, quick=True)`" for ratio in (15, 30, 60, 80)}
#: Policies of recompute.csv, in the order of tables, and how they are written.
WAYS_OF_RECOMPUTE = {
    "checkpoint of each block": "checkpoint of each block",
    "compiled, memory budget 0.2": "`torch.compile`, memory budget 0.2",
    "DEFAULT": "`DEFAULT`",
    "DitherBackward6bit:recompute=128": "6 bits, `recompute=128`",
    "RECOMPUTE": "`RECOMPUTE`",
    "DitherBackward8bit:recompute=1024": "8 bits, `recompute=1024`",
    "DitherBackward8bit:recompute=4096": "8 bits, `recompute=4096`",
    "LosslessBackward:recompute=1024": "`LosslessBackward`, `recompute=1024`",
    **FITS_OF_RECOMPUTE,
}


def of_recompute(results: Results) -> dict[str, str]:
    """Of recompute.csv: bytes, peak and time of a step, error, noise and bias of gradients, by model and policy."""
    last = results.last("recompute", "model", "policy")
    cells = [("model", "", "kept, MiB", "peak, MiB", "step", "error of the gradient", "noise", "bias²")]
    for model in dict.fromkeys(model for model, _ in last):
        first = next(row for (name, _), row in last.items() if name == model)
        kept, peak = (mib(str(int(first[key]) / 2**20)) for key in ("plain_bytes", "plain_peak"))
        cells.append((model, "full precision", kept, peak, "1", "0", "", ""))
        for policy, text in WAYS_OF_RECOMPUTE.items():
            row = last.get((model, policy))
            if row is not None:
                kept = f"{mib(str(int(row['saved_bytes']) / 2**20))} ({row['ratio']}x less)"
                percent = 100 * float(row["error"])
                shown = f"{percent:.1f}" if percent >= 0.05 else f"{percent:.3f}" if percent >= 0.001 else "below 0.001"
                error = f"{shown} %" if percent else "0"
                peak = mib(str(int(row["peak"]) / 2**20))
                noise, bias = (estimate_text(row[name], row[f"{name}_se"]) for name in ("noise", "bias2"))
                cells.append(("", text, kept, peak, f"{float(row['step']):.2f}", error, noise, bias))
    exact = sorted((row["ratio"] for (_, policy), row in last.items() if policy in _EXACT), key=float)
    found = {"recompute": table(cells), "recompute.exact.less": f"{exact[0]} to {exact[-1]}"}
    for name, policies in (("recompute.step", ("RECOMPUTE",)), ("recompute.exact.step", _EXACT)):
        found[name] = range_text((float(row["step"]) for (_, policy), row in last.items() if policy in policies), 2)
    return found


def of_gpu_steps(results: Results) -> dict[str, str]:
    """Of gpu_steps.csv: memory and speed of training steps, and where they were measured."""
    last = results.last("gpu_steps", "model", "variant")
    words = {
        **{"plain": "plain", "checkpoint": "checkpoints", "DEFAULT": "`DEFAULT`", "RECOMPUTE": "`RECOMPUTE`"},
        "lossless": "`LosslessBackward`",
    }
    names = {
        **{"resnet50": "ResNet-50", "efficientnetv2-s": "EfficientNetV2-S", "gpt2": "GPT-2 small", "vit-b": "ViT-B"},
        **{"unet3d": "3-D U-Net", "resnet18-w4a4": "ResNet-18 W4A4"},
    }
    cells = [("model", "", "before backward", "times less", "peak", "speed", "captured")]
    for model in dict.fromkeys(model for model, _ in last):
        plain = last[model, "plain"]
        name = names[model]
        for variant, text in words.items():
            row, graph = last.get((model, variant)), last.get((model, f"{variant}-graph"))
            if row is None or row["error"]:
                continue
            times = "" if variant == "plain" else _times(plain, row, "activations_mib")
            memory = (f"{float(row['activations_mib']):,.0f}", times, f"{float(row['peak_mib']):,.0f}")
            speeds = (_times(row, plain, "samples_s", 2), _times(graph, plain, "samples_s", 2) if graph else "")
            cells.append((name, text, *memory, *speeds))
            name = ""
    row = next(iter(last.values()))
    place = f"an {row['device']} with PyTorch {row['torch']} and Triton {row['triton']}, {row['time'].split()[0]}"
    found = {"gpu-steps": table(cells), "gpu.device": place}
    for name, graph in (("gpu.eager", ""), ("gpu.captured", "-graph")):
        speeds = (
            float(row["samples_s"]) / float(last[model, f"plain{graph}"]["samples_s"])
            for (model, variant), row in last.items()
            if variant == f"DEFAULT{graph}"
        )
        found[name] = range_text(speeds, 2)
    plain, lossless = last["resnet18-w4a4", "plain"], last["resnet18-w4a4", "lossless"]
    found["gpu.lossless.speed"] = _times(lossless, plain, "samples_s", 2)
    return found | {"gpu.lossless.less": _times(plain, lossless, "activations_mib")}


def _times(row: Row, other: Row, column: str, places: int = 1) -> str:
    return f"{float(row[column]) / float(other[column]):.{places}f}"


def of_gpu_kernels(results: Results) -> dict[str, str]:
    """Of gpu_kernels.csv: what part of a copy's bandwidth each operation has."""
    last = results.last("gpu_kernels", "operation", "dtype", "bit_width")
    columns = list(dict.fromkeys((dtype, width) for _, dtype, width in last))
    cells = [("", *(f"{dtype}, {width} bits" for dtype, width in columns))]
    for operation in dict.fromkeys(operation for operation, _, _ in last):
        cells.append((operation, *(f"{float(last[(operation, *each)]['fraction_of_copy']):.2f}" for each in columns)))
    return {"gpu-kernels": table(cells)}


def of_quantizers(results: Results) -> dict[str, str]:
    """Of quantizers.csv: times relative to `clone()`."""
    last = results.last("quantizers", "operation", "dtype", "bit_width", "bucket_size")
    operations = {
        "nearest": "nearest",
        "stochastic": "stochastic",
        "dequantize into a buffer": "dequantize into a buffer",
        "dequantize": "dequantize",
        "dequantize and multiply, in place": "dequantize * other",
        "dequantize with SiLU": "dequantize with SiLU",
        "dequantize with SiLU, of maps behind a norm": "dequantize with SiLU of maps",
        "dequantize with SiLU' and multiply": "dequantize with SiLU' * other",
    }
    columns = [(dtype, bits) for dtype in ("float32", "bfloat16") for bits in ("2", "4")]
    cells = [("", *(f"{dtype}, {bits} bits" for dtype, bits in columns))]
    for words, name in operations.items():
        cells.append((words, *(last[(name, *column, "512")]["ratio_to_clone"] for column in columns)))
    more = {
        "silu": ("dequantize with SiLU", "dequantize with SiLU of maps"),
        "silu-rows": ("dequantize with SiLU of rows",),
    }
    found = {"quantizers": table(cells)}
    for dtype in ("float32", "bfloat16"):
        found[f"quantizers.clone.{dtype}"] = f"{float(last['clone', dtype, '2', '512']['median_ms']):.0f}"
    for kind, names in more.items():
        rows = [last[(name, *column, "512")] for name in names for column in columns]
        found[f"quantizers.{kind}"] = range_text((float(row["ratio_to_dequantize"]) for row in rows), 2)
    return found


def of_gradient_exchange(results: Results) -> dict[str, str]:
    """Of gradient_exchange.csv: bytes a step, and differences from runs without a hook ± one standard error."""
    last = results.last("gradient_exchange", "processes", "hook", "seed")
    worlds = sorted({world for world, _, _ in last}, key=int)
    hooks = list(dict.fromkeys(hook for _, hook, _ in last))
    kinds = (("train_loss", "train loss", 1, 4, ""), ("test_accuracy", "test accuracy", 100, 2, " %"))
    cells = [("hook", *(f"{world} processes" for world in worlds))]
    cells[0] += tuple(f"{words}, {world}" for _, words, *_ in kinds for world in worlds)
    for hook in hooks:
        runs = {world: _by_seed(last, world, hook) for world in worlds}
        line = [
            f"{statistics.mean(float(row['received_bytes']) for row in runs[w].values()) / 1024:.0f} KiB"
            for w in worlds
        ]
        for column, _, factor, decimals, unit in kinds:
            for world in worlds:
                plain = _by_seed(last, world, "no hook")
                values = [factor * float(row[column]) for row in runs[world].values()]
                if hook == "no hook":
                    line.append(f"{statistics.mean(values):.{decimals}f}{unit}")
                    continue
                pairs = [
                    value - factor * float(plain[seed][column]) for seed, value in zip(runs[world], values, strict=True)
                ]
                error = statistics.stdev(pairs) / len(pairs) ** 0.5
                line.append(f"{statistics.mean(pairs):+.{decimals}f} ± {error:.{decimals}f}{unit}")
        cells.append((_hook_words(hook), *line))
    return {"gradient-exchange": table(cells)}


def _by_seed(last: Mapping[tuple[str, ...], Row], world: str, hook: str) -> dict[str, Row]:
    return {seed: row for (one, other, seed), row in last.items() if (one, other) == (world, hook)}


def _hook_words(hook: str) -> str:
    """A hook's name in a table; of a biased quantizer alone, that no error is fed back."""
    name, _, more = hook.partition(", ")
    more = more or ("none" if name.startswith("Nearest") else "")
    return (f"`{name}`" if "Backward" in name else name) + (f", {more}" if more else "")


def of_layer_noise(results: Results) -> dict[str, str]:
    """Of layer_noise.csv: how well rows of layers add up, and how well estimates predict them."""
    rows = results.rows("layer_noise")
    cells: list[Sequence[str]] = [
        (
            *("", "rows", "noise of the whole", "sum of rows, measured", "sum of estimates"),
            *("noise in the noisiest quarter of rows", "in the quarter with the largest estimates"),
        )
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        found = layer_noise.summary(model, [dict(row) for row in rows if row["model"] == model])
        *figures, largest, estimated = map(str, list(found.values())[1:])
        cells.append((model, *figures, *(f"{float(share):.0%}".replace("%", " %") for share in (largest, estimated))))
    return {"layer-noise": table(cells)}


def of_scaling(results: Results) -> dict[str, str]:
    """Of scaling.csv: the largest batches within a limit, and how many times plain's `DEFAULT` takes."""
    last = results.last("scaling", "part", "model", "variant", "limit_mib")
    found = {}
    for (part, model, variant, limit), row in last.items():
        if part == "limit":
            found[f"limit.{model}.{limit}.{variant}"] = row["batch_size"]
            plain = last.get((part, model, "plain", limit))
            if plain is not None and variant == "DEFAULT":
                found[f"limit.{model}.{limit}.times"] = f"{int(row['batch_size']) / int(plain['batch_size']):.1f}"
    return found


def of_step_costs(results: Results) -> dict[str, str]:
    """Of step_costs.csv: milliseconds of processor time of each phase."""
    last = results.last("step_costs", "model", "phase")
    names = {"efficientnetv2-s": "EfficientNetV2-S", "resnet50": "ResNet-50", "gpt2": "GPT-2 small"}
    models = dict.fromkeys(model for model, _ in last)
    cells = [("", *(f"{names[model]}: {kind}" for model in models for kind in ("plain", "`DEFAULT`")))]
    for phase in dict.fromkeys(phase for _, phase in last):
        words = {"in kernels": "in kernels of brevact", "step": "step, of medians"}.get(phase, phase)
        figures = (f"{float(last[model, phase][kind]):,.0f}" for model in models for kind in ("plain", "packed"))
        cells.append((words, *figures))
    ratios = (text for model in models for text in ("1", f"{float(last[model, 'step']['ratio']):.2f}"))
    return {"step-costs": table([*cells, ("ratio of a step", *ratios)])}


def of_dates(results: Results) -> dict[str, str]:
    """Of all files: when and where their rows were measured."""
    cells = [("rows in `benchmarks/results`", "first", "last", "processors", "torch")]
    for path in sorted(results.folder.glob("*.csv")):
        rows = [row for row in results.rows(path.stem) if {"time", "device", "torch"} <= row.keys() and row["time"]]
        if rows:
            days = sorted(row["time"][:10] for row in rows)
            kinds = (sorted({row[column].partition(" @")[0] for row in rows}) for column in ("device", "torch"))
            cells.append((f"`{path.name}`", days[0], days[-1], *(", ".join(kind) for kind in kinds)))
    return {"dates": table(cells)}


#: From the rows of a folder to tables and figures by name.
KINDS = (
    *(of_gpu_steps, of_gpu_kernels),
    *(of_adaptive, of_small_tensors, of_recompute, of_quantizers, of_gradient_exchange, of_layer_noise),
    *(of_scaling, of_step_costs, of_dates),
)
