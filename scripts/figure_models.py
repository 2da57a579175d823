"""Tables of models, from the rows of what each keeps and how far off its gradients are."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.figure_results import Results, table

#: Models of `benchmarks.model_zoo` that are convolutional; those of `benchmarks.image_models` have names in lower case.
_CONVOLUTIONAL = ("ResNet", "ConvNeXt", "MobileNetV2", "RegNet", "EfficientNetV2 nano", "ResNet-20")


def of_models(results: Results) -> dict[str, str]:
    """Of models.csv: bytes and gradient errors of models of three kinds."""
    columns = ("model", "parameters", "plain", "kept", "ratio", "error_8bit", "error_2bit", "along_gradient")
    heads = (
        "model",
        "weights, M",
        "plain, MiB",
        "kept, MiB",
        "times less",
        "error, 8 bits",
        "error, 2 bits",
        "along g",
    )
    kinds: dict[str, list[Sequence[str]]] = {kind: [heads] for kind in ("transformers", "convolutional", "image")}
    for (model,), row in results.last("models", "model").items():
        kind = "image" if model[0].islower() else "convolutional" if model in _CONVOLUTIONAL else "transformers"
        kinds[kind].append([row[column].removesuffix(" MiB").removesuffix(" M") for column in columns])
    forward = ", ".join(dict.fromkeys(row["forward"] for row in results.last("models", "model").values()))
    return {"models.forward": forward} | {f"models.{kind}": table(cells) for kind, cells in kinds.items()}


#: Why a model of another field keeps an eighth or more of its bytes.
_KEPT_BECAUSE = {
    "PyG GCN": "the indices of edges are kept as they are",
    "PyG GATv2": "indices; the softmax over neighbours divides by sums, which stay exact",
    "PyG TransformerConv": "as GATv2",
    "Mixtral, checkpoints": "inputs of checkpoints stay as they are; the loss is packed",
    "Qwen3-MoE, checkpoints": "as Mixtral",
}


def of_domain_bytes(results: Results) -> dict[str, str]:
    """Of domain_bytes.csv and domain_steps.csv: bytes and steps of models of other fields."""
    cells = [("model", "plain, MiB", "kept, MiB", "times less", "step", "below 8 times, because")]
    steps = results.last("domain_steps", "model")
    for (model,), row in results.last("domain_bytes", "model").items():
        plain, saved = int(row["plain_bytes"]), int(row["saved_bytes"])
        mibs = (f"{value / 2**20:.2f}" for value in (plain, saved))
        step = steps[model,]["step"] if (model,) in steps else ""
        cells.append((model, *mibs, f"{plain / saved:.1f}", step, _KEPT_BECAUSE.get(model, "")))
    return {"models.domains": table(cells)}


def of_recurrent(results: Results) -> dict[str, str]:
    """Of recurrent.csv: bytes of recurrent layers at 2 bits."""
    cells = [("layer", "plain, MiB", "kept, MiB")]
    for (layer,), row in results.last("recurrent", "layer").items():
        cells.append((layer, *(f"{int(row[kind]) / 2**20:.1f}" for kind in ("plain_bytes", "saved_bytes"))))
    return {"recurrent": table(cells)}


KINDS = (of_models, of_domain_bytes, of_recurrent)
