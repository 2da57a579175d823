"""The differentiable ops that the tests of regions run over."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Op(NamedTuple):
    """A function of one activation, as a module that holds its weights.

    `stored`: "packed" (an approximation), "scores" (8 bits for some tensors), "embeddings" (8 bits), "exact" (masks,
    indices) or "nothing".
    """

    name: str
    make: Callable[[], Callable[[Tensor], Tensor]]
    shape: tuple[int, ...] = (3, 4, 12, 12)
    stored: str = "packed"

    @property
    def is_quadratic(self) -> bool:
        """Whether its gradient is quadratic in a saved tensor, and so biased by the order of the variance."""
        return ("_norm" in self.name and "frozen" not in self.name) or self.name.startswith(
            ("softm", "normalize", "dice", "tversky")
        )


class Scaled(nn.Module):
    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.fc = nn.Conv2d(4, 4, 1)
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        factor = torch.sigmoid(self.fc(F.adaptive_avg_pool2d(x, 1)))
        return x.mul_(factor) if self.inplace else x * factor


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4, 1, 1) + 0.5)
        self.bias = nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.bias


class WeightProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Experts(nn.Module):
    """Matrices of experts, one per group of rows; one group is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16, 24))
        self.register_buffer("offsets", torch.tensor([10, 10, 40], dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float().transpose(-2, -1)  # there is none of float64
        return torch._grouped_mm(x.float(), weight, offs=self.offsets).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(3))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(project(x) for project in self.projections), **self.options)


def frozen(norm: nn.Module) -> nn.Module:
    """A norm in eval mode with statistics that are not trivial."""
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return norm.eval()


class Loss(nn.Module):
    def __init__(self, criterion: nn.Module, shape: tuple[int, ...], *, probabilities: bool = False) -> None:
        super().__init__()
        self.criterion = criterion
        if probabilities:
            target = torch.randn(shape).softmax(1)
        else:
            target = torch.randint(0, shape[1], (shape[0], *shape[2:]))
        self.register_buffer("target", target)

    def forward(self, x: Tensor) -> Tensor:
        return self.criterion(x, self.target[: len(x)])


class ToTarget(nn.Module):
    """A loss of the activation and a target that is given by a function of noise, with the options of the loss."""

    def __init__(self, loss: Callable[..., Tensor], shape: tuple[int, ...], target=torch.clone, **options: object):
        super().__init__()
        self.loss, self.target, self.options = loss, target(torch.randn(shape)), options

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(x, self.target[: len(x)].to(x.dtype), **self.options)


def dice(x: Tensor, target: Tensor, falsely: float = 0.5) -> Tensor:
    """The soft Dice loss; Tversky's where `falsely`, the weight of false positives, is not a half."""
    p, dims = x.softmax(1), tuple(range(2, x.dim()))
    found = (p * target).sum(dims)
    false = falsely * (p * (1 - target)).sum(dims) + (1 - falsely) * ((1 - p) * target).sum(dims)
    return 1 - (found + 1e-5) / (found + false + 1e-5)


