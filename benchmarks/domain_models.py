"""Models of other fields, as their libraries ship them, with their losses: small, with random weights and random data.

    pip install '.[domains]'
    pip install --no-deps segmentation-models-pytorch timm torchvision ultralytics ultralytics-thop

A builder imports its library when it is called; :func:`missing` says which library is not there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import brevitas.nn as qnn
import torch
import torch.nn.functional as F
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat, Uint8ActPerTensorFloat
from torch import Tensor, nn

from recipes.torchvision_ops import declare_missing_ops

declare_missing_ops()  # transformers, timm and ultralytics import torchvision if it is there

#: The loss of a model on a batch; it need not call the model's own ``forward``.
Loss = Callable[[nn.Module, Any], Tensor]


class Step(NamedTuple):
    """A model, a batch, and the loss of a training step.

    Args:
        model: the model, in training mode.
        batch: tensors, or containers of tensors.
        loss: maps the model and the batch to a scalar.
    """

    model: nn.Module
    batch: Any
    loss: Loss


class Domain(NamedTuple):
    """A model of a field.

    Args:
        libraries: modules that the builder imports.
        build: makes the model and its step.
    """

    libraries: tuple[str, ...]
    build: Callable[[], Step]


def missing(domain: Domain) -> list[str]:
    """Return the libraries of a model that are not installed."""
    return [name for name in domain.libraries if importlib.util.find_spec(name) is None]


def build(domain: Domain, seed: int = 0) -> Step:
    """Build a model and its step from a seed, in training mode."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        step = domain.build()
    step.model.train()
    return step


def _supervised(criterion: Callable[[Any, Tensor], Tensor]) -> Loss:
    """Return the loss of a model's output for x on a batch (x, y)."""
    return lambda model, batch: criterion(model(batch[0]), batch[1])


