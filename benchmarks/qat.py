"""Quantization-aware training with Brevitas: what is kept for backward, in float, by stock Brevitas, and by brevact.

    python -m benchmarks.qat                      # three nets; add --csv to append the rows to a file
    python -m benchmarks.qat --nets conv --batch-size 8

Three nets, each as plain PyTorch layers, as Brevitas layers, and as these with `brevact.quantize_backward`: one of
conv-BN-ReLU at W4A4 (32-64-64-128 channels), depthwise separable blocks in MobileNet's manner at W8A8, and a ViT block
at W4A4.
Scales of activations are learned: past the steps that collect statistics, if `--collecting` does not ask for those.
Bytes are measured twice, as in `benchmarks.training_step`: by `memory_report`, and as the growth of the process's
resident memory. Step times are the median of alternating rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import brevitas.nn as qnn
import torch
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat, Uint8ActPerTensorFloat
from torch import Tensor, nn

from benchmarks.process_memory import resident_bytes
from benchmarks.records import write_rows
from benchmarks.training_step import kept_bytes, kept_resident_bytes, loss_of, step_times
from recipes.policy_names import NamedPolicy, named_policy

_MIB = 2**20
_COLLECTED = 4


class Layers:
    """Makes the layers of a net, in float or by Brevitas.

    Args:
        bit_width: of weights and activations; None for float.
        collecting: whether scales of activations are still collected from statistics.
    """

    def __init__(self, bit_width: int | None, collecting: bool) -> None:
        self.bit_width = bit_width
        self.steps = {"collect_stats_steps": 10**6 if collecting else _COLLECTED - 1}

    def conv(self, inputs: int, outputs: int, kernel_size: int, stride: int = 1, groups: int = 1) -> nn.Module:
        """A convolution without bias."""
        options = {"stride": stride, "padding": kernel_size // 2, "groups": groups, "bias": False}
        if self.bit_width is None:
            return nn.Conv2d(inputs, outputs, kernel_size, **options)
        options |= {"weight_quant": Int8WeightPerTensorFloat, "weight_bit_width": self.bit_width}
        return qnn.QuantConv2d(inputs, outputs, kernel_size, **options)

    def linear(self, inputs: int, outputs: int) -> nn.Module:
        """A fully connected layer, whose input is quantized."""
        if self.bit_width is None:
            return nn.Linear(inputs, outputs)
        return nn.Sequential(
            self.identity(),
            qnn.QuantLinear(
                inputs, outputs, weight_quant=Int8WeightPerTensorFloat, weight_bit_width=self.bit_width, bias=True
            ),
        )

    def relu(self) -> nn.Module:
        """A ReLU with a quantizer behind it."""
        if self.bit_width is None:
            return nn.ReLU()
        return qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, bit_width=self.bit_width, **self.steps)

    def identity(self, bit_width: int | None = None) -> nn.Module:
        """A quantizer by itself."""
        if self.bit_width is None:
            return nn.Identity()
        width = bit_width or self.bit_width
        return qnn.QuantIdentity(act_quant=Int8ActPerTensorFloat, bit_width=width, **self.steps)


def conv_net(layers: Layers) -> nn.Module:
    """Conv-BN-ReLU with 32, 64, 64 and 128 channels."""
    blocks = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 64), (64, 128)):
        blocks += [layers.conv(inputs, outputs, 3), nn.BatchNorm2d(outputs), layers.relu()]
    return nn.Sequential(layers.identity(8), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def mobile_net(layers: Layers) -> nn.Module:
    """Depthwise and pointwise convolutions in turn, each with batch norm and ReLU."""
    blocks = [layers.conv(3, 32, 3), nn.BatchNorm2d(32), layers.relu()]
    for inputs, outputs, stride in ((32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2)):
        blocks += [layers.conv(inputs, inputs, 3, stride, inputs), nn.BatchNorm2d(inputs), layers.relu()]
        blocks += [layers.conv(inputs, outputs, 1), nn.BatchNorm2d(outputs), layers.relu()]
    return nn.Sequential(layers.identity(8), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


class ViTBlock(nn.Module):
    """Attention and MLP of a vision transformer, between patches of 4x4 pixels and a classifier.

    Args:
        layers: makes the layers.
        dim: features.
        heads: of the attention.
    """

    def __init__(self, layers: Layers, dim: int = 192, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.patches = nn.Conv2d(3, dim, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv, self.proj = layers.linear(dim, 3 * dim), layers.linear(dim, dim)
        self.operands = nn.ModuleList(layers.identity() for _ in range(4))
        self.mlp = nn.Sequential(layers.linear(dim, 4 * dim), nn.GELU(), layers.linear(4 * dim, dim))
        self.head = nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return (B, 10) logits of (B, 3, H, W) images."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = x + self.attend(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return self.head(x.mean(1))

    def attend(self, x: Tensor) -> Tensor:
        """Return self-attention of (B, T, C) tokens."""
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4).unbind()
        q, k, v = (operand(part) for operand, part in zip(self.operands, (q, k, v), strict=False))
        weights = (q @ k.transpose(-2, -1) * (dim // self.heads) ** -0.5).softmax(-1)
        mixed = self.operands[3](weights) @ v
        return self.proj(mixed.transpose(1, 2).reshape(batch, tokens, dim))


NETS: dict[str, tuple[Callable[[Layers], nn.Module], int]] = {
    "conv": (conv_net, 4),
    "mobile": (mobile_net, 8),
    "vit": (ViTBlock, 4),
}


def variants(net: str, policy: NamedPolicy, images: Tensor, *, collecting: bool = False) -> dict[str, nn.Module]:
    """The net in float, by stock Brevitas and with backward quantization, after the steps that collect statistics.

    Args:
        net: one of `NETS`.
        policy: of backward quantizers.
        images: (B, 3, H, W) images to collect statistics of.
        collecting: whether statistics are still collected.

    Returns:
        Models by name.
    """
    make, bit_width = NETS[net]
    made = {}
    for name, width in (("float", None), ("Brevitas", bit_width), (policy.name, bit_width)):
        torch.manual_seed(0)
        made[name] = make(Layers(width, collecting))
        with torch.no_grad():
            for _ in range(_COLLECTED):
                made[name](images)
    policy.apply(made[policy.name])
    return made


def measure(net: str, args: argparse.Namespace) -> list[dict[str, object]]:
    """Rows of one net: a variant each."""
    torch.manual_seed(0)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    labels = torch.randint(0, 10, (args.batch_size,))
    models = variants(net, args.policy, images, collecting=args.collecting)
    kept = {name: kept_bytes(model, images) for name, model in models.items()}
    resident = {name: kept_resident_bytes(partial(loss_of, model, images, labels)) for name, model in models.items()}

    def step(model: nn.Module) -> None:
        model.zero_grad()
        loss_of(model, images, labels).backward()

    times = step_times({name: lambda model=model: step(model) for name, model in models.items()}, args.rounds)
    return [
        {
            "net": net,
            "bit_width": NETS[net][1],
            "batch": args.batch_size,
            "image": args.image_size,
            "trains": name,
            "kept_mib": round(kept[name] / _MIB, 2),
            "of_float": round(kept[name] / kept["float"], 3),
            "brevitas_ratio": round(kept["Brevitas"] / kept[name], 1),
            "resident_mib": "" if resident[name] is None else round(resident[name] / _MIB, 1),
            "step_ms": round(statistics.median(times[name]) * 1e3, 1),
        }
        for name in models
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--policy", type=named_policy, default=named_policy("StochBackward2bit"), metavar="POLICY")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--collecting", action="store_true", help="while scales come from statistics")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--csv", help="append the rows to this file")
    args = parser.parse_args(arguments)
    if resident_bytes() is None:
        print("resident memory is left out: it is known on Linux only")
    write_rows([row for net in args.nets for row in measure(net, args)], args.csv)


if __name__ == "__main__":
    main()
