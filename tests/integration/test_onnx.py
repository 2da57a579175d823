"""ONNX: models in eval mode are exported as they would be without a policy, by torch and by Brevitas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import brevitas.nn as qnn
import onnx
import pytest
import torch
from brevitas.export import export_onnx_qcdq, export_torch_qcdq
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat, Uint8ActPerTensorFloat
from torch import Tensor, nn

import brevact
from brevact import L4Backward, LosslessBackward, StochBackward2bit

pytestmark = pytest.mark.filterwarnings("ignore")
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def plain_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)
    )


def quantized_model() -> nn.Module:
    return nn.Sequential(
        qnn.QuantConv2d(3, 8, 3, weight_quant=Int8WeightPerTensorFloat, input_quant=Int8ActPerTensorFloat),
        nn.BatchNorm2d(8),
        qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, bit_width=4),
        nn.Flatten(),
        qnn.QuantLinear(288, 4, bias=True, weight_quant=Int8WeightPerTensorFloat),
    )


def by_torch(model: nn.Module, path: Path, dynamo: bool) -> None:
    torch.onnx.export(model, (IMAGES,), path, dynamo=dynamo, verbose=False)


def by_brevitas(model: nn.Module, path: Path, dynamo: bool) -> None:
    export_onnx_qcdq(model, args=IMAGES, export_path=str(path), dynamo=dynamo)


def without_notes(model: onnx.ModelProto) -> bytes:
    """The graph and its weights, without the notes of where in the source they come from."""
    for each in (*model.graph.node, *model.graph.initializer, *model.graph.value_info):
        del each.metadata_props[:]
    return model.graph.SerializeToString(deterministic=True)


def trained(make: Callable[[], nn.Module], policy: object) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = brevact.quantize_backward(make(), policy)
    model(IMAGES).square().mean().backward()
    model.zero_grad()
    return model.eval(), brevact.restore_backward(copy.deepcopy(model))


@pytest.mark.parametrize(
    ("export", "make", "dynamo", "policy"),
    [
        pytest.param(by_torch, plain_model, False, L4Backward, id="torch"),
        pytest.param(by_torch, plain_model, True, StochBackward2bit.let(min_numel=0), id="torch, dynamo"),
        pytest.param(by_brevitas, quantized_model, False, LosslessBackward, id="Brevitas"),
    ],
)
def test_exported_model_is_that_without_a_policy(export, make, dynamo, policy, tmp_path: Path):
    quantized, plain = trained(make, policy)
    for name, model in (("quantized", quantized), ("plain", plain)):
        export(model, tmp_path / f"{name}.onnx", dynamo)
    found, expected = (without_notes(onnx.load(tmp_path / f"{name}.onnx")) for name in ("quantized", "plain"))
    assert found == expected
    brevact.memory_report(quantized, IMAGES)  # and it still trains
    assert torch.equal(quantized(IMAGES), plain(IMAGES))


def test_brevitas_torch_export_computes_what_it_does_without_a_policy():
    quantized, plain = trained(quantized_model, LosslessBackward)
    results: list[Tensor] = [export_torch_qcdq(model, args=IMAGES)(IMAGES) for model in (quantized, plain)]
    assert torch.equal(*results)
