"""Blocks of a transformer, of plain `torch.nn` but for the linear layers, which `Layers` makes.

Source: Vaswani et al., Attention Is All You Need, arXiv:1706.03762, section 3. Differs: as in most later work, the norm
stands at the start of a residual branch (Xiong et al., arXiv:2002.04745). Shape suffixes: B samples, T tokens, C
channels, H heads, D channels of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from recipes.models.layers import Layers
from recipes.models.stochastic_depth import StochasticDepth

WEIGHT_STD = 0.02
"""Of initial weights, as in the code of Radford et al., Language Models are Unsupervised Multitask Learners, 2019."""


@dataclass(frozen=True)
class Size:
    """Size of a transformer."""

    depth: int
    heads: int
    width: int


class Attention(nn.Module):
    """Multi-head attention of the tokens of a sample: softmax(Q K^T / sqrt(D)) V for each head, then a linear layer."""

    def __init__(self, layers: Layers, width: int, heads: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} is not a multiple of heads={heads}")
        self.heads = heads
        self.causal = causal
        self.dropout = dropout
        self.queries_keys_values = layers.linear(width, 3 * width)
        self.out = layers.linear(width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        qkv_B3HTD = self.queries_keys_values(x_BTC).unflatten(-1, (3, self.heads, -1)).permute(0, 2, 3, 1, 4)
        q_BHTD, k_BHTD, v_BHTD = qkv_B3HTD.unbind(1)
        dropout = self.dropout if self.training else 0.0
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, dropout_p=dropout, is_causal=self.causal)
        return self.out(y_BHTD.transpose(1, 2).flatten(2))


class GeluMlp(nn.Module):
    """Two linear layers with a GELU between them, four times as wide: y = W2 gelu(W1 x)."""

    def __init__(self, layers: Layers, width: int) -> None:
        super().__init__()
        self.hidden = layers.linear(width, 4 * width)
        self.act = nn.GELU()
        self.out = layers.linear(4 * width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.out(self.act(self.hidden(x_BTC)))


class SwigluMlp(nn.Module):
    """A gated MLP: y = W3 (silu(W1 x) * W2 x), 8/3 times as wide, which takes as many weights as `GeluMlp`.

    Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202. Differs: with biases.
    """

    def __init__(self, layers: Layers, width: int) -> None:
        super().__init__()
        inner = 8 * width // 3
        self.gate = layers.linear(width, inner)
        self.hidden = layers.linear(width, inner)
        self.act = nn.SiLU()
        self.out = layers.linear(inner, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.out(self.act(self.gate(x_BTC)) * self.hidden(x_BTC))


MLPS: dict[str, Callable[[Layers, int], nn.Module]] = {"gelu": GeluMlp, "swiglu": SwigluMlp}
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": lambda width: nn.LayerNorm(width, eps=1e-6),
    "rms": lambda width: nn.RMSNorm(width, eps=1e-6),
}


class Block(nn.Module):
    """Attention and an MLP, each in a residual branch behind its norm: x + attention(norm(x)), then y + mlp(norm(y)).

    Args:
        layers: makes the linear layers.
        size: of the transformer.
        causal: whether a token sees only those before it and itself.
        norm: a key of `NORMS`.
        mlp: a key of `MLPS`.
        dropout: of attention weights and of both branches' outputs.
        drop: probability of leaving a branch out for a sample.
    """

    def __init__(
        self, layers: Layers, size: Size, *, causal: bool, norm: str, mlp: str, dropout: float, drop: float
    ) -> None:
        super().__init__()
        self.attention_norm = NORMS[norm](size.width)
        self.attention = Attention(layers, size.width, size.heads, causal=causal, dropout=dropout)
        self.mlp_norm = NORMS[norm](size.width)
        self.mlp = MLPS[mlp](layers, size.width)
        self.dropout = nn.Dropout(dropout)
        self.drop = StochasticDepth(drop)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.drop(self.dropout(self.attention(self.attention_norm(x_BTC))))
        return x_BTC + self.drop(self.dropout(self.mlp(self.mlp_norm(x_BTC))))


class Blocks(nn.Module):
    """The blocks of a transformer and the norm behind the last one."""

    def __init__(
        self,
        layers: Layers,
        size: Size,
        *,
        causal: bool = False,
        norm: str = "layer",
        mlp: str = "gelu",
        dropout: float = 0.0,
        stochastic_depth: float = 0.0,
    ) -> None:
        super().__init__()
        drops = [stochastic_depth * index / size.depth for index in range(size.depth)]
        blocks = [Block(layers, size, causal=causal, norm=norm, mlp=mlp, dropout=dropout, drop=drop) for drop in drops]
        self.blocks = nn.Sequential(*blocks)
        self.norm = NORMS[norm](size.width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.norm(self.blocks(x_BTC))


def initialise(module: nn.Module) -> None:
    """Normal weights of standard deviation `WEIGHT_STD`, zero biases; for `nn.Module.apply`."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=WEIGHT_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
