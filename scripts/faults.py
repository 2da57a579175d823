"""Whether the suite finds faults: each of a list of hand-written ones is put into a copy of the tree, and tests run.

    python -m scripts.faults                  # every fault against the tests that make test runs
    python -m scripts.faults --tier all       # against the exhaustive tier as well
    python -m scripts.faults --only seeds     # those whose file or name has this word in it

A fault is a function in a file, a piece of its code, what stands in its place, and the tests that are to find it: files
or folders, so that a fault takes seconds, or minutes where kernels are compiled anew. Pieces are found by their shape
(`scripts/fault_places.py`): names may change. A failure means something where the tests pass on the tree as it is: run
`make test` first. The exit status is 1 where a fault is missed or its place is gone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.fault_places import find, replaced

ROOT = Path(__file__).parents[1]
TIERS = {"quick": "not exhaustive", "all": ""}


class Fault(NamedTuple):
    """One change for the worse.

    Args:
        name: What goes wrong.
        file: Where, below `brevact`.
        scope: The function or class there, by its qualified name; empty for the module.
        old: An expression or a statement that occurs there once.
        new: What stands in its place.
        tests: What is to find it, below `tests`.
    """

    name: str
    file: str
    scope: str
    old: str
    new: str
    tests: tuple[str, ...]


KERNELS = ("cpu_kernels/test_same_bytes.py", "quantizers/test_contract.py")
GRIDS = ("cpu_kernels/test_grids.py", "quantizers/test_contract.py")
INTERPRETED = ("triton_kernels/test_interpreted.py",)
OPS = ("autograd/test_functions.py", "autograd/test_op_database.py")
REGIONS = tuple(f"autograd/test_{name}.py" for name in ("region", "sharing", "graphs", "abandoned_forwards", "seeds"))
WEIGHTS = ("integration/test_weights.py", "autograd/test_weights.py", "autograd/test_weight_recompute.py")
QAT = ("qat",)
BIT_WIDTHS = ("bit_widths/test_allocation.py", "bit_widths/test_fit.py", "bit_widths/test_adaptive.py")
SAMPLES = ("quantizers/test_sample.py",)
COMPILED = ("autograd/test_compile.py",)

#: Faults of references, of kernels, of formats, of seeds and sharing, of regions, of handlers, of reports and policies.
FAULTS = (
    Fault(
        "dithered levels are stored unshifted",
        "cpu_kernels/groups.py",
        "store_shifted",
        "m - shift * s",
        "m",
        (*KERNELS, "quantizers/test_dithered.py"),
    ),
    Fault(
        "dithered levels are shifted by half of what they may be",
        "quantizers/reference.py",
        "shifts",
        "(philox4x32(counter, seed, ROUNDS)[0] >> 8).float() * 2.0 ** (-24) - 0.5",
        "(philox4x32(counter, seed, ROUNDS)[0] >> 8).float() * 2.0 ** (-25) - 0.25",
        (*KERNELS, "quantizers/test_dithered.py"),
    ),
    Fault(
        "dithered buckets of values on levels are shifted as well",
        "cpu_kernels/quantize.py",
        "quantize_blocks",
        "not flagged and (not zero) and is_spread(at, run)",
        "not flagged and (not zero)",
        (*KERNELS, "quantizers/test_dithered.py"),
    ),
    Fault(
        "dithered buckets with a zero are shifted as well",
        "cpu_kernels/quantize.py",
        "quantize_blocks",
        "not flagged and (not zero) and is_spread(at, run)",
        "not flagged and is_spread(at, run)",
        (*KERNELS, "quantizers/test_dithered.py"),
    ),
    Fault(
        "the errors in the positions of zeros stay",
        "cpu_kernels/groups.py",
        "shows_errors",
        "bit_width > 16 or (bit_width > 5 and load(table, ROUNDING) != NEAREST)",
        "False",
        KERNELS,
    ),
    Fault(
        "all buckets are shifted alike",
        "cpu_kernels/philox.py",
        "shift_of",
        "np.uint64(group)",
        "np.uint64(0 * group)",
        (*KERNELS, "quantizers/test_dithered.py"),
    ),
    Fault(
        "nearest rounding truncates",
        "quantizers/reference.py",
        "round_codes",
        "steps.round().to",
        "steps.floor().to",
        KERNELS,
    ),
    Fault(
        "the reference rounds up one time in 65536 too many",
        "quantizers/reference.py",
        "round_codes",
        "threshold + random_bits",
        "threshold + random_bits + 1",
        KERNELS,
    ),
    Fault(
        "a bfloat16 scale is rounded down",
        "quantizers/reference.py",
        "_round_up",
        "x.view(torch.int32) + (unit - 1)",
        "x.view(torch.int32)",
        KERNELS,
    ),
    Fault(
        "a bfloat16 minimum is rounded up",
        "quantizers/reference.py",
        "_round_down_bfloat16",
        "torch.where(bits < 0, bits + 65535, bits)",
        "bits + 65535",
        KERNELS,
    ),
    Fault(
        "every group has its last code for NaN",
        "quantizers/kernel_ops.py",
        "_decoded",
        "flagged & (q == top)",
        "q == top",
        KERNELS,
    ),
    Fault(
        "decoded values leave the range of float16",
        "quantizers/kernel_ops.py",
        "_decoded",
        "(base + step * q.float()).clamp(-limit, limit)",
        "(base + step * q.float()).clamp(-3e+38, 3e+38)",
        KERNELS,
    ),
    Fault(
        "the ragged last bucket has no range of its own",
        "quantizers/reference.py",
        "group_ranges",
        "flat[whole:].view(1, -1)",
        "flat[whole:].view(1, -1) * 2",
        KERNELS,
    ),
    Fault(
        "flagged groups keep the level of the mark",
        "quantizers/reference.py",
        "calibrate",
        "max(top - 1, 1)",
        "top",
        KERNELS,
    ),
    Fault(
        "the CPU kernel truncates",
        "cpu_kernels/rounding.py",
        "_nearest",
        "rint(t)",
        "t",
        KERNELS,
    ),
    Fault(
        "planes 0 to 3 and 4 to 7 share their random bits",
        "cpu_kernels/rounding.py",
        "_high_half",
        "word >> np.uint32(16)",
        "word & np.uint32(0xFFFF)",
        KERNELS,
    ),
    Fault(
        "the CPU kernel clips flagged groups a level too high",
        "cpu_kernels/quantize.py",
        "_to_flagged_steps",
        "levels - np.float32(1.0)",
        "levels",
        KERNELS,
    ),
    Fault(
        "the last Philox round has the key before",
        "cpu_kernels/philox.py",
        "column_words",
        "_round(c0, c1, c2, c3, a6, b6)",
        "_round(c0, c1, c2, c3, a5, b5)",
        KERNELS,
    ),
    Fault(
        "columns beyond 2^32 repeat the noise",
        "cpu_kernels/philox.py",
        "column_words",
        "c >> _32",
        "zero",
        ("cpu_kernels/test_grids.py", "cpu_kernels/test_large_index.py"),
    ),
    Fault(
        "byte 3 of 4-bit codes is lost",
        "cpu_kernels/planes.py",
        "bytes_to_words",
        "bit_width > 3",
        "bit_width > 4",
        KERNELS,
    ),
    Fault(
        "a flagged 1-bit group decodes to its minimum",
        "cpu_kernels/dequantize.py",
        "decoded",
        "m + step * np.float32(0.5) if flagged and top < np.float32(2.0) else m",
        "m",
        KERNELS,
    ),
    Fault(
        "the lowest values overflow",
        "cpu_kernels/floats.py",
        "limited",
        "-limit if y < -limit else y",
        "y",
        KERNELS,
    ),
    Fault(
        "a mask of float64 reads zero as positive",
        "cpu_kernels/masks.py",
        "_set_bits",
        "load(x64, e) <= 0.0",
        "load(x64, e) < 0.0",
        ("quantizers/test_codes.py", "cpu_kernels/test_same_bytes.py"),
    ),
    Fault(
        "the last level of a row is never reached",
        "cpu_kernels/levels.py",
        "_number",
        "k < size",
        "k < size - 1",
        GRIDS,
    ),
    Fault(
        "the Triton kernel clips to zero steps above the minimum",
        "triton_kernels/quantize.py",
        "_positions",
        "tl.maximum((x - base) * tl.abs(inverse), 0.0)",
        "tl.maximum((x - base) * tl.abs(inverse), 1.0)",
        INTERPRETED,
    ),
    Fault(
        "the Triton kernel rounds flagged groups a level too high",
        "triton_kernels/quantize.py",
        "_positions",
        "tl.where(flagged, TOP - 1.0, TOP)",
        "TOP",
        INTERPRETED,
    ),
    Fault(
        "the Triton kernel decodes NaN to the last level",
        "triton_kernels/dequantize.py",
        "dequantize_tile",
        "tl.where(flagged & (q == (1 << BIT_WIDTH) - 1), float('nan'), y)",
        "y",
        INTERPRETED,
    ),
    Fault(
        "the Triton search stops one level early",
        "triton_kernels/levels.py",
        "count_reached",
        "tl.minimum(probe, SIZE - 1)",
        "tl.minimum(probe, SIZE - 2)",
        INTERPRETED,
    ),
    Fault(
        "a grid of two levels has no last gap",
        "triton_kernels/levels.py",
        "codes_on_row",
        "tl.where(fraction > 0.0, tl.minimum(fraction, 1.0), 0.0)",
        "tl.minimum(fraction, 1.0)",
        INTERPRETED,
    ),
    Fault(
        "the levels of a Weibull bucket do not reach its maximum",
        "quantizers/formats/weibull/quantizer.py",
        "WeibullQuantizer.fit",
        "(low, high, offset, _with_mark(levels_GN.bfloat16(), (missing > 0) & ~empty))",
        "(low, high * 0.5, offset, _with_mark(levels_GN.bfloat16(), (missing > 0) & ~empty))",
        ("quantizers/test_contract.py",),
    ),
    Fault(
        "low and high buckets of a mixture share their noise",
        "quantizers/formats/mixed/sized_mix.py",
        "DrawnMix.encode",
        "(seed, moved_seed(seed, _HIGH_KEY))",
        "(seed, seed)",
        ("quantizers/test_mixed.py", "quantizers/test_contract.py"),
    ),
    Fault(
        "the ragged last bucket is never high",
        "quantizers/formats/mixed/sized_mix.py",
        "DrawnMix._choose",
        "is_high[full:] = self.high_tail",
        "is_high[full:] = False",
        ("quantizers/test_mixed.py", "quantizers/test_contract.py"),
    ),
    Fault(
        "Weibull levels leave the range of their bucket",
        "quantizers/formats/weibull/quantizer.py",
        "WeibullQuantizer.grid",
        "(offset[:, None] + levels.view(geometry.groups, (1 << self.bit_width) - 2).float()).clamp(low, high)",
        "offset[:, None] + levels.view(geometry.groups, (1 << self.bit_width) - 2).float()",
        ("quantizers/test_weibull.py", "quantizers/test_contract.py"),
    ),
    Fault(
        "a Weibull mark takes the level that is zero",
        "quantizers/formats/weibull/quantizer.py",
        "_with_mark",
        "torch.where(last == 0, levels_GN[:, 1:], rest)",
        "rest",
        ("quantizers/test_weibull.py", "quantizers/test_contract.py"),
    ),
    Fault(
        "halves go to odd magnitudes",
        "quantizers/formats/sign_magnitude/quantizer.py",
        "_levels",
        "k[:-1] % 2 == 0",
        "k[:-1] % 2 == 1",
        ("quantizers/test_sign_magnitude.py",),
    ),
    Fault(
        "parts are not aligned to their type",
        "quantizers/packed.py",
        "PackedSpec.__init__",
        "-(-end // part.dtype.itemsize) * part.dtype.itemsize",
        "end",
        KERNELS,
    ),
    Fault(
        "seeds of one region are all the same",
        "autograd/seeds.py",
        "_seeds",
        "itertools.count(base, _AT_ONCE * _GOLDEN)",
        "itertools.repeat(base)",
        REGIONS,
    ),
    Fault(
        "seeds that are made together are all the same",
        "autograd/seeds.py",
        "_split_mixes",
        "np.arange(_AT_ONCE, dtype=np.uint64)",
        "np.zeros(_AT_ONCE, dtype=np.uint64)",
        REGIONS,
    ),
    Fault(
        "the gradient of a batch norm leaves the mean gradient in",
        "cpu_kernels/batch_norm_backward.py",
        "_write",
        "load(grad, e) - load(offset_of, e)",
        "load(grad, e)",
        ("cpu_kernels/test_batch_norm_backward.py",),
    ),
    Fault(
        "a small tensor that was decoded last is taken for that of another weight",
        "autograd/decode_cache.py",
        "_Decoded.find",
        "x is not weight",
        "False",
        ("autograd/test_decode_cache.py",),
    ),
    Fault(
        "a packed tensor is packed again for each reader",
        "autograd/store.py",
        "Store._keep",
        "_shared.add(x, key, *found, self.seeds.number if settings.is_random else 0)",
        "pass",
        REGIONS,
    ),
    Fault(
        "the generator does not move after a region",
        "autograd/seeds.py",
        "SeedStream.close",
        (
            "if self._moves:\n"
            "    with DisableTorchFunction(), no_dispatch_modes():\n"
            "        if not (is_alone and count_on(torch.default_generator)):\n"
            "            torch.randint(_LOW, _HIGH, (), device='cpu', generator=torch.default_generator)"
        ),
        (
            "if False:\n"
            "    with DisableTorchFunction(), no_dispatch_modes():\n"
            "        if not (is_alone and count_on(torch.default_generator)):\n"
            "            torch.randint(_LOW, _HIGH, (), device='cpu', generator=torch.default_generator)"
        ),
        REGIONS,
    ),
    Fault(
        "all ranks draw the same noise",
        "autograd/seeds.py",
        "rank_seed",
        "_split_mix(rank * _GOLDEN) if rank else 0",
        "0",
        ("integration/test_distributed.py",),
    ),
    Fault(
        "recomputations of one backward pass share their noise",
        "autograd/seeds.py",
        "_claim_base",
        "_recomputed[1] + 1 if _recomputed[0] == backward else 1",
        "0",
        ("autograd/test_region.py", "autograd/test_seeds.py", "integration/test_training.py"),
    ),
    Fault(
        "chains of recomputed layers hold nothing between blocks",
        "autograd/held_outputs.py",
        "_hold",
        "task == -1 or (_task.passes_on and not lingers)",
        "task == -1 or _task.passes_on",
        ("autograd/test_layer_recompute.py",),
    ),
    Fault(
        "large layers of blocks in front stay held",
        "autograd/held_outputs.py",
        "HeldOutput.decode",
        "not_held() if self.lingers and _task.is_inside else nullcontext()",
        "nullcontext()",
        ("autograd/test_layer_recompute.py",),
    ),
    Fault(
        "shared packs ignore in-place changes",
        "autograd/sharing.py",
        "_key_of",
        "(x._version, x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_neg(), settings)",
        "(0, x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_neg(), settings)",
        REGIONS,
    ),
    Fault(
        "shared packs ignore where a view begins",
        "autograd/sharing.py",
        "_key_of",
        "return (x._version, x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_neg(), settings)",
        "key = (x._version, 0, x.shape, x.stride(), x.dtype, x.is_neg(), settings)",
        REGIONS,
    ),
    Fault(
        "other settings get the packs of the first",
        "autograd/sharing.py",
        "_key_of",
        "(x._version, x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_neg(), settings)",
        "(x._version, x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_neg(), (None, *settings[1:]))",
        REGIONS,
    ),
    Fault(
        "nothing is shared",
        "autograd/sharing.py",
        "_Packs.find",
        "self.get(key)",
        "None",
        REGIONS,
    ),
    Fault(
        "codes of a batch serve the next step",
        "autograd/sharing.py",
        "_Packs.find",
        "root and served and served != root",
        "False",
        REGIONS,
    ),
    Fault(
        "small tensors are packed",
        "autograd/store.py",
        "Store._keep",
        "x.numel() < settings.min_numel",
        "False",
        ("autograd/test_region.py", "autograd/test_sharing.py", "test_models.py"),
    ),
    Fault(
        "a small view holds all of its storage",
        "autograd/store.py",
        "is_compact",
        "x.untyped_storage().nbytes() <= 2 * x.nbytes",
        "True",
        ("autograd/test_region.py", "autograd/test_sharing.py", "test_models.py"),
    ),
    Fault(
        "a tensor that changed is handed out",
        "autograd/decoders.py",
        "SavedByHook.tensor",
        "version >= 0 and x._version != version",
        "False",
        REGIONS,
    ),
    Fault(
        "an output is kept with its graph",
        "autograd/saved_tensor_hooks.py",
        "SavedTensorHooks._hand_on",
        "x.grad_fn is not None",
        "False",
        REGIONS,
    ),
    Fault(
        "double backward reads quantized values",
        "autograd/decoders.py",
        "unpack",
        "_is_grad_enabled() and (not stored.decoder.allows_double_backward) and (current_graph_task() != -1)",
        "False",
        REGIONS,
    ),
    Fault(
        "views of parameters are packed",
        "autograd/store.py",
        "Store.keep",
        "x._is_view() and is_parameter(x._base)",
        "False",
        WEIGHTS,
    ),
    Fault(
        "buffers are packed",
        "autograd/weights.py",
        "ModelState.__contains__",
        "(*module._parameters.values(), *module._buffers.values())",
        "module._parameters.values()",
        WEIGHTS,
    ),
    Fault(
        "what is larger than its weights is a weight",
        "autograd/weights.py",
        "_comes_from_weights_alone",
        "0 < x.numel() <= largest",
        "0 < largest",
        WEIGHTS,
    ),
    Fault(
        "what a Function makes of a batch is a weight",
        "autograd/weights.py",
        "_mark_result_of_function",
        "parent is None",
        "False",
        WEIGHTS,
    ),
    Fault(
        "a view that a Function saves is taken for a variable",
        "autograd/store.py",
        "Store.keep_activation",
        "base is not None and not base.is_leaf",
        "False",
        ("autograd/test_other_code.py",),
    ),
    Fault(
        "unseen writes leave known values",
        "autograd/storages.py",
        "end_known_values",
        "name.startswith(OF_VALUES)",
        "False",
        ("autograd/test_unseen_writes.py",),
    ),
    Fault(
        "unseen writes come once alone",
        "autograd/storages.py",
        "end_known_values",
        "known[EXPOSED] = True",
        "pass",
        ("autograd/test_unseen_writes.py",),
    ),
    Fault(
        "norms that round pack where their module does not train",
        "autograd/regions.py",
        "Region.__init__",
        "settings is not None and (not norms_only)",
        "settings is not None",
        ("autograd/test_normalization.py",),
    ),
    Fault(
        "known values survive in-place changes",
        "autograd/known_values.py",
        "find",
        "entry is None or entry[0] != x._version",
        "entry is None",
        QAT,
    ),
    Fault(
        "a changed scale is not noticed",
        "autograd/known_values.py",
        "find",
        "kept._version != version",
        "False",
        QAT,
    ),
    Fault(
        "integers lose their lowest value",
        "autograd/known_values.py",
        "IntegerCodes.integers",
        "q.add_(self.minimum)",
        "q.add_(self.minimum + 1)",
        QAT,
    ),
    Fault(
        "PReLU's weight has the gradient of the other sign",
        "autograd/ops/rectifiers.py",
        "_PReLU.backward",
        "below.multiply(grad).neg_()",
        "below.multiply(grad)",
        OPS,
    ),
    Fault(
        "dropout does not scale its gradient",
        "autograd/ops/dropout.py",
        "_Dropout.backward",
        "_masked(kept, grad, ctx).mul_(ctx.factor)",
        "_masked(kept, grad, ctx)",
        OPS,
    ),
    Fault(
        "the slope of erf lacks a factor",
        "autograd/ops/smooth.py",
        "",
        "2 / math.sqrt(math.pi)",
        "1 / math.sqrt(math.pi)",
        OPS,
    ),
    Fault(
        "an even kernel pads on the left",
        "autograd/ops/convolution.py",
        "_same_padding",
        "(0, t % 2)",
        "(t % 2, 0)",
        OPS,
    ),
    Fault(
        "transposed convolutions forget their groups",
        "autograd/ops/convolution.py",
        "_transposed_handler.handle",
        "(steps, pads, dilation, True, more, groups)",
        "(steps, pads, dilation, True, more, 1)",
        ("autograd/test_functions.py",),
    ),
    Fault(
        "RMS norm forgets the mean of its gradient",
        "autograd/ops/norm/formulas.py",
        "RMSNorm.backward",
        "-1",
        "0",
        OPS,
    ),
    Fault(
        "label smoothing is left out of the gradient",
        "autograd/ops/losses.py",
        "_of_indices",
        "g * w_y * (1 - s) if s else g * w_y",
        "g * w_y",
        ("autograd/test_losses.py", "autograd/test_functions.py"),
    ),
    Fault(
        "alpha is left out of a product's gradient",
        "autograd/ops/products.py",
        "_Product.backward",
        "scaled = grad if alpha == 1 else grad * alpha",
        "scaled = grad",
        ("autograd/test_products.py", "autograd/test_op_database.py"),
    ),
    Fault(
        "smooth functions derive from tensors of any width",
        "autograd/quality.py",
        "Quality.serves",
        "bits_of(self.quantizer) < settings.derive_min_bits",
        "bits_of(self.quantizer) < 1",
        ("autograd/test_derived.py",),
    ),
    Fault(
        "readers take what is coarser than their own",
        "autograd/quality.py",
        "Quality.serves",
        "bits_of(self.quantizer) >= bits_of(reader) > 0",
        "bits_of(self.quantizer) > 0 < bits_of(reader)",
        ("autograd/test_derived.py",),
    ),
    Fault(
        "the bias of a norm is that of the backward pass",
        "autograd/normalizing.py",
        "as_now",
        "is_traced(x) or (is_weight and (not is_distributed()))",
        "True",
        ("autograd/test_derived.py",),
    ),
    Fault(
        "a norm's output is decoded in the order of its input",
        "autograd/normalizing.py",
        "output_of",
        "decoder.stride(tensors) != out.stride()",
        "False",
        ("autograd/test_derived.py",),
    ),
    Fault(
        "a slice is taken for all of its storage",
        "autograd/known_values.py",
        "register",
        "storage.nbytes() != x.numel() * x.itemsize",
        "False",
        ("autograd/test_derived.py",),
    ),
    Fault(
        "a checkpoint finds what it did not derive",
        "autograd/known_values.py",
        "find",
        "own_scope is not scope",
        "False",
        ("autograd/test_derived.py",),
    ),
    Fault(
        "two functions of one tensor make a linear product",
        "autograd/derivations.py",
        "_Expressions._meet",
        "self.overlap or bool(reads & met)",
        "False",
        ("autograd/test_derived.py",),
    ),
    Fault(
        "dropout's factor is forgotten where it is derived",
        "autograd/expressions.py",
        "ByMask.product",
        "values if self.factor == 1.0 else values.mul_(self.factor)",
        "values",
        ("autograd/test_derived.py",),
    ),
    Fault(
        "scores are stored at the bits of the rest",
        "autograd/ops/attention.py",
        "_with_finer_scores",
        "quantizer.bit_width >= settings.score_bit_width",
        "quantizer.bit_width >= 1",
        ("autograd/test_attention.py",),
    ),
    Fault(
        "a rule for an op packs under other hooks",
        "autograd/regions.py",
        "Region.region_for_op",
        "self.norms_only or not _is_grad_enabled() or top_hooks(True) != self.hooks.innermost",
        "self.norms_only",
        ("policy",),
    ),
    Fault(
        "rules for ops do not reach modules",
        "policy/rules.py",
        "_resolved",
        "assignment.with_ops(tuple(ops.values()))",
        "assignment",
        ("policy",),
    ),
    Fault(
        "an op inside another one loses its rule",
        "autograd/settings.py",
        "BackwardSettings.by_op",
        "with_functions(settings, self.of_functions[:i])",
        "settings",
        ("policy",),
    ),
    Fault(
        "leaky ReLU forgets its slope",
        "autograd/ops/piecewise_linear.py",
        "_leaky_relu",
        "_Pieces(lambda x: x > 0, inplace, outside=float(negative_slope))",
        "_Pieces(lambda x: x > 0, inplace)",
        OPS,
    ),
    Fault(
        "dilated windows lose their place",
        "autograd/ops/pooling.py",
        "_Windows._distances",
        "self.dilation[dim] * stride",
        "stride",
        OPS,
    ),
    Fault(
        "a sum is written over what others read",
        "autograd/expressions.py",
        "_in_one_pass",
        "decoder.decode_in_one_pass(tensors, addend, bits, overwrites=is_new)",
        "decoder.decode_in_one_pass(tensors, addend, bits, overwrites=True)",
        ("autograd/test_derived.py",),
    ),
    Fault(
        "a sum behind a mask keeps what is outside of it",
        "cpu_kernels/dequantize.py",
        "dequantize_blocks",
        "load(values, e) if load(bits, e) else np.float32(0.0)",
        "load(values, e)",
        ("cpu_kernels/test_kernel_ops.py",),
    ),
    Fault(
        "a planned batch norm is decoded without its bias",
        "autograd/norm_decoders.py",
        "OutputDecoder._decode",
        "tensors[2] if self.has[1] else None",
        "None",
        ("autograd/test_derived.py", "autograd/test_frequent_calls.py"),
    ),
    Fault(
        "a layer has the bytes of its last tensor alone",
        "reports/memory.py",
        "_by_layer",
        "found[row.layer] += row.saved_bytes",
        "found[row.layer] = row.saved_bytes",
        ("reports/test_memory.py",),
    ),
    Fault(
        "the noise of gradients is divided by all draws",
        "reports/gradient_noise.py",
        "variance_and_bias",
        "count - 1",
        "count",
        ("reports",),
    ),
    Fault(
        "layers take a step of bits that does not fit",
        "bit_widths/allocation.py",
        "allocate",
        "cost <= left",
        "left > 0",
        BIT_WIDTHS,
    ),
    Fault(
        "options within the convex hull are not left out",
        "bit_widths/allocation.py",
        "convex_hull",
        "len(hull) > 1 and _gain(hull[-2], option) >= _gain(hull[-2], hull[-1])",
        "False",
        BIT_WIDTHS,
    ),
    Fault(
        "a fit stores a fifth more than its budget",
        "bit_widths/budgets.py",
        "Budget.bytes_of",
        "1 + ROUNDING",
        "1.2",
        BIT_WIDTHS,
    ),
    Fault(
        "what is known of samples stays behind their batch",
        "bit_widths/adaptive.py",
        "Adaptive.batch",
        "self._weights.values = None",
        "pass",
        BIT_WIDTHS,
    ),
    Fault(
        "weights of samples go to other samples",
        "quantizers/formats/per_sample/widths.py",
        "SampleWeights.of_parts",
        "values.repeat_interleave(parts // count)",
        "values.repeat(parts // count)",
        SAMPLES,
    ),
    Fault(
        "widths of samples share their noise",
        "quantizers/formats/per_sample/quantizer.py",
        "SampleQuantizer.encode",
        "moved_seed(key, own.quantizer.bit_width * _WIDTH_KEY)",
        "key",
        SAMPLES,
    ),
    Fault(
        "graphs of dynamic sizes hash their symbols",
        "quantizers/formats/per_sample/quantizer.py",
        "SampleQuantizer._division",
        "_division(int(layout.numel), int(layout.sizes[0]) if layout.sizes else 1, self.bucket_size)",
        "_division(layout.numel, layout.sizes[0] if layout.sizes else 1, self.bucket_size)",
        SAMPLES,
    ),
    Fault(
        "the last rule wins",
        "policy/rules.py",
        "assignments",
        "{module: of_rules[key] for module in modules} | assigned",
        "assigned | {module: of_rules[key] for module in modules}",
        ("policy",),
    ),
    Fault(
        "a fitted policy takes any model",
        "policy/fitted_layers.py",
        "check_layers",
        "not missing and (not added) and (not changed)",
        "True",
        ("policy", *BIT_WIDTHS),
    ),
    Fault(
        "stairs of a schedule are a step early",
        "policy/mixing.py",
        "MixSchedule.mix_prob",
        "math.floor(t * self._plan['stairs'])",
        "math.ceil(t * self._plan['stairs'])",
        ("policy",),
    ),
    Fault(
        "teams leave out their first blocks",
        "cpu_kernels/teams.py",
        "share",
        "kernel.words(*arguments, blocks, step, 0)",
        "kernel.words(*arguments, blocks, step, step)",
        ("cpu_kernels/test_teams.py", "cpu_kernels/test_same_bytes.py"),
    ),
    Fault(
        "slopes of smooth functions derive from few bits",
        "autograd/ops/smooth.py",
        "_Smooth.forward",
        "region.keep(Slope(derivative)(input), share=False)",
        "keep_smooth(Slope(derivative), region.keep(input), input)",
        OPS,
    ),
    Fault(
        "wrong arguments get an error of a counterpart",
        "autograd/ops/__init__.py",
        "run_counterpart",
        "error.__traceback__ is not None and error.__traceback__.tb_next is not None",
        "True",
        OPS,
    ),
    Fault(
        "exported programs pack",
        "autograd/compiled/mode.py",
        "traced_call",
        "mode.norms_only or not torch.is_grad_enabled() or is_exporting()",
        "mode.norms_only or not torch.is_grad_enabled()",
        (*COMPILED, "integration/test_transforms.py"),
    ),
    Fault(
        "weights by keyword are packed in graphs",
        "autograd/compiled/mode.py",
        "traced_call",
        "tuple((key for key, value in kwargs.items() if isinstance(value, nn.Parameter)))",
        "()",
        COMPILED,
    ),
    Fault(
        "weights that graphs make are activations",
        "autograd/compiled/graphs.py",
        "_in_region",
        "result in weights",
        "False",
        ("autograd/test_weights_of_graphs.py",),
    ),
    Fault(
        "sizes of a tensor are made of its values",
        "autograd/compiled/graphs.py",
        "_made_by",
        "any((isinstance(each, Tensor) for each in value))",
        "True",
        ("autograd/test_weights_of_graphs.py",),
    ),
    Fault(
        "operands by name are not found at their places",
        "autograd/call_arguments.py",
        "bound",
        "names[len(args):]",
        "()",
        ("autograd/test_ways.py",),
    ),
    Fault(
        "graphs forget the rules of the module around them",
        "autograd/compiled/mode.py",
        "enter",
        "inherits or around.text == text",
        "True",
        COMPILED,
    ),
)


def found_by(fault: Fault, tree: Path, tier: str, python: str) -> str:
    """Put a fault into a tree, run the tests, and take it out again.

    Args:
        fault: What to change.
        tree: Copy of the repository.
        tier: Key of `TIERS`.
        python: Interpreter that runs pytest.

    Returns:
        "found", "missed", or why it could not be tried.
    """
    try:
        place = find(tree / "brevact", fault.file, fault.scope, fault.old)
    except LookupError as error:
        return str(error)
    text = place.path.read_text("utf-8")
    place.path.write_text(replaced(place, fault.new), "utf-8")
    command = [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", TIERS[tier]]
    try:
        done = subprocess.run(
            [*command, *(f"tests/{test}" for test in fault.tests)],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    finally:
        place.path.write_text(text, "utf-8")
    if done.returncode == 1 or (done.returncode > 1 and " error" in done.stdout):  # the package does not import, say
        return "found"
    return "missed" if done.returncode == 0 else done.stdout[-500:] + done.stderr[-500:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the faults, print a line for each, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=TIERS, default="quick", help="which tests run (default: %(default)s)")
    parser.add_argument("--only", default="", help="a word in the name or the file of the faults to try")
    parser.add_argument("--tests", type=Path, help="folder of the tests to run, in place of this tree's")
    options = parser.parse_args(arguments)
    chosen = [fault for fault in FAULTS if options.only in fault.name or options.only in fault.file]
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "venv", ".nox", ".*_cache", "runs"))
        if options.tests:
            shutil.rmtree(tree / "tests")
            shutil.copytree(options.tests, tree / "tests")
        for fault in chosen:
            start = time.monotonic()
            outcome = found_by(fault, tree, options.tier, sys.executable)
            found += outcome == "found"
            print(f"{outcome}: {fault.name} ({fault.file}), {time.monotonic() - start:.0f} s", flush=True)
    print(f"{found} of {len(chosen)} found by the tier {options.tier}")
    return int(found < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
