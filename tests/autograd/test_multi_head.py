"""Multi-head attention and layers of transformers save the tensors of their ops."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.autograd.measuring import EXACT_VALUES, assert_gradients_close, settings, train_module

PAD = torch.arange(21).view(3, 7) % 5 == 4


MODULES = {
    "plain": ({}, {}),
    "key and value biases": ({"add_bias_kv": True}, {}),
    "zeros": ({"add_zero_attn": True}, {}),
    "separate projections": ({"kdim": 24, "vdim": 20, "bias": False}, {}),
    "batch first": ({"batch_first": True}, {}),
    "dropout": ({"dropout": 0.2}, {}),
    "mask": ({}, {"attn_mask": torch.arange(42).view(6, 7) % 4 == 3}),
    "padding": ({}, {"key_padding_mask": PAD}),
    "mask and padding": ({}, {"key_padding_mask": PAD, "attn_mask": torch.arange(42).view(6, 7) % 4 == 3}),
    "weights of each head": ({}, {"average_attn_weights": False}),
}


@pytest.mark.parametrize("made, called", MODULES.values(), ids=MODULES.keys())
@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention_stores_what_its_ops_store(made, called, need_weights):
    module = nn.MultiheadAttention(32, 4, **made)
    inputs = [torch.randn(6, 3, 32), torch.randn(7, 3, made.get("kdim", 32)), torch.randn(7, 3, made.get("vdim", 32))]
    if made.get("batch_first"):
        inputs = [x.transpose(0, 1) for x in inputs]
    options = {"need_weights": need_weights, **called}
    outs, grads, _ = train_module(module, inputs, None, **options)
    for chosen in (EXACT_VALUES, settings(bit_width=2)):
        found, found_grads, saved = train_module(module, inputs, chosen, **options)
        assert all(map(torch.equal, found, outs)) and len(found) == len(outs)
        if chosen is EXACT_VALUES:
            assert_gradients_close(found_grads, grads)
        # inputs of the projections; queries, keys, values and the input of the last projection
        assert [t.dtype for t in saved.tensors].count(torch.uint8) >= 5 or chosen is EXACT_VALUES


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_transformer_layer_in_training_is_small(dropout):
    layer, x = nn.TransformerEncoderLayer(64, 4, 128, dropout=dropout, batch_first=True), torch.randn(8, 64, 64)
    outs, _, plain = train_module(layer, [x], None)
    found, _, packed = train_module(layer, [x], settings(bit_width=2, bucket_size=512))
    assert torch.equal(found[0], outs[0])
    assert packed.nbytes < plain.nbytes / (9 if dropout else 3.5)
