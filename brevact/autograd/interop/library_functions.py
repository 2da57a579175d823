"""Table of other libraries' Functions: how their gradients depend on each tensor that they save.

A row has a package's Functions. A letter stands for each argument of ``save_for_backward``, in order, None included; a
Function may save several sets of tensors, of different numbers. Sets of other numbers, and Functions of versions that
nobody has read, stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.user_lines import warn

#: The gradient is linear in the tensor, or depends on it as a norm's on its input, or a softmax's on its result.
LINEAR = "L"
#: The gradient has a smooth function of the tensor, as a SiLU's.
SMOOTH = "S"
#: Query or key of attention: its kernel computes exp(q k - lse) again.
SCORES = "Q"
#: A gradient, perhaps written over another tensor.
GRADIENT = "G"
#: Statistics, indices, weights, and tensors that are compared, divide, or from which rows are computed again.
EXACT = "-"
#: The tensor's Function is not in the table.
UNKNOWN = ""

#: By package: names of its distribution, newest first, and the first and last versions that were read.
READ = {
    "liger_kernel": ("liger-kernel", (0, 8), (0, 8)),
    "unsloth": ("unsloth", (2024, 8), (2026, 10)),
    "unsloth_zoo": ("unsloth-zoo", (2026, 10), (2026, 10)),
    "flash_attn": ("flash-attn", (2, 3), (2, 8)),
    "flash_attn_interface": ("flash-attn-3", (3, 0), (3, 0)),
    "xformers": ("xformers", (0, 0), (0, 0)),
    "fla": ("fla-core flash-linear-attention", (0, 2), (0, 6)),
    "mamba_ssm": ("mamba-ssm", (1, 2), (2, 3)),
    "causal_conv1d": ("causal-conv1d", (1, 0), (1, 7)),
    "transformer_engine": ("transformer-engine", (1, 13), (2, 20)),
    "apex": ("apex", (0, 1), (0, 1)),
    "torchao": ("torchao", (0, 18), (0, 18)),
    "spconv": ("spconv", (2, 3), (2, 3)),
    "efficientnet_pytorch": ("efficientnet-pytorch", (0, 7), (0, 7)),
    "monai": ("monai", (1, 6), (1, 6)),
    "bitsandbytes": ("bitsandbytes", (0, 50), (0, 50)),
}
#: Namespaces of operators that write to nothing but what they declare, of libraries in `READ`.
DECLARING = {"bitsandbytes"}
_TABLE = """
torch.nn.modules: _functions.SyncBatchNorm L----
timm.layers.activations_me: SwishAutoFn S, MishAutoFn S
transformers.models: bloom.modeling_bloom.GeLUFunction S, sew_d.modeling_sew_d.XSoftmax Q
liger_kernel.ops: rms_norm.LigerRMSNormFunction L-- L-, fused_add_rms_norm.LigerFusedAddRMSNormFunction L--
liger_kernel.ops: modulated_rms_norm.LigerModulatedRMSNormFunction L---- L--- L--
liger_kernel.ops: layer_norm.LigerLayerNormFunction L----, group_norm.LigerGroupNormFunction L----
liger_kernel.ops: swiglu.LigerSiLUMulFunction SL, swiglu.LigerFusedGateUpSiLUMulFunction S
liger_kernel.ops: geglu.LigerGELUMulFunction SL, mlp.LigerMLPFunction L---S, fused_moe.LigerFusedMoEFunction L--S-------
liger_kernel.ops: cross_entropy.LigerCrossEntropyFunction G
liger_kernel.ops: fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction GGG ----
liger_kernel.ops: fused_linear_jsd.LigerFusedLinearJSDFunction GG, fused_linear_kl_div.LigerFusedLinearKLDivFunction GG
liger_kernel.ops: jsd.LigerJSDFunction G, tvd.LigerTVDLossFunction G, softmax.LigerSoftmaxFunction Q
liger_kernel.ops: dyt.LigerDyTFunction S---, kl_div.LigerKLDivLossFunction -, sparsemax.LigerSparsemaxFunction -
liger_kernel.ops: relu_squared.LigerReLUSquaredFunction -, poly_norm.LigerPolyNormFunction ---
liger_kernel.ops: rope.LigerRopeFunction --, qwen2vl_mrope.LigerQwen2VLMRopeFunction --
liger_kernel.ops: tiled_mlp.LigerTiledMLPFunction -
liger_kernel.chunked_loss: cpo_loss.LigerFusedLinearCPOFunction GGG, dpo_loss.LigerFusedLinearDPOFunction GGG
liger_kernel.chunked_loss: grpo_loss.LigerFusedLinearGRPOFunction GGG, kto_loss.LigerFusedLinearKTOFunction GGG
liger_kernel.chunked_loss: orpo_loss.LigerFusedLinearORPOFunction GGG, simpo_loss.LigerFusedLinearSimPOFunction GGG
liger_kernel.chunked_loss: jsd_loss.LigerFusedLinearJSDFunction GGG
liger_kernel.chunked_loss: cosine_similarity_loss.LigerFusedLinearCosineSimilarityFunction GGG
liger_kernel.chunked_loss: fused_linear_ppo._ChunkedSelectiveLogProbFunction -----
unsloth.kernels: fast_lora.LoRA_MLP ------LSL ------LSL---, fast_lora.LoRA_QKV L------ L---------
unsloth.kernels: fast_lora.LoRA_W --L --L-, rms_layernorm.Fast_RMS_Layernorm L--, layernorm.Fast_Layernorm L----
unsloth.kernels: cross_entropy_loss.Fast_CrossEntropyLoss --- ----, rope_embedding.Slow_RoPE_Embedding --
unsloth.kernels: moe.grouped_gemm.interface.GroupedGemm L---
unsloth_zoo: fused_losses.cross_entropy_loss.UnslothFusedLoss GGG, rl_replacements.UnslothEfficientGRPO G
flash_attn: flash_attn_interface.FlashAttnFunc QQLL--, flash_attn_interface.FlashAttnQKVPackedFunc QQLL--
flash_attn: flash_attn_interface.FlashAttnKVPackedFunc QQLL--, flash_attn_interface.FlashAttnVarlenFunc QQLL----
flash_attn: flash_attn_interface.FlashAttnVarlenKVPackedFunc QQLL----
flash_attn: flash_attn_interface.FlashAttnVarlenQKVPackedFunc QQLL---, cute.interface.FlashAttnFunc QQLL-
flash_attn: cute.interface.FlashAttnVarlenFunc QQLL-----, ops.triton.layer_norm.LayerNormFn L--------
flash_attn: ops.triton.layer_norm.LayerNormLinearFn L-----, ops.triton.layernorm.LayerNormFn L----
flash_attn: ops.layer_norm.DropoutAddLayerNormFn LL------, ops.activations.SwiGLUFunction SL
flash_attn: ops.activations.GeLUFunction S-, ops.activations.FastGeLUFunction S, ops.fused_dense.FusedDenseFunc L- -
flash_attn: ops.fused_dense.FusedMLPFunc L---L ----, ops.triton.cross_entropy.CrossEntropyLoss ---
flash_attn_interface: FlashAttnFunc QQLL-, FlashAttnQKVPackedFunc QQLL-, FlashAttnVarlenFunc QQLL----- QQLL---
xformers.ops: fmha._fMHA QQLL-, swiglu_op._SwiGLUDecomposedFunc L------SLLL-, swiglu_op._SwiGLUFusedFunc L---SL
fla.modules: norm.layernorm.LayerNormFunction L----, norm.layernorm.LayerNormLinearFunction L-----
fla.modules: norm.fused_norm_gate.LayerNormGatedFunction LS----
fla.modules: norm.fused_norm_gate.LayerNormGatedLinearFunction LS-----, norm.layernorm_gated.LayerNormFn S----S
fla.modules: norm.l2norm.L2NormFunction S- -, layernorm.LayerNormFunction L----
fla.modules: layernorm.LayerNormLinearFunction L-----, l2norm.L2NormFunction S- -, activations.ops.SwiGLUFunction SL
fla.modules: activations.ops.SwiGLULinearFunction SL-, activations.ops.SwishFunction S, activations.ops.GeLUFunction S-
fla.modules: activations.ops.FastGeLUFunction S, activations.SwiGLUFunction SL, activations.SwiGLULinearFunction SL-
fla.modules: activations.SwishFunction S, fused_linear_cross_entropy.ops.FusedLinearCrossEntropyFunction GGG
fla.modules: fused_linear_cross_entropy.FusedLinearCrossEntropyFunction GGG, fused_kl_div.ops.FusedKLDivLossFunction GG
fla.modules: fused_cross_entropy.ops.FusedCrossEntropyFunction ---, causal_conv1d.ops.CausalConv1dFunction S----
fla.modules: convolution.CausalConv1dFunction S----
fla.ops: gla.chunk.ChunkGLAFunction LLL---L- LLL---L, simple_gla.chunk.ChunkSimpleGLAFunction LLL---- LLL--- LLL--
mamba_ssm.ops: selective_scan_interface.SelectiveScanFn L--LL--- L--LL-S--L
mamba_ssm.ops: triton.ssd_combined.MambaChunkScanCombinedFn LL---LL-S---
mamba_ssm.ops: triton.ssd_combined.MambaSplitConv1dScanCombinedFn ---S---------, triton.layer_norm.LayerNormFn L--------
mamba_ssm.ops: triton.layer_norm.LayerNormLinearFn L-----, triton.layernorm_gated.LayerNormFn S----S
causal_conv1d: causal_conv1d_interface.CausalConv1dFn S---- S--
transformer_engine.pytorch: module.linear._Linear L--- L-----
transformer_engine.pytorch: module.layernorm_linear._LayerNormLinear L----L-- L------L-
transformer_engine.pytorch: module.layernorm_mlp._LayerNormMLP L-L---SSL----- L---LSL-------- -------
transformer_engine.pytorch: attention.dot_product_attention.backends.FusedAttnFunc ----QQLL--------
transformer_engine.pytorch: cross_entropy.CrossEntropyFunction G --- ----
apex: normalization.fused_layer_norm.FusedLayerNormAffineFunction L----
apex: normalization.fused_layer_norm.FusedLayerNormAffineMixedDtypesFunction L----
apex: normalization.fused_layer_norm.FusedLayerNormFunction L--
apex: normalization.fused_layer_norm.FusedRMSNormAffineFunction L--
apex: normalization.fused_layer_norm.FusedRMSNormAffineMixedDtypesFunction L--
apex: normalization.fused_layer_norm.FusedRMSNormFunction L-, contrib.layer_norm.layer_norm.FastLayerNormFN L---
apex: contrib.xentropy.softmax_xentropy.SoftmaxCrossEntropyLoss -----, fused_dense.fused_dense.FusedDenseFunc L-
apex: fused_dense.fused_dense.DenseNoBiasFunc L-, fused_dense.fused_dense.FusedDenseGeluDenseFunc L--SL
torchao: float8.float8_linear.matmul_with_hp_or_float8_args L-
spconv.pytorch.functional: SparseConvFunction --L-, SparseInverseConvFunction --L-, SubMConvFunction --L-
spconv.pytorch.functional: SparseImplicitGemmFunction L---, SparseMaxPoolFunction ----
spconv.pytorch.functional: SparseMaxPoolImplicitGemmFunction ---
efficientnet_pytorch: utils.SwishImplementation S
monai: networks.blocks.activation.SwishImplementation S
"""


class _Normalized(NamedTuple):
    """Output of a norm of rows, from its input, weight, perhaps bias and mean, and inverse deviation."""

    shape: torch.Size
    offset: float = 0.0
    is_curved: bool = False

    def __call__(self, x: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
        *affine, invstd = others
        if affine:
            bias, mean = affine
            x = x - mean.view(-1, 1)
        out = x.view(len(invstd), -1) * invstd.view(-1, 1) * (weight + self.offset)
        return (out + bias if affine else out).view(self.shape)


class _Gated(NamedTuple):
    shape: torch.Size
    activation: Callable[[Tensor], Tensor]
    is_curved: bool = True

    def __call__(self, gate: Tensor, x: Tensor) -> Tensor:
        return (self.activation(gate) * x).view(self.shape)


def _silu_mul(shape: torch.Size, a: Any, b: Any, *multipliers: float) -> _Gated | None:
    return _Gated(shape, F.silu) if all(each == 1.0 for each in multipliers) else None


def _rms_norm(
    shape: torch.Size, x: Any, weight: Any, eps: float, offset: float = 0.0, *others: Any
) -> _Normalized | None:
    return None if weight is None else _Normalized(shape, offset)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


#: Formulas of results, as functions of the saved tensors, from a result's shape and the call's arguments.
FORMULAS: dict[str, Callable[..., Any]] = {
    "liger_kernel.ops.rms_norm.LigerRMSNormFunction": _rms_norm,
    "liger_kernel.ops.layer_norm.LigerLayerNormFunction": lambda shape, *args: _Normalized(shape),
    "unsloth.kernels.rms_layernorm.Fast_RMS_Layernorm": _rms_norm,  # the offset is a bool
    "liger_kernel.ops.swiglu.LigerSiLUMulFunction": _silu_mul,
    "flash_attn.ops.activations.SwiGLUFunction": _silu_mul,
    "fla.modules.activations.ops.SwiGLUFunction": _silu_mul,
    "liger_kernel.ops.geglu.LigerGELUMulFunction": lambda shape, a, b: _Gated(shape, _gelu_tanh),
}
#: Letters of the sets of tensors that a Function saves, by its path.
SETS: dict[str, list[str]] = {}
#: Names of Functions, by module.
BY_MODULE: dict[str, list[str]] = {}
for _line in _TABLE.strip().split("\n"):
    _package, _, _functions = _line.partition(": ")
    for _function, *_sets in map(str.split, _functions.split(", ")):
        SETS[f"{_package}.{_function}"] = _sets
        _module, _, _name = f"{_package}.{_function}".rpartition(".")
        BY_MODULE.setdefault(_module, []).append(_name)


#: Attributes of a context that say that a norm saves its result, which backward divides by the weight.
_INVERTING = ("memory_efficient", "FROM_Y")


def letters_of(path: str, ctx: Any) -> str | None:
    """Return a letter per tensor that a Function's call saves; None if it or its way of saving is unknown."""
    if path not in SETS or any(getattr(ctx, name, False) for name in _INVERTING):
        return None
    return _letters_of(path, len(ctx.to_save or ()))