def _own_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Loss that a model of transformers computes itself."""
    loss: Tensor = model(**batch).loss
    return loss


# --- Medical images in 3-D: MONAI -------------------------------------------------------------------------------------


def _volumes(size: int = 32) -> tuple[Tensor, Tensor]:
    """One-channel volumes (2, 1, size, 32, 32), and one of two classes for each voxel."""
    return torch.randn(2, 1, size, 32, 32), torch.randint(0, 2, (2, 1, size, 32, 32))


def _dice_cross_entropy(model: nn.Module, size: int = 32) -> Step:
    from monai.losses import DiceCELoss

    criterion = DiceCELoss(to_onehot_y=True, softmax=True)
    return Step(model, _volumes(size), _supervised(criterion))


def monai_unet() -> Step:
    from monai.networks.nets import UNet

    return _dice_cross_entropy(UNet(3, 1, 2, channels=(16, 32, 64), strides=(2, 2), num_res_units=2))


def monai_unet_of_five() -> Step:
    from monai.losses import DiceCELoss, TverskyLoss
    from monai.networks.nets import UNet

    dice, tversky = (loss(to_onehot_y=True, softmax=True) for loss in (DiceCELoss, TverskyLoss))
    model = UNet(3, 1, 5, channels=(16, 32, 64), strides=(2, 2), num_res_units=2)
    batch = torch.randn(2, 1, 32, 32, 32), torch.randint(0, 5, (2, 1, 32, 32, 32))
    return Step(model, batch, _supervised(lambda logits, y: dice(logits, y) + tversky(logits, y)))


def monai_segresnet() -> Step:
    from monai.losses import TverskyLoss
    from monai.networks.nets import SegResNet

    criterion = TverskyLoss(to_onehot_y=True, softmax=True)
    model = SegResNet(3, init_filters=8, in_channels=1, out_channels=2, blocks_down=(1, 1, 1), blocks_up=(1, 1))
    return Step(model, _volumes(), _supervised(criterion))


def monai_dynunet() -> Step:
    from monai.losses import DeepSupervisionLoss, DiceCELoss
    from monai.networks.nets import DynUNet

    criterion = DeepSupervisionLoss(DiceCELoss(to_onehot_y=True, softmax=True))
    model = DynUNet(
        3, 1, 2, kernel_size=[3, 3, 3, 3], strides=[1, 2, 2, 2], upsample_kernel_size=[2, 2, 2],
        filters=[8, 16, 32, 64], deep_supervision=True, deep_supr_num=1,
    )  # fmt: skip
    return Step(model, _volumes(), _supervised(lambda outputs, y: criterion(list(outputs.unbind(1)), y)))


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
    return Step(model, batch, _supervised(lambda logits, y: dice(logits, y) + F.cross_entropy(logits, y)))


def smp_unet() -> Step:
    return _segmentation("Unet", "resnet18")


def smp_fpn() -> Step:
    return _segmentation("FPN", "mobilenet_v2")


def smp_deeplab() -> Step:
    return _segmentation("DeepLabV3Plus", "resnet18")


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


def yolov8() -> Step:
    return _detection("yolov8n.yaml")


def yolo11() -> Step:
    return _detection("yolo11n.yaml")


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


def pyg_gcn() -> Step:
    return _graph("GCNConv")


def pyg_gatv2() -> Step:
    return _graph("GATv2Conv", heads=4)


def pyg_transformer() -> Step:
    return _graph("TransformerConv", heads=4)


# --- Language, speech, proteins, images: transformers -----------------------------------------------------------------


def _tokens(vocabulary: int = 200, batch: int = 8, length: int = 64) -> Tensor:
    return torch.randint(3, vocabulary, (batch, length))


def _language_model(kind: str, config: str, **settings: Any) -> Step:
    import transformers

    model = getattr(transformers, kind)(getattr(transformers, config)(vocab_size=200, use_cache=False, **settings))
    ids = _tokens()
    return Step(model, {"input_ids": ids, "labels": ids}, _own_loss)


_DECODER = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def _with_checkpoints(step: Step) -> Step:
    step.model.gradient_checkpointing_enable()
    return step


def mixtral() -> Step:
    return _language_model("MixtralForCausalLM", "MixtralConfig", **_DECODER, num_local_experts=4)


def mixtral_checkpointed() -> Step:
    return _with_checkpoints(mixtral())


def qwen3_moe() -> Step:
    return _language_model(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_DECODER, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=64,
    )  # fmt: skip


def qwen3_moe_checkpointed() -> Step:
    return _with_checkpoints(qwen3_moe())


def gemma3() -> Step:
    return _language_model("Gemma3ForCausalLM", "Gemma3TextConfig", **_DECODER, sliding_window=32)


def mamba2() -> Step:
    return _language_model(
        "Mamba2ForCausalLM", "Mamba2Config", hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16,
        state_size=16, n_groups=1, chunk_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def t5() -> Step:
    import transformers

    config = transformers.T5Config(
        vocab_size=200, d_model=64, d_kv=16, d_ff=192, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    return Step(model, {"input_ids": _tokens(), "labels": _tokens(length=32)}, _own_loss)


def whisper() -> Step:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=200, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, num_mel_bins=40, max_source_positions=64,
        max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        use_cache=False,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    return Step(model, {"input_features": torch.randn(8, 40, 128), "labels": _tokens()}, _own_loss)


def clip() -> Step:
    import transformers

    part = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config={**part, "vocab_size": 200, "max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 1},
        vision_config={**part, "image_size": 32, "patch_size": 4},
        projection_dim=32,
    )
    model = transformers.CLIPModel(config)
    batch = {"input_ids": _tokens(), "pixel_values": torch.randn(8, 3, 32, 32), "return_loss": True}
    return Step(model, batch, _own_loss)


def esm2() -> Step:
    import transformers

    config = transformers.EsmConfig(
        vocab_size=33, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=128, position_embedding_type="rotary", token_dropout=True, mask_token_id=32,
        pad_token_id=1,
    )  # fmt: skip
    model = transformers.EsmForMaskedLM(config)
    ids = _tokens(32)
    return Step(model, {"input_ids": ids, "labels": ids}, _own_loss)


def dinov2() -> Step:
    import transformers

    config = transformers.Dinov2Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, mlp_ratio=4, image_size=32, patch_size=4,
        num_labels=10,
    )  # fmt: skip
    model = transformers.Dinov2ForImageClassification(config)
    batch = {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(0, 10, (8,))}
    return Step(model, batch, _own_loss)


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
    return Step(model, (torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))), _supervised(F.cross_entropy))


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
    return Step(_QuantSequence(layer, call, width), batch, _supervised(F.cross_entropy))


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
    return Step(_QuantUNet(), batch, _supervised(F.cross_entropy))


_MONAI, _SMP, _DIFFUSERS = ("monai",), ("segmentation_models_pytorch", "timm", "torchvision"), ("diffusers",)
_YOLO, _PYG, _TRANSFORMERS = ("ultralytics", "torchvision"), ("torch_geometric",), ("transformers",)

#: The models by name.
DOMAINS: dict[str, Domain] = {
    "MONAI UNet": Domain(_MONAI, monai_unet),
    "MONAI UNet, 5 classes": Domain(_MONAI, monai_unet_of_five),
    "MONAI SegResNet": Domain(_MONAI, monai_segresnet),
    "MONAI DynUNet": Domain(_MONAI, monai_dynunet),
    "MONAI UNETR": Domain((*_MONAI, "einops"), monai_unetr),
    "MONAI SwinUNETR": Domain((*_MONAI, "einops"), monai_swin_unetr),
    "smp Unet": Domain(_SMP, smp_unet),
    "smp FPN": Domain(_SMP, smp_fpn),
    "smp DeepLabV3+": Domain(_SMP, smp_deeplab),
    "diffusers UNet2D": Domain(_DIFFUSERS, diffusers_unet),
    "diffusers UNet2DCondition": Domain(_DIFFUSERS, diffusers_conditional_unet),
    "diffusers AutoencoderKL": Domain(_DIFFUSERS, diffusers_autoencoder),
    "diffusers DiT": Domain(_DIFFUSERS, diffusers_dit),
    "diffusers SD3": Domain(_DIFFUSERS, diffusers_sd3),
    "diffusers Flux": Domain(_DIFFUSERS, diffusers_flux),
    "diffusers UNet3D": Domain(_DIFFUSERS, diffusers_video_unet),
    "YOLOv8": Domain(_YOLO, yolov8),
    "YOLO11": Domain(_YOLO, yolo11),
    "PyG GCN": Domain(_PYG, pyg_gcn),
    "PyG GATv2": Domain(_PYG, pyg_gatv2),
    "PyG TransformerConv": Domain(_PYG, pyg_transformer),
    "Whisper": Domain(_TRANSFORMERS, whisper),
    "CLIP": Domain(_TRANSFORMERS, clip),
    "T5": Domain(_TRANSFORMERS, t5),
    "Mixtral": Domain(_TRANSFORMERS, mixtral),
    "Mixtral, checkpoints": Domain(_TRANSFORMERS, mixtral_checkpointed),
    "Qwen3-MoE": Domain(_TRANSFORMERS, qwen3_moe),
    "Qwen3-MoE, checkpoints": Domain(_TRANSFORMERS, qwen3_moe_checkpointed),
    "Gemma 3": Domain(_TRANSFORMERS, gemma3),
    "Mamba-2": Domain(_TRANSFORMERS, mamba2),
    "ESM-2": Domain(_TRANSFORMERS, esm2),
    "DINOv2": Domain(_TRANSFORMERS, dinov2),
    "Brevitas MobileNet": Domain((), brevitas_mobilenet),
    "Brevitas ResNet": Domain((), brevitas_resnet),
    "Brevitas LSTM": Domain((), brevitas_lstm),
    "Brevitas MultiheadAttention": Domain((), brevitas_attention),
    "Brevitas U-Net": Domain((), brevitas_unet),
}
