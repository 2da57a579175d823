"""GPT: a causal transformer that predicts the next token.

Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (GPT-2), section 2.3. Differs: norm
and MLP may be an RMSNorm and a SwiGLU, the head may have a weight of its own; `nano` and `mini` are sizes for text
taken character by character. Shape suffixes: B samples, T tokens, C channels, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.models.layers import FloatLayers, Layers
from recipes.models.transformer import WEIGHT_STD, Blocks, Size, initialise

GPT_SIZES = {"nano": Size(depth=4, heads=4, width=128), "mini": Size(6, 6, 384), "gpt2": Size(12, 12, 768)}
HEADS = ("tied", "separate")


class GPT(nn.Module):
    """Embeddings of tokens and positions, blocks of causal attention, and a head without bias over the vocabulary.

    Args:
        size: of the transformer.
        vocabulary: number of different tokens.
        context: largest number of tokens in a sample.
        norm: as for `transformer.Block`.
        mlp: as for `transformer.Block`.
        head: whose weight it multiplies by: that of the token embedding ("tied") or its own ("separate").
        dropout: as for `transformer.Block`, and of the embeddings.
        stochastic_depth: as for `transformer.Blocks`.
        layers: makes the linear layers, but for a tied head; None for those of torch.nn.

    Raises:
        ValueError: `head` is not known.
    """

    def __init__(
        self,
        size: Size,
        *,
        vocabulary: int,
        context: int,
        norm: str = "layer",
        mlp: str = "gelu",
        head: str = "tied",
        dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        layers: Layers | None = None,
    ) -> None:
        super().__init__()
        if head not in HEADS:
            raise ValueError(f"head={head!r} is not known; accepted: {', '.join(HEADS)}")
        layers = layers or FloatLayers()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Embedding(context, size.width)
        self.dropout = nn.Dropout(dropout)
        options = {"norm": norm, "mlp": mlp, "dropout": dropout, "stochastic_depth": stochastic_depth}
        self.transformer = Blocks(layers, size, causal=True, **options)
        self.head = layers.linear(size.width, vocabulary, bias=False) if head == "separate" else None
        self.apply(initialise)
        for block in self.transformer.blocks:
            for out in (block.attention.out, block.mlp.out):  # 2 * depth of them add up in the residual stream
                nn.init.normal_(out.weight, std=WEIGHT_STD / math.sqrt(2 * size.depth))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """The logits of each token's successor, B x T x V."""
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTC = self.transformer(self.dropout(self.tokens(tokens_BT) + self.positions(places_T)))
        return F.linear(x_BTC, self.tokens.weight) if self.head is None else self.head(x_BTC)

    @torch.no_grad()
    def generate(self, tokens_T: Tensor, count: int, *, temperature: float, generator: torch.Generator) -> Tensor:
        """Draws `count` tokens, each from softmax(logits / temperature) given those before it, in eval mode.

        Args:
            tokens_T: int64 tokens to begin with, at least one; not returned.
            count: number of tokens to draw.
            temperature: above 0; below 1 likely tokens become likelier.
            generator: CPU generator of the draws.

        Returns:
            int64 tensor of `count` tokens.
        """
        training = self.training
        self.eval()
        drawn_T = tokens_T
        for _ in range(count):
            logits_V = self(drawn_T[None, -self.context :])[0, -1]
            probabilities_V = (logits_V.float() / temperature).softmax(0).cpu()
            drawn = torch.multinomial(probabilities_V, 1, generator=generator)
            drawn_T = torch.cat([drawn_T, drawn.to(drawn_T.device)])
        self.train(training)
        return drawn_T[len(tokens_T) :]