def zero_one(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


def distribution(x: Tensor) -> Tensor:
    return x.softmax(1)


MAP, LINE, VOLUME = (3, 4, 12, 12), (3, 4, 150), (2, 4, 7, 8, 9)

PACKED = [
    Op("conv1d", lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2), LINE),
    Op("conv2d", lambda: nn.Conv2d(4, 6, 3, padding=1)),
    Op("conv2d grouped strided", lambda: nn.Conv2d(4, 8, (3, 2), stride=(2, 1), padding=(1, 0), groups=2, bias=False)),
    Op("conv2d depthwise", lambda: nn.Conv2d(4, 4, 5, padding="same", groups=4)),
    Op("conv2d same, even kernel", lambda: nn.Conv2d(4, 6, (2, 3), padding="same", dilation=(1, 2))),
    Op("conv2d valid", lambda: nn.Conv2d(4, 6, 3, padding="valid")),
    Op("conv2d reflect", lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")),
    Op("conv2d unbatched", lambda: nn.Conv2d(4, 6, 3), (4, 15, 14)),
    Op("conv3d", lambda: nn.Conv3d(4, 5, 3, padding=(0, 1, 2)), VOLUME),
    Op("conv_transpose1d", lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1), LINE),
    Op("conv_transpose2d", lambda: nn.ConvTranspose2d(4, 6, 3, stride=2)),
    Op(
        "conv_transpose2d grouped dilated",
        lambda: nn.ConvTranspose2d(4, 6, (3, 2), (2, 1), (1, 0), (1, 0), groups=2, bias=False, dilation=(1, 2)),
    ),
    Op("conv_transpose2d unbatched", lambda: nn.ConvTranspose2d(4, 6, 3), (4, 15, 14)),
    Op("conv_transpose3d", lambda: nn.ConvTranspose3d(4, 2, 2, stride=2, groups=2), VOLUME),
    Op("linear", lambda: nn.Linear(20, 7), (30, 20)),
    Op("linear 1-d", lambda: nn.Linear(500, 7), (500,)),
    Op("linear 3-d", lambda: nn.Linear(20, 7, bias=False), (5, 6, 20)),
    Op("linear 4-d", lambda: nn.Linear(12, 7), MAP),
    Op("batch_norm 2-d input", lambda: nn.BatchNorm1d(40), (75, 40)),
    Op("batch_norm1d", lambda: nn.BatchNorm1d(4), LINE),
    Op("batch_norm2d", lambda: nn.BatchNorm2d(4, momentum=None, eps=1e-3)),
    Op("batch_norm2d no affine", lambda: nn.BatchNorm2d(4, affine=False, track_running_stats=False)),
    Op("batch_norm2d frozen", lambda: frozen(nn.BatchNorm2d(4))),
    Op("batch_norm3d", lambda: nn.BatchNorm3d(4), VOLUME),
    Op("layer_norm", lambda: nn.LayerNorm((12, 12))),
    Op("layer_norm no bias", lambda: nn.LayerNorm(40, bias=False, eps=1e-3), (75, 40)),
    Op("layer_norm no affine", lambda: nn.LayerNorm(150, elementwise_affine=False), LINE),
    Op("group_norm", lambda: nn.GroupNorm(2, 4)),
    Op("group_norm 2-d input", lambda: nn.GroupNorm(1, 40, eps=1e-3), (75, 40)),
    Op("group_norm no affine", lambda: nn.GroupNorm(2, 4, affine=False), VOLUME),
    Op("instance_norm1d", lambda: nn.InstanceNorm1d(4), LINE),
    Op("instance_norm2d", lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    Op("instance_norm2d frozen", lambda: frozen(nn.InstanceNorm2d(4, affine=True, track_running_stats=True))),
    Op("instance_norm3d", lambda: nn.InstanceNorm3d(4, affine=True), VOLUME),
    Op("rms_norm", lambda: nn.RMSNorm((12, 12), eps=1e-3)),
    Op("rms_norm no affine", lambda: nn.RMSNorm(40, elementwise_affine=False), (75, 40)),
    Op("silu", nn.SiLU),
    Op("gelu", nn.GELU),
    Op("gelu tanh", lambda: nn.GELU("tanh")),
    Op("hardswish", nn.Hardswish),
    Op("sigmoid", nn.Sigmoid),
    Op("sigmoid method", lambda: Tensor.sigmoid),
    Op("tanh", nn.Tanh),
    Op("mish", nn.Mish),
    Op("elu", lambda: nn.ELU(0.7)),
    Op("celu", lambda: nn.CELU(0.7)),
    Op("selu", nn.SELU),
    Op("softplus", lambda: nn.Softplus(beta=2, threshold=3)),
    Op("softsign", nn.Softsign),
    Op("tanhshrink", nn.Tanhshrink),
    Op("sin", lambda: torch.sin),
    Op("norm of vectors", lambda: lambda x: x.norm(dim=-1), (60, 40)),
    Op("norm of maps", lambda: lambda x: torch.norm(x, p=2, dim=(2, 3), keepdim=True)),
    Op("norm of all", lambda: torch.linalg.vector_norm),
    Op("norm of linalg", lambda: lambda x: torch.linalg.norm(x, dim=1, keepdim=True), (4, 40, 20)),
    Op("std", lambda: lambda x: x.std((0, 2, 3))),
    Op("std of all", lambda: lambda x: torch.std(x, False)),
    Op("std with correction", lambda: lambda x: torch.std(x, -1, correction=3, keepdim=True), (60, 40)),
    Op("var", lambda: lambda x: x.var((0, 2, 3))),
    Op("var with correction", lambda: lambda x: torch.var(x, -1, correction=3, keepdim=True), (60, 40)),
    Op("rows over roots", lambda: lambda x: x / (3 + x.mean(-1, keepdim=True)).sqrt(), (40, 80)),
    Op("product with itself", lambda: lambda x: x * x, (40, 80)),
    Op("cosine_similarity", lambda: lambda x: F.cosine_similarity(x, x.roll(1, 0), dim=-1), (60, 40)),
    Op("normalize", lambda: lambda x: F.normalize(x, dim=1), (3, 60, 40)),
    Op("normalize to embeddings", lambda: lambda x: F.normalize(x, dim=1), (60, 40), "embeddings"),
    Op("erf", lambda: torch.erf),
    Op("glu", lambda: nn.GLU(1)),
    Op("prelu", lambda: nn.PReLU(4, 0.3)),
    Op("log_sigmoid", nn.LogSigmoid),
    Op("softmax", lambda: nn.Softmax(-1)),
    Op("softmin", lambda: nn.Softmin(1), LINE),
    Op("log_softmax", lambda: nn.LogSoftmax(1)),
    Op("logsumexp", lambda: lambda x: torch.logsumexp(x, 1)),
    Op("cross_entropy", lambda: Loss(nn.CrossEntropyLoss(), (20, 150)), (20, 150)),
    Op("cross_entropy map", lambda: Loss(nn.CrossEntropyLoss(ignore_index=2, reduction="sum"), MAP)),
    Op(
        "cross_entropy smoothed",
        lambda: Loss(nn.CrossEntropyLoss(torch.rand(150), label_smoothing=0.2, reduction="none"), (20, 150)),
        (20, 150),
    ),
    Op("cross_entropy probabilities", lambda: Loss(nn.CrossEntropyLoss(), MAP, probabilities=True)),
    Op("cross_entropy to distributions", lambda: ToTarget(F.cross_entropy, MAP, distribution, label_smoothing=0.1)),
    Op("mse_loss", lambda: ToTarget(F.mse_loss, MAP)),
    Op("mse_loss expanded", lambda: ToTarget(lambda x, t: F.mse_loss(x, t[:, :1].expand_as(x), reduction="none"), MAP)),
    Op("smooth_l1_loss", lambda: ToTarget(F.smooth_l1_loss, MAP, beta=0.5, reduction="sum")),
    Op("huber_loss", lambda: ToTarget(F.huber_loss, MAP, delta=0.8)),
    Op("soft_margin_loss", lambda: ToTarget(F.soft_margin_loss, MAP, torch.sign, reduction="none")),
    Op("kl_div", lambda: ToTarget(F.kl_div, MAP, distribution, reduction="batchmean")),
    Op("kl_div log_target", lambda: ToTarget(F.kl_div, MAP, reduction="sum", log_target=True)),
    Op("bce_with_logits", lambda: ToTarget(F.binary_cross_entropy_with_logits, MAP, zero_one)),
    Op("dice loss", lambda: ToTarget(dice, MAP, zero_one)),
    Op("tversky loss", lambda: ToTarget(dice, MAP, zero_one, falsely=0.7)),
    Op("squeeze-excitation", Scaled),
    Op("affine", Affine),
    Op("square", lambda: lambda x: x * x),
    Op("cube", lambda: lambda x: x**3),
    Op("pow", lambda: lambda x: torch.pow(x, 4)),
]
PRODUCTS = [
    Op("matmul", lambda: lambda x: x @ x),
    Op("matmul with weight", WeightProduct),
    Op("mm", lambda: lambda x: torch.mm(x, x), (40, 40)),
    Op("bmm", lambda: lambda x: x.bmm(x), (3, 20, 20)),
    Op("addmm", lambda: lambda x: torch.addmm(x, x, x, beta=0.5, alpha=2), (40, 40)),
    Op("addbmm", lambda: lambda x: torch.addbmm(x[0], x, x), (3, 20, 20)),
    Op("baddbmm", lambda: lambda x: x.baddbmm(x, x), (3, 20, 20)),
    Op("einsum", lambda: lambda x: torch.einsum("bchw,bcvw->bchv", x, x)),
    Op("grouped_mm", Experts, (40, 24)),
    Op("attention", Attention, stored="scores"),
    Op("attention causal", lambda: Attention(is_causal=True, scale=0.5), stored="scores"),
]
PACKED += PRODUCTS
EXACT = [
    Op("relu", nn.ReLU, stored="exact"),
    Op("relu method", lambda: Tensor.relu, stored="exact"),
    Op("relu6", nn.ReLU6, stored="exact"),
    Op("hardtanh", lambda: nn.Hardtanh(-0.4, 0.9), stored="exact"),
    Op("hardsigmoid", nn.Hardsigmoid, stored="exact"),
    Op("leaky_relu", lambda: nn.LeakyReLU(0.2), stored="exact"),
    Op("abs", lambda: torch.abs, stored="exact"),
    Op("l1_loss", lambda: ToTarget(F.l1_loss, MAP), stored="exact"),
    Op("clamp", lambda: lambda x: x.clamp(-0.5, 0.7), stored="exact"),
    Op("clamp min", lambda: lambda x: torch.clamp(x, min=0.1), stored="exact"),
    Op("clamp_min", lambda: lambda x: x.clamp_min(0.1), stored="exact"),
    Op("clamp_max", lambda: lambda x: torch.clamp_max(x, 0.1), stored="exact"),
    Op("dropout", lambda: nn.Dropout(0.3), stored="exact"),
    Op("dropout1d", lambda: nn.Dropout1d(0.3), LINE, "exact"),
    Op("dropout2d", lambda: nn.Dropout2d(0.3), (6, 40, 5, 5), "exact"),
    Op("dropout3d", lambda: nn.Dropout3d(0.3), VOLUME, "exact"),
    Op("max_pool1d", lambda: nn.MaxPool1d(4, 2, 1, dilation=1), LINE, "exact"),
    Op("max_pool2d", lambda: nn.MaxPool2d(2), stored="exact"),
    Op(
        "max_pool2d dilated",
        lambda: nn.MaxPool2d((3, 2), (2, 1), (1, 1), dilation=(2, 3), ceil_mode=True),
        stored="exact",
    ),
    Op("max_pool2d overlapping", lambda: nn.MaxPool2d(3, 1, 1), stored="exact"),
    Op("max_pool3d", lambda: nn.MaxPool3d(3, 2, 1, ceil_mode=True), VOLUME, "exact"),
    Op("adaptive_max_pool1d", lambda: nn.AdaptiveMaxPool1d(7), LINE, "exact"),
    Op("adaptive_max_pool2d", lambda: nn.AdaptiveMaxPool2d((None, 1)), stored="exact"),
    Op("adaptive_max_pool3d", lambda: nn.AdaptiveMaxPool3d(3), VOLUME, "exact"),
]
NOTHING = [
    Op("avg_pool1d", lambda: nn.AvgPool1d(3, 2, 1), LINE, "nothing"),
    Op("avg_pool2d", lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), stored="nothing"),
    Op("avg_pool2d divisor", lambda: nn.AvgPool2d(2, divisor_override=3), stored="nothing"),
    Op("avg_pool3d", lambda: nn.AvgPool3d(2), VOLUME, "nothing"),
    Op("adaptive_avg_pool1d", lambda: nn.AdaptiveAvgPool1d(7), LINE, "nothing"),
    Op("adaptive_avg_pool2d", lambda: nn.AdaptiveAvgPool2d((5, 3)), stored="nothing"),
    Op("adaptive_avg_pool2d global", lambda: nn.AdaptiveAvgPool2d(1), stored="nothing"),
    Op("interpolate area", lambda: lambda x: F.interpolate(x, (5, 7), mode="area"), stored="nothing"),
    Op("pad reflect", lambda: lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect"), stored="nothing"),
    Op("pad replicate", lambda: lambda x: F.pad(x, (1, 2, 0, 1), mode="replicate"), stored="nothing"),
    Op("pad constant", lambda: lambda x: F.pad(x, (1, 2, 0, 1), value=2.0), stored="nothing"),
    Op("adaptive_avg_pool3d", lambda: nn.AdaptiveAvgPool3d((2, None, 3)), VOLUME, "nothing"),
]
FALLBACK = [
    Op("exp", lambda: torch.exp),
    Op("square method", lambda: Tensor.square),
]
INPLACE = [
    Op("relu_", lambda: nn.ReLU(True), stored="exact"),
    Op("relu_ method", lambda: Tensor.relu_, stored="exact"),
    Op("abs_", lambda: torch.abs_, stored="exact"),
    Op("absolute_", lambda: Tensor.absolute_, stored="exact"),
    Op("leaky_relu_", lambda: nn.LeakyReLU(0.1, True), stored="exact"),
    Op("hardtanh_", lambda: nn.Hardtanh(inplace=True), stored="exact"),
    Op("clamp_", lambda: lambda x: x.clamp_(-0.5, 0.7), stored="exact"),
    Op("dropout_", lambda: nn.Dropout(0.4, True), stored="exact"),
    Op("dropout2d_", lambda: nn.Dropout2d(0.4, True), (6, 40, 5, 5), "exact"),
    Op("silu_", lambda: nn.SiLU(True)),
    Op("hardswish_", lambda: nn.Hardswish(True)),
    Op("mish_", lambda: nn.Mish(True)),
    Op("elu_", lambda: nn.ELU(inplace=True)),
    Op("sigmoid_", lambda: torch.sigmoid_),
    Op("tanh_", lambda: Tensor.tanh_),
    Op("squeeze-excitation_", lambda: Scaled(inplace=True)),
]
ALL = [*PACKED, *EXACT, *NOTHING, *FALLBACK, *INPLACE]
