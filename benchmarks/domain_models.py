"""Models of other fields, as their libraries ship them, with their losses: small, with random weights and random data.

    pip install '.[domains]'
    pip install --no-deps segmentation-models-pytorch timm torchvision ultralytics ultralytics-thop

A builder imports its library when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import brevitas.nn as qnn
import torch
import torch.nn.functional as F
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat, Uint8ActPerTensorFloat
from torch import Tensor, nn

from benchmarks.small_models import of_transformers, tokens
from benchmarks.step import Model, Step, supervised

# --- Medical images in 3-D: MONAI -------------------------------------------------------------------------------------


def _volumes(size: int = 32) -> tuple[Tensor, Tensor]:
    """One-channel volumes (2, 1, size, 32, 32), and one of two classes for each voxel."""
    return torch.randn(2, 1, size, 32, 32), torch.randint(0, 2, (2, 1, size, 32, 32))


def _dice_cross_entropy(model: nn.Module, size: int = 32) -> Step:
    from monai.losses import DiceCELoss

    criterion = DiceCELoss(to_onehot_y=True, softmax=True)
    return Step(model, _volumes(size), supervised(criterion))


def monai_unet() -> Step:
    from monai.networks.nets import UNet

    return _dice_cross_entropy(UNet(3, 1, 2, channels=(16, 32, 64), strides=(2, 2), num_res_units=2))


def monai_unet_autocast() -> Step:
    """MONAI's U-Net under autocast to bfloat16."""
    model, batch, loss, _ = monai_unet()

    def in_autocast(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    return Step(model, batch, in_autocast)


def monai_unet_of_five() -> Step:
    from monai.losses import DiceCELoss, TverskyLoss
    from monai.networks.nets import UNet

    dice, tversky = (loss(to_onehot_y=True, softmax=True) for loss in (DiceCELoss, TverskyLoss))
    model = UNet(3, 1, 5, channels=(16, 32, 64), strides=(2, 2), num_res_units=2)
    batch = torch.randn(2, 1, 32, 32, 32), torch.randint(0, 5, (2, 1, 32, 32, 32))
    return Step(model, batch, supervised(lambda logits, y: dice(logits, y) + tversky(logits, y)))


def monai_segresnet() -> Step:
    from monai.losses import TverskyLoss
    from monai.networks.nets import SegResNet

    criterion = TverskyLoss(to_onehot_y=True, softmax=True)
    model = SegResNet(3, init_filters=8, in_channels=1, out_channels=2, blocks_down=(1, 1, 1), blocks_up=(1, 1))
    return Step(model, _volumes(), supervised(criterion))


def monai_dynunet() -> Step:
    from monai.losses import DeepSupervisionLoss, DiceCELoss
    from monai.networks.nets import DynUNet

    criterion = DeepSupervisionLoss(DiceCELoss(to_onehot_y=True, softmax=True))
    model = DynUNet(
        3, 1, 2, kernel_size=[3, 3, 3, 3], strides=[1, 2, 2, 2], upsample_kernel_size=[2, 2, 2],
        filters=[8, 16, 32, 64], deep_supervision=True, deep_supr_num=1,
    )  # fmt: skip
    return Step(model, _volumes(), supervised(lambda outputs, y: criterion(list(outputs.unbind(1)), y)))


def monai_unetr() -> Step:
    from monai.networks.nets import UNETR

    return _dice_cross_entropy(
        UNETR(1, 2, (32, 32, 32), feature_size=8, hidden_size=48, mlp_dim=96, num_heads=4, proj_type="conv")
    )


def monai_swin_unetr() -> Step:
    from monai.networks.nets import SwinUNETR

    model = SwinUNETR(in_channels=1, out_channels=2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(2, 2, 4, 4))
    return _dice_cross_entropy(model, size=64)


# --- Segmentation: segmentation-models-pytorch ------------------------------------------------------------------------


def _segmentation(kind: str, encoder: str) -> Step:
    import segmentation_models_pytorch as smp

    model = getattr(smp, kind)(encoder, encoder_weights=None, classes=3)
    batch = torch.randn(4, 3, 64, 64), torch.randint(0, 3, (4, 64, 64))
    dice = smp.losses.DiceLoss("multiclass")
    return Step(model, batch, supervised(lambda logits, y: dice(logits, y) + F.cross_entropy(logits, y)))


# --- Diffusion: diffusers ---------------------------------------------------------------------------------------------


def _denoising(model: nn.Module, x: Tensor, **inputs: Tensor) -> Step:
    """Mean squared error of the noise that a model predicts."""
    batch = {"sample": x, "noise": torch.randn_like(x), **inputs}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x, noise, inputs = batch["sample"], batch["noise"], {name: batch[name] for name in inputs_of_model}
        return F.mse_loss(model(x, **inputs).sample, noise)

    inputs_of_model = tuple(inputs)
    return Step(model, batch, loss)


def diffusers_unet() -> Step:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=32, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )  # fmt: skip
    return _denoising(model, torch.randn(4, 3, 32, 32), timestep=torch.randint(0, 1000, (4,)))


