"""The layers a recipe's model is made of, with one choice of forward quantizers for all of them."""

from dataclasses import dataclass

from torch import nn

import brevact.nn as bnn


@dataclass(frozen=True)
class Layers:
    """Makes convolution, normalization, activation and linear layers of `brevact.nn`.

    The two fields are Brevitas' own forward quantizers and go to every convolution and linear layer; None keeps the
    forward pass in full precision. `brevact.quantize_backward(model, ...)` later decides the stored tensors of the
    finished model, ops between layers included (the product in a squeeze-and-excitation, stochastic depth): the same
    model, with the same `state_dict`, is the full-precision reference.

    Attributes:
        weight_quant: injector of a weight quantizer, such as `brevitas.quant.Int8WeightPerTensorFloat`.
        input_quant: injector of an activation quantizer, such as `brevitas.quant.Int8ActPerTensorFloat`.
    """

    weight_quant: type | None = None
    input_quant: type | None = None

    def conv(
        self, channels_in: int, channels_out: int, kernel: int, *, stride: int = 1, groups: int = 1, bias: bool = False
    ) -> nn.Module:
        """A 2-d convolution that keeps the size of the map, up to its stride."""
        return bnn.QuantConv2d(
            channels_in,
            channels_out,
            kernel,
            stride=stride,
            padding=kernel // 2,
            groups=groups,
            bias=bias,
            weight_quant=self.weight_quant,
            input_quant=self.input_quant,
        )

    def linear(self, features_in: int, features_out: int, *, bias: bool = True) -> nn.Module:
        return bnn.QuantLinear(
            features_in, features_out, bias=bias, weight_quant=self.weight_quant, input_quant=self.input_quant
        )

    def norm(self, channels: int) -> nn.Module:
        """Batch normalization with EfficientNetV2's epsilon."""
        return bnn.BatchNorm2d(channels, eps=1e-3)

    def act(self) -> nn.Module:
        """The activation function of the network."""
        return bnn.SiLU()

    def gate(self) -> nn.Module:
        """The function that turns a squeeze-and-excitation's output into factors between 0 and 1."""
        return bnn.Sigmoid()

    def pool(self) -> nn.Module:
        """The mean over a map."""
        return bnn.AdaptiveAvgPool2d(1)

    def dropout(self, probability: float) -> nn.Module:
        return bnn.Dropout(probability)


@dataclass(frozen=True)
class FloatLayers(Layers):
    """The same with the convolutions and linear layers of `torch.nn`, which spare the time of Brevitas' own forward."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                raise TypeError(f"{name}: got {value!r}; layers of torch.nn have no forward quantizers; use Layers")

    def conv(
        self, channels_in: int, channels_out: int, kernel: int, *, stride: int = 1, groups: int = 1, bias: bool = False
    ) -> nn.Module:
        """A 2-d convolution that keeps the size of the map, up to its stride."""
        padding = kernel // 2
        return nn.Conv2d(channels_in, channels_out, kernel, stride=stride, padding=padding, groups=groups, bias=bias)

    def linear(self, features_in: int, features_out: int, *, bias: bool = True) -> nn.Module:
        return nn.Linear(features_in, features_out, bias=bias)