@functools.cache
def _letters_of(path: str, count: int) -> str | None:
    if not _is_read(path.partition(".")[0]):
        return None
    sets = SETS[path]
    found = next((letters for letters in sets if len(letters) == count), None)
    if found is None:
        read = " or ".join(str(len(letters)) for letters in sets)
        warn(f"{path} saves {count} tensors, {read} where it was read: they stay as they are, unless a rule packs them")
    return found


def is_exact_alone(path: str | None) -> bool:
    return path in SETS and set().union(*SETS[path]) == {EXACT}


def declares_writes(namespace: str) -> bool:
    """Return whether a library's operators are known to write to nothing but what they declare."""
    return namespace in DECLARING and _is_read(namespace)


@functools.cache
def _is_read(package: str) -> bool:
    if package not in READ:
        return True
    names, first, last = READ[package]
    version = "of unknown version"
    number: tuple[int, ...] = (-1,)
    for name in reversed(names.split()):
        with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
            version = metadata.version(name)
            number = tuple(int(part) for part in version.split(".")[:2])
    if first <= number <= last:
        return True
    known = " to ".join(dict.fromkeys(".".join(map(str, each)) for each in (first, last)))
    warn(f"{name} {version}: {known} was read; what its Functions save stays as it is, unless a rule packs it")
    return False