def diffusers_conditional_unet() -> Step:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip
    text, time = torch.randn(4, 16, 32), torch.randint(0, 1000, (4,))
    return _denoising(model, torch.randn(4, 4, 16, 16), timestep=time, encoder_hidden_states=text)


def diffusers_autoencoder() -> Step:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, norm_num_groups=8,
    )  # fmt: skip

    def loss(model: Any, x: Tensor) -> Tensor:
        posterior = model.encode(x).latent_dist
        return F.mse_loss(model.decode(posterior.sample()).sample, x) + 1e-3 * posterior.kl().mean()

    return Step(model, torch.randn(4, 3, 32, 32), loss)


def diffusers_dit() -> Step:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2, sample_size=16,
        patch_size=2, num_embeds_ada_norm=1000, norm_num_groups=4,
    )  # fmt: skip
    time, label = torch.randint(0, 1000, (4,)), torch.randint(0, 10, (4,))
    return _denoising(model, torch.randn(4, 4, 16, 16), timestep=time, class_labels=label)


def diffusers_sd3() -> Step:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=64, pooled_projection_dim=32,
        pos_embed_max_size=16,
    )  # fmt: skip
    return _denoising(
        model, torch.randn(4, 4, 16, 16), encoder_hidden_states=torch.randn(4, 16, 32),
        pooled_projections=torch.randn(4, 32), timestep=torch.randint(0, 1000, (4,)),
    )  # fmt: skip


def diffusers_flux() -> Step:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    return _denoising(
        model, torch.randn(4, 64, 16), encoder_hidden_states=torch.randn(4, 16, 32),
        pooled_projections=torch.randn(4, 32), timestep=torch.rand(4), img_ids=torch.randn(64, 3),
        txt_ids=torch.zeros(16, 3),
    )  # fmt: skip


def diffusers_video_unet() -> Step:
    from diffusers import UNet3DConditionModel

    model = UNet3DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip
    text, time = torch.randn(1, 16, 32), torch.randint(0, 1000, (1,))
    return _denoising(model, torch.randn(1, 4, 4, 16, 16), timestep=time, encoder_hidden_states=text)


# --- Detection: Ultralytics -------------------------------------------------------------------------------------------


def _detection(name: str) -> Step:
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel

    model = DetectionModel(name, ch=3, nc=4, verbose=False)
    model.args = get_cfg()  # gains of the parts of its loss
    batch = {
        "img": torch.rand(4, 3, 64, 64),
        "batch_idx": torch.arange(8) // 2,
        "cls": torch.randint(0, 4, (8, 1)).float(),
        "bboxes": torch.rand(8, 4) * 0.4 + 0.3,
    }

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        total: Tensor = model(batch)[0]
        return total.sum()

    return Step(model, batch, loss)


# --- Graphs: PyG ------------------------------------------------------------------------------------------------------


def _graph(convolution: str, **settings: int) -> Step:
    import torch_geometric.nn as gnn

    nodes, edges, classes = 512, 4096, 8
    kind = getattr(gnn, convolution)
    width = 32 // settings.get("heads", 1)
    model = gnn.Sequential(
        "x, edge_index",
        [
            (kind(32, width, **settings), "x, edge_index -> x"),
            (nn.BatchNorm1d(32), "x -> x"),
            nn.ReLU(),
            (kind(32, width, **settings), "x, edge_index -> x"),
            nn.ELU(),
            nn.Linear(32, classes),
        ],
    )
    x, edge_index = torch.randn(nodes, 32), torch.randint(0, nodes, (2, edges))
    y = torch.randint(0, classes, (nodes,))
    return Step(model, (x, edge_index, y), lambda model, batch: F.cross_entropy(model(*batch[:2]), batch[2]))


# --- Language, speech, proteins, images: transformers -----------------------------------------------------------------

_SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_DECODER = {
    **{**_SIZE, "vocab_size": 200, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 64, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_MIXTRAL = partial(of_transformers, "MixtralForCausalLM", "MixtralConfig", tokens, num_local_experts=4, **_DECODER)
_QWEN = partial(of_transformers, "Qwen3MoeForCausalLM", "Qwen3MoeConfig", tokens, **_EXPERTS, **_DECODER)


def _speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(8, 40, 128), "labels": tokens()["labels"]}


def _captions() -> dict[str, Any]:
    ids = tokens()["input_ids"]
    return {"input_ids": ids, "pixel_values": torch.randn(8, 3, 32, 32), "return_loss": True}


def _pictures() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(0, 10, (8,))}


_OF_TRANSFORMERS = {
    "Whisper": of_transformers(
        *("WhisperForConditionalGeneration", "WhisperConfig", _speech),
        **{"vocab_size": 200, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
        **{"decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "num_mel_bins": 40},
        **{"max_source_positions": 64, "max_target_positions": 64, "pad_token_id": 0, "bos_token_id": 1},
        **{"eos_token_id": 2, "decoder_start_token_id": 1, "use_cache": False},
    ),
    "CLIP": of_transformers(
        *("CLIPModel", "CLIPConfig", _captions),
        text_config={
            **{**_SIZE, "intermediate_size": 128, "vocab_size": 200, "max_position_embeddings": 64},
            **{"eos_token_id": 2, "bos_token_id": 1},
        },
        vision_config={**_SIZE, "intermediate_size": 128, "image_size": 32, "patch_size": 4},
        projection_dim=32,
    ),
    "T5": of_transformers(
        *("T5ForConditionalGeneration", "T5Config", partial(tokens, labels=32)),
        **{"vocab_size": 200, "d_model": 64, "d_kv": 16, "d_ff": 192, "num_layers": 2, "num_heads": 4},
        decoder_start_token_id=0,
    ),
    "Mixtral": _MIXTRAL(),
    "Mixtral, checkpoints": _MIXTRAL(checkpoints=True),
    "Qwen3-MoE": _QWEN(),
    "Qwen3-MoE, checkpoints": _QWEN(checkpoints=True),
    "Gemma 3": of_transformers("Gemma3ForCausalLM", "Gemma3TextConfig", tokens, sliding_window=32, **_DECODER),
    "Mamba-2": of_transformers(
        *("Mamba2ForCausalLM", "Mamba2Config", tokens),
        **{"vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16},
        **{"state_size": 16, "n_groups": 1, "chunk_size": 32, "use_cache": False},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "ESM-2": of_transformers(
        *("EsmForMaskedLM", "EsmConfig", partial(tokens, 32)),
        **{**_SIZE, "vocab_size": 33, "intermediate_size": 256, "max_position_embeddings": 128},
        **{"position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 32, "pad_token_id": 1},
    ),
    "DINOv2": of_transformers(
        *("Dinov2ForImageClassification", "Dinov2Config", _pictures),
        **{**_SIZE, "mlp_ratio": 4, "image_size": 32, "patch_size": 4, "num_labels": 10},
    ),
}


# --- Quantization-aware training: Brevitas ----------------------------------------------------------------------------

_WEIGHT = {"weight_quant": Int8WeightPerTensorFloat, "weight_bit_width": 4}


def _quant_conv(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        qnn.QuantConv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False, **_WEIGHT),
        nn.BatchNorm2d(outputs),
        qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, bit_width=4),
    )


def _classified(features: nn.Module, width: int) -> Step:
    model = nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), qnn.QuantLinear(width, 10, **_WEIGHT))
    return Step(model, (torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))), supervised(F.cross_entropy))


def brevitas_mobilenet() -> Step:
    blocks = [_quant_conv(3, 16)]
    for inputs, outputs, stride in ((16, 32, 1), (32, 64, 2), (64, 64, 1)):
        blocks += [_quant_conv(inputs, inputs, 3, stride, groups=inputs), _quant_conv(inputs, outputs, 1)]
    return _classified(nn.Sequential(*blocks), 64)


class _QuantResidual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = _quant_conv(width, width)
        self.second = nn.Sequential(
            qnn.QuantConv2d(width, width, 3, padding=1, bias=False, **_WEIGHT), nn.BatchNorm2d(width)
        )
        self.relu = qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, bit_width=4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(x + self.second(self.first(x)))
        return out


def brevitas_resnet() -> Step:
    blocks = (_quant_conv(3, 32), _QuantResidual(32), _quant_conv(32, 64, stride=2), _QuantResidual(64))
    return _classified(nn.Sequential(*blocks), 64)


