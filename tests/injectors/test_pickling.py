import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import brevitas.nn as qnn
import pytest
import torch
from brevitas.inject import ExtendedInjector
from brevitas.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    Int16Bias,
    ShiftedUint8ActPerTensorFloat,
    Uint8ActPerTensorFloat,
)
from torch import nn

import brevact
from brevact.injectors import StochBackward2bit
from tests.saving import by_torch_save


class LargeBuckets(ExtendedInjector):
    bucket_size = 1024


def by_pickle(value):
    return pickle.loads(pickle.dumps(value))


copies = pytest.mark.parametrize("copied", [by_pickle, by_torch_save, copy.deepcopy])


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_restores_overridden_values(protocol):
    changed = StochBackward2bit.let(bucket_size=128).let(forward_quant=Uint8ActPerTensorFloat, min_numel=3)
    restored = pickle.loads(pickle.dumps(changed, protocol))
    assert restored is not changed
    assert restored.backward_settings == changed.backward_settings
    assert restored.__mro__[-3:] == changed.__mro__[-3:]
    assert issubclass(restored, StochBackward2bit)


def test_pickle_restores_a_composition():
    restored = by_pickle(LargeBuckets & StochBackward2bit)
    assert restored.quantizer.bucket_size == 1024


def build_model():
    return nn.Sequential(
        qnn.QuantConv2d(
            3, 8, 3, weight_quant=Int8WeightPerChannelFloat, input_quant=StochBackward2bit, input_bucket_size=64
        ),
        qnn.QuantReLU(act_quant=StochBackward2bit, forward_quant=Uint8ActPerTensorFloat, return_quant_tensor=True),
        qnn.QuantConv2d(8, 8, 3, input_quant=ShiftedUint8ActPerTensorFloat, bias_quant=Int16Bias),
        qnn.QuantReLU(act_quant=StochBackward2bit),
        nn.Flatten(),
        qnn.QuantLinear(8 * 8 * 8, 10, input_quant=StochBackward2bit, output_quant=Int8ActPerTensorFloat),
    )


def train(model, steps=3):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 3, 12, 12)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.exhaustive
@copies
@pytest.mark.parametrize("trained", [False, True])
def test_copied_model_trains_identically(copied, trained):
    torch.manual_seed(0)
    model = build_model()
    if trained:
        train(model, steps=1)
    twin = copied(model)
    expected, result = train(model), train(twin)
    assert result[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(result[1], expected[1], strict=True))


@pytest.mark.exhaustive
def test_saved_model_loads_in_a_process_that_imports_only_torch(tmp_path):
    torch.manual_seed(0)
    model = build_model()
    train(model, steps=1)
    x = torch.randn(4, 3, 12, 12)
    torch.save((model.eval(), x, model(x)), tmp_path / "model.pt")
    script = (
        "import sys, torch\n"
        "model, x, y = torch.load(sys.argv[1], weights_only=False)\n"
        "assert torch.equal(model(x), y)\n"
        "assert model[0].input_quant.backward_quant.settings.quantizer.bucket_size == 64\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model.pt")],
        env={**os.environ, "PYTHONPATH": str(Path(brevact.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


@copies
def test_copied_layer_packs_and_is_tracked_by_its_own_proxy(copied, saved_bytes):
    layer = qnn.QuantConv2d(3, 8, 3, input_quant=StochBackward2bit)
    twin = copied(layer)
    x = torch.randn(8, 3, 16, 16)
    assert saved_bytes(twin, x)[1] == saved_bytes(layer, x)[1] < x.nbytes
    assert twin.input_quant.tracked_module_list == [twin]
    another = qnn.QuantConv2d(3, 8, 3, input_quant=twin.input_quant)
    assert twin.input_quant.tracked_module_list == [twin, another]
    assert saved_bytes(another, x)[1] == saved_bytes(layer, x)[1]


def test_unpickled_injector_refers_to_the_unpickled_layer():
    twin = by_pickle(qnn.QuantConv2d(3, 8, 3, input_quant=Int8ActPerTensorFloat))
    assert twin.weight_quant.quant_injector.module is twin
    assert twin.input_quant.quant_injector.proxy_module is twin.input_quant


def test_injector_with_a_local_function_says_what_cannot_be_pickled():
    from brevitas.inject import value

    class Local(StochBackward2bit):
        @value
        def bucket_size():
            return 64

    with pytest.raises((pickle.PicklingError, AttributeError), match="bucket_size"):
        pickle.dumps(Local)
