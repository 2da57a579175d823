import pytest
import torch

from recipes.models import MLPS, FloatLayers
from recipes.models.transformer import Attention, Blocks, Size


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_the_formula_for_each_head(causal):
    width, heads, tokens = 12, 3, 5
    attention = Attention(FloatLayers(), width, heads, causal=causal, dropout=0.0)
    x = torch.randn(2, tokens, width)
    expected = torch.empty(2, tokens, width)
    weight, bias = attention.queries_keys_values.weight, attention.queries_keys_values.bias
    for head in range(heads):
        q, k, v = (
            x @ weight[start : start + 4].T + bias[start : start + 4]
            for start in (part * width + 4 * head for part in range(3))
        )
        scores = q @ k.transpose(1, 2) / 4**0.5
        if causal:
            scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
        expected[:, :, 4 * head : 4 * head + 4] = scores.softmax(-1) @ v
    torch.testing.assert_close(attention(x), attention.out(expected))


def test_attention_refuses_a_width_that_heads_do_not_divide():
    with pytest.raises(ValueError, match="width=10 is not a multiple of heads=3"):
        Attention(FloatLayers(), 10, 3, causal=False, dropout=0.0)


def test_mlps_have_as_many_weights_as_each_other():
    weights = [sum(p.numel() for p in make(FloatLayers(), 96).parameters() if p.ndim == 2) for make in MLPS.values()]
    assert weights == [8 * 96**2] * 2


def test_blocks_spread_stochastic_depth_from_zero():
    blocks = Blocks(FloatLayers(), Size(depth=4, heads=1, width=4), stochastic_depth=0.4)
    assert [block.drop.probability for block in blocks.blocks] == pytest.approx([0.0, 0.1, 0.2, 0.3])


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"stochastic_depth": 0.9}])
def test_blocks_drop_in_training_alone(options):
    blocks = Blocks(FloatLayers(), Size(depth=2, heads=2, width=8), **options)
    x = torch.randn(16, 3, 8)
    assert not torch.equal(blocks(x), blocks(x))
    blocks.eval()
    assert torch.equal(blocks(x), blocks(x))