class _QuantSequence(nn.Module):
    """A layer over sequences, and a linear head over the mean of its output.

    Args:
        layer: module of Brevitas.
        call: runs it on (B, T, 64) and returns (B, T, F).
        width: F.
    """

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.layer, self.call = layer, call
        self.head = qnn.QuantLinear(width, 10, **_WEIGHT)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.call(self.layer, x).mean(1))
        return logits


def _sequence(layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], width: int) -> Step:
    batch = torch.randn(128, 16, 64), torch.randint(0, 10, (128,))
    return Step(_QuantSequence(layer, call, width), batch, supervised(F.cross_entropy))


def brevitas_lstm() -> Step:
    lstm = qnn.QuantLSTM(
        64, 64, batch_first=True, weight_quant=Int8WeightPerTensorFloat, io_quant=Int8ActPerTensorFloat,
        gate_acc_quant=Int8ActPerTensorFloat, sigmoid_quant=Uint8ActPerTensorFloat, tanh_quant=Int8ActPerTensorFloat,
        cell_state_quant=Int8ActPerTensorFloat,
    )  # fmt: skip
    return _sequence(lstm, lambda layer, x: layer(x)[0], 64)


def brevitas_attention() -> Step:
    attention = qnn.QuantMultiheadAttention(64, 4, batch_first=True)
    return _sequence(attention, lambda layer, x: layer(x, x, x)[0], 64)


class _QuantUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top, self.down = _quant_conv(3, 16), _quant_conv(16, 32, stride=2)
        self.up = qnn.QuantConvTranspose2d(32, 16, 2, 2, **_WEIGHT)
        self.last = nn.Sequential(_quant_conv(32, 16), qnn.QuantConv2d(16, 3, 1, **_WEIGHT))

    def forward(self, x: Tensor) -> Tensor:
        top = self.top(x)
        out: Tensor = self.last(torch.cat([top, self.up(self.down(top))], 1))
        return out


def brevitas_unet() -> Step:
    batch = torch.randn(4, 3, 32, 32), torch.randint(0, 3, (4, 32, 32))
    return Step(_QuantUNet(), batch, supervised(F.cross_entropy))


def _of(libraries: str, models: dict[str, Callable[[], Step]]) -> dict[str, Model]:
    return {name: Model(tuple(libraries.split()), make) for name, make in models.items()}


#: The models by name.
DOMAINS: dict[str, Model] = {
    **_of(
        "monai",
        {
            "MONAI UNet": monai_unet,
            "MONAI UNet, bf16": monai_unet_autocast,
            "MONAI UNet, 5 classes": monai_unet_of_five,
            "MONAI SegResNet": monai_segresnet,
            "MONAI DynUNet": monai_dynunet,
        },
    ),
    **_of("monai einops", {"MONAI UNETR": monai_unetr, "MONAI SwinUNETR": monai_swin_unetr}),
    **_of(
        "segmentation_models_pytorch timm torchvision",
        {
            "smp Unet": partial(_segmentation, "Unet", "resnet18"),
            "smp FPN": partial(_segmentation, "FPN", "mobilenet_v2"),
            "smp DeepLabV3+": partial(_segmentation, "DeepLabV3Plus", "resnet18"),
        },
    ),
    **_of(
        "diffusers",
        {
            "diffusers UNet2D": diffusers_unet,
            "diffusers UNet2DCondition": diffusers_conditional_unet,
            "diffusers AutoencoderKL": diffusers_autoencoder,
            "diffusers DiT": diffusers_dit,
            "diffusers SD3": diffusers_sd3,
            "diffusers Flux": diffusers_flux,
            "diffusers UNet3D": diffusers_video_unet,
        },
    ),
    **_of(
        "ultralytics torchvision", {f"YOLO{name}": partial(_detection, f"yolo{name}n.yaml") for name in ("v8", "11")}
    ),
    **_of(
        "torch_geometric",
        {
            "PyG GCN": partial(_graph, "GCNConv"),
            "PyG GATv2": partial(_graph, "GATv2Conv", heads=4),
            "PyG TransformerConv": partial(_graph, "TransformerConv", heads=4),
        },
    ),
    **_OF_TRANSFORMERS,
    **_of(
        "",
        {
            "Brevitas MobileNet": brevitas_mobilenet,
            "Brevitas ResNet": brevitas_resnet,
            "Brevitas LSTM": brevitas_lstm,
            "Brevitas MultiheadAttention": brevitas_attention,
            "Brevitas U-Net": brevitas_unet,
        },
    ),
}
