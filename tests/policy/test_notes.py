"""What `print(model)` says, and what goes to the log."""

import copy
import gc
import io
import logging
import pickle
import weakref

import torch
from torch import nn

import brevact


def model():
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64))


def test_repr_has_a_note_where_something_applies():
    plain = repr(model())
    quantized = brevact.quantize_backward(model(), {nn.LayerNorm: None, "3": brevact.StochBackward2bit})
    assert repr(quantized) == plain.replace(
        "elementwise_affine=True, bias=True", "elementwise_affine=True, bias=True, stores full precision"
    ).replace(
        "(3): Linear(in_features=64, out_features=64, bias=True",
        "(3): Linear(in_features=64, out_features=64, bias=True, stores 2-bit codes",
    )
    assert repr(brevact.restore_backward(quantized)) == plain
    assert vars(quantized[3]).keys() == vars(model()[3]).keys()
    whole = repr(brevact.quantize_backward(model())).split("\n")
    assert whole[1] == "  stores 4-bit codes" and [line for line in whole if "stores" in line] == [whole[1]]


def test_repr_has_both_widths_of_a_mixture():
    layer = brevact.quantize_backward(nn.Linear(64, 64), brevact.StochBackward2bit4bitMix)
    assert repr(layer) == "Linear(in_features=64, out_features=64, bias=True, stores 2- and 4-bit codes)"


def test_repr_follows_widths_that_move():
    quantized = brevact.quantize_backward(model(), brevact.StochBackward4bit)
    batch = torch.randn(128, 64)
    adaptive = brevact.Adaptive(quantized, batch, lambda model, x: model(x).square().mean(), bit_width=2.5)
    for name, width in adaptive.bit_widths.items():
        assert f"stores {width}-bit codes" in repr(quantized.get_submodule(name)).split("(0)")[0]


def test_notes_are_copied_and_pickled_with_the_model():
    quantized = brevact.quantize_backward(model(), brevact.StochBackward2bit)
    file = io.BytesIO()
    torch.save(quantized, file)
    file.seek(0)
    copies = [copy.deepcopy(quantized), pickle.loads(pickle.dumps(quantized)), torch.load(file, weights_only=False)]
    text = repr(quantized)
    brevact.restore_backward(quantized)
    assert "stores" in text and "stores" not in repr(quantized)
    for copied in copies:
        assert repr(copied) == text and type(copied[0]) is nn.Linear
        assert "stores" not in repr(brevact.restore_backward(copied))


def test_notes_let_a_model_go_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        quantized = brevact.quantize_backward(model())
        gone = weakref.ref(quantized)
        del quantized
        assert gone() is None
    finally:
        gc.enable()


def test_a_modules_own_extra_repr_stays():
    layer = nn.Linear(4, 4)
    layer.extra_repr = lambda: "mine"
    brevact.quantize_backward(layer, brevact.StochBackward2bit)
    assert repr(layer) == "Linear(mine)"
    assert repr(brevact.restore_backward(layer)) == "Linear(mine)"


def test_log_is_quiet_and_says_what_is_decided(caplog, capfd):
    brevact.quantize_backward(model())
    assert capfd.readouterr() == ("", "")
    batches, loss = list(torch.randn(3, 128, 64)), lambda model, x: model(x).square().mean()
    with caplog.at_level(logging.INFO, "brevact"):
        brevact.memory_report(model(), batches[0])  # of a copy, of which nothing is said
        assert not caplog.records
        policy = brevact.fit(model(), batches, loss, ratio=4)
        brevact.Adaptive(brevact.quantize_backward(model(), brevact.StochBackward4bit), batches[0], loss, bit_width=3)
    texts = [record.getMessage() for record in caplog.records]
    assert texts[0].startswith("fit, ratio=4: ") and f"{policy.report.saved_bytes} of" in " ".join(texts)
    assert [text for text in texts if text.startswith("Sequential has a backward policy")]
    assert texts[-1].startswith("step 0: bit widths [")
