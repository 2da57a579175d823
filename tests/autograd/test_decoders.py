from __future__ import annotations

import ast
import functools
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import brevact
from brevact import DitherBackward4bit, L4Backward, NearestBackward4bit, StochBackward4bit, autograd
from brevact.autograd.decoders import decoder_of_packed
from brevact.autograd.expressions import Derived
from brevact.autograd.norm_decoders import OutputDecoder
from brevact.autograd.saved import Decoder
from brevact.quantizers.backends import without_kernels
from tests.quantizers.same_values import assert_same_values

FOLDER = Path(autograd.__file__).parent
#: Of the protocol; a format's decoder may have more attributes, for readers of that format.
ATTRIBUTES = {name for name in vars(Decoder) if not name.startswith("_")}


@functools.cache
def _nodes() -> list[tuple[str, ast.AST]]:
    """The parts of each module's source, with the path of the module."""
    files = sorted(FOLDER.rglob("*.py"))
    return [(str(file.relative_to(FOLDER)), node) for file in files for node in ast.walk(ast.parse(file.read_text()))]


def _classes() -> list[tuple[str, ast.ClassDef]]:
    return [(file, node) for file, node in _nodes() if isinstance(node, ast.ClassDef)]


def test_what_decodes_derives_from_the_base_class():
    names, before = {"Decoder"}, 0
    while len(names) > before:
        before = len(names)
        names |= {node.name for _, node in _classes() if any(ast.unparse(base) in names for base in node.bases)}
    decoders = [(file, node.name) for file, node in _classes() if _decodes(node)]
    assert len(decoders) > 15
    assert [(file, name) for file, name in decoders if name not in names] == []


def _decodes(node: ast.ClassDef) -> bool:
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "decode"]
    return any([arg.arg for arg in method.args.args] == ["self", "tensors"] for method in methods)


def test_nobody_asks_whether_a_decoder_has_an_attribute():
    calls = [
        (file, ast.unparse(node))
        for file, node in _nodes()
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and len(node.args) > 1
        if isinstance(node.args[1], ast.Constant) and node.args[1].value in ATTRIBUTES
    ]
    assert calls == []


def test_the_base_class_describes_a_decoder_without_a_loss():
    decoder = Decoder()
    assert decoder.quality.is_exact and decoder.is_read_again(())
    assert not (decoder.lasts or decoder.allows_double_backward or decoder.statistics or decoder.decodes_through)


def test_fields_of_derived_tensors_take_no_default_from_the_base_class():
    with pytest.raises(TypeError, match="quality"):
        Derived(None, (), (), None, None)


def hard_values(shape: tuple[int, ...]) -> torch.Tensor:
    """Outliers, sentinels, zeros, and what is not finite, each in some buckets of their own."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    flat = x.view(-1)
    for bucket, value in enumerate((1e9, -1e9, 3e38, torch.inf, -torch.inf, torch.nan, 0.0, 65505.0, 1e-40)):
        flat[512 * bucket + 7 : 512 * bucket + 7 + 30 * bucket % 61 : 3] = value
    flat[512 * 10 : 512 * 11] = 0.1  # a constant bucket
    return x


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_tensor_is_decoded_to_the_type_of_its_reader(bits, order):
    x = hard_values((4, 16, 16, 16)).to(memory_format=order)
    for leaf in (StochBackward4bit, NearestBackward4bit, DitherBackward4bit, L4Backward):
        if leaf is DitherBackward4bit and bits in (1, 32):
            continue
        quantizer = brevact.quantizer(leaf, **({} if leaf is L4Backward else {"bit_width": bits}))
        packed = quantizer.quantize(x, seed=1)
        decoder = decoder_of_packed(packed.spec)
        exact = decoder.decode((packed.buffer,))
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for kernels in (nullcontext, without_kernels):
                with kernels():
                    found = decoder.decode_as((packed.buffer,), dtype)
                assert found.dtype is dtype and found.stride() == exact.stride()
                assert_same_values(found, exact.to(dtype))


def test_a_number_beyond_bfloat16_is_its_largest():
    x = torch.randn(4096)
    x[5] = torch.finfo(torch.float32).min
    packed = brevact.quantizer(NearestBackward4bit).quantize(x, seed=1)
    decoder = decoder_of_packed(packed.spec)
    assert decoder.decode((packed.buffer,))[5] == x[5]
    assert decoder.decode_as((packed.buffer,), torch.bfloat16)[5] == torch.finfo(torch.bfloat16).min


@pytest.mark.parametrize("shape", [(64, 1024), (8, 16, 32, 32)])
def test_layers_under_autocast_have_the_gradients_of_casts(shape, monkeypatch):
    """Decoding to the reader's type changes no gradient: neither behind a norm nor without."""

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = (
            (nn.LayerNorm(1024), nn.Linear(1024, 64)) if len(shape) == 2 else (nn.BatchNorm2d(16), nn.Conv2d(16, 8, 3))
        )
        model = brevact.quantize_backward(nn.Sequential(*layers))
        x = torch.randn(shape, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x * 1).float().square().mean() + layers[1](x * 2).float().sum()
        return [*torch.autograd.grad(loss, [x, *model.parameters()])]

    found = gradients()
    for kind in (
        type(decoder_of_packed(brevact.quantizer(NearestBackward4bit).quantize(torch.ones(512)).spec)),
        OutputDecoder,
    ):
        monkeypatch.setattr(kind, "decode_as", Decoder.decode_as)
    for a, b in zip(found, gradients(), strict=True):
        assert torch.equal(a, b)
