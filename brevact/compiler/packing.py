"""Add the nodes that pack saved tensors in forward and decode them in backward.

This is the last change of a joint graph: its saved tensors are chosen, and each has a quantizer or stays. Backward
then reads decoded tensors, and PyTorch saves the codes. Nodes are placed so that the compiler fuses them with others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from brevact.autograd.region.seeds import seed_of_size, seeds_of_graph
from brevact.autograd.region.settings import BackwardSettings, SaveMode, bits_of
from brevact.compiler import aten as table
from brevact.compiler.aten import Use, aten, prims
from brevact.compiler.bits import quantizer_of, settings_for
from brevact.compiler.joint_graph import JointGraph
from brevact.compiler.nodes import call_of, closure, numel_of, packet_of, readers_of, shape_of, value_of
from brevact.compiler.norms import is_key, statistics_of
from brevact.compiler.reordering import delay_products, draw_seeds_between_kernels
from brevact.quantizers import to_text
from brevact.quantizers.traits import traits_of

ops = torch.ops.brevact
_library = torch.library.Library("brevact", "FRAGMENT")
_library.define(
    "draw_seeds(Device device, int count) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag),
)
_library.impl("draw_seeds", seeds_of_graph, "CompositeExplicitAutograd")
torch.library.register_fake(
    "brevact::draw_seeds", lambda device, count: torch.empty(count, dtype=torch.int64, device=device), lib=_library
)
#: Use of outputs that backward computes again.
RECOMPUTED = "recomputed"
#: Elements from which masks are packed.
_LEAST_MASK = 4096
_BLOCK = 512


class Row(NamedTuple):
    """A tensor that a graph saves for backward, or the output of a layer that backward computes again."""

    op: str
    module: str
    shape: tuple[Any, ...]
    use: str
    bits: int
    plain_bytes: Any  # an expression, if sizes are symbols
    nbytes: Any


def _row(node: fx.Node, use: str, bits: int, *stored: fx.Node) -> Row:
    modules = list((node.meta.get("nn_module_stack") or {"": ("", None)}).values())
    op = "input" if node.op == "placeholder" else str(packet_of(call_of(node)) or call_of(node).target)
    return Row(op, modules[-1][0], shape_of(node), use, bits, _nbytes_of(node), sum(map(_nbytes_of, stored)))


def _nbytes_of(node: fx.Node) -> Any:
    return math.prod(shape_of(node)) * getattr(value_of(node), "itemsize", 0)


def pack(joint: JointGraph) -> tuple[list[fx.Node], list[Row]]:
    """Add the nodes that pack and decode; return those to save, and a description of each tensor among them."""
    packer, nodes, kept, rows = _Packer(joint), joint.nodes, dict[fx.Node, None](), list[Row]()
    for node in joint.saved:
        value: Any = value_of(node)
        stored: tuple[fx.Node, ...] = (node,)
        use, bits = joint.uses.get(node), 0
        is_marked = value is not None and joint.settings_of(readers_of(node, joint.read)) is not None
        if is_marked and value.dtype is torch.bool and node.op == "call_function" and numel_of(node) >= _LEAST_MASK:
            stored, bits = packer.mask(node), 1
        elif is_marked and (width := joint.integers.width_of(node)) is not None:
            stored, bits = packer.integers(node, width), width
        elif use is not None and joint.is_lossy(use):
            settings, quantizer = settings_for(joint, use), quantizer_of(joint, use)
            if settings.draws_size and quantizer == settings.quantizer:
                packer.count += 1
                quantizer = quantizer.with_drawn_size(numel_of(node), seed_of_size() + packer.count)
            is_smooth = use.use is Use.SMOOTH
            stored, bits = packer.activation(node, settings, quantizer, is_smooth=is_smooth), bits_of(quantizer)
        elif is_marked and node.op == "placeholder" and joint.signature.channels_last and _is_image(value):
            packer.image(node)
        if value is not None and (node.op != "placeholder" or bits):
            new = (each for each in stored if each not in kept and each.op != "placeholder")
            rows.append(_row(node, "" if use is None else use.text, bits, *new))
        kept.update(dict.fromkeys(stored))
    again = (node for node in nodes if packet_of(node) in table.MATRIX_PRODUCTS and node not in joint.gradients)
    rows += [_row(node, RECOMPUTED, 0) for node in again]
    joint.redirect(nodes, packer.decoded)
    rows += [_row(copy, "", 0, copy) for copy in _copy_overwritten(joint, kept)]
    delay_products(joint, kept)
    draw_seeds_between_kernels(joint, packer.seeds.values())
    return list(kept), rows


class _Packer:
    """Nodes that pack, by kind of the saved tensor; each method returns those to save in its place."""

    def __init__(self, joint: JointGraph) -> None:
        self.joint, self.call, self.like, self.insert_after = joint, joint.call, joint.like, joint.insert_after
        self.decoded: dict[fx.Node, fx.Node] = {}
        self.images = _images(joint.graph) if joint.signature.channels_last else {}
        self.forward = closure(joint.of_forward, lambda node: node.all_input_nodes)
        self.seeds: dict[torch.device, fx.Node] = {}
        self.count = 0

    def seed(self, x: fx.Node) -> fx.Node:
        """A seed as a view, for which the compiler makes no kernel."""
        device, joint = x.meta["val"].device, self.joint
        if device not in self.seeds:
            with joint.graph.inserting_before(joint.last_input.next):
                made = self.call(ops.draw_seeds.default, device, 2 * len(joint.saved))
            self.seeds[device] = joint.last_input = made
        self.count += 1
        return self.call(aten.select.int, self.seeds[device], 0, self.count - 1)

    def placed(self, node: fx.Node, x: fx.Node) -> tuple[fx.Node, list[Any], list[Any]]:
        """The values ``x`` of a node in the memory order that the compiler gives it, its sizes and strides."""
        return self.in_channels_last(x) if node in self.images else (x, *self.joint.layout_of(node))

    def in_channels_last(self, x: fx.Node) -> tuple[fx.Node, list[Any], list[Any]]:
        with self.joint.mode:
            stride = list(torch.empty_like(x.meta["val"], memory_format=torch.channels_last).stride())
        return self.call(prims.inductor_force_stride_order.default, x, stride), list(shape_of(x)), stride

    def image(self, node: fx.Node) -> None:
        """Let forward read a saved image or weight by a view: Inductor saves copies of others in channels_last."""
        x, reader = node.meta["val"], min(node.users)
        if not x.is_contiguous(memory_format=torch.channels_last):
            with self.joint.graph.inserting_before(reader):
                view = self.like(reader, self.call(aten.as_strided.default, node, list(x.shape), list(x.stride())))
                reader.replace_input_with(node, view)
            with self.insert_after(node):
                self.decoded[node] = self.like(node, self.in_channels_last(node)[0])

    def mask(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Pack a mask; Inductor's vectors store and load bool on a CPU at a tenth of the speed of floats and bytes."""
        is_slow = self.joint.signature.is_inductor and node.meta["val"].device.type == "cpu"
        cast, dtype = prims.convert_element_type.default, torch.uint8 if is_slow else torch.bool
        with self.insert_after(node):
            x = self.call(cast, self.call(cast, node, torch.float32), dtype) if is_slow else node
            x, size, stride = self.placed(node, x)
            packed = self.call(ops.pack_mask.default, x, stride)
            made = self.call(ops.unpack_mask.default, packed, size, stride, dtype)
            if is_slow:
                made = self.call(aten.ne.Scalar, self.call(cast, made, torch.float32), 0)
            self.decoded[node] = self.like(node, made)
        return packed, *_symbols(size, stride)

    def activation(
        self, node: fx.Node, settings: BackwardSettings, quantizer: Any, *, is_smooth: bool
    ) -> tuple[fx.Node, ...]:
        dtype = node.meta["val"].dtype
        viewed, *statistics = statistics_of(node, settings) or (node,)
        if statistics and settings.for_normalized is not None:
            quantizer = settings.for_normalized.quantizer
        elif is_smooth and not statistics:
            quantizer = traits_of(quantizer).for_smooth or quantizer
        text, x, after = to_text(quantizer), node, max(each for each in (node, viewed, *statistics) if each is not None)
        place = self.reader_behind(after, node)
        if is_key(node, self.joint.read):
            with self.insert_after(node):
                x = self.less_mean(node)
            place = max(x, after).next
        with self.joint.graph.inserting_before(place):
            seed = self.seed(node) if quantizer.is_stochastic else None
            shape = [] if shape_of(viewed) == shape_of(node) else self.joint.layout_of(node)[0]
            x = self.call(aten.reshape.default, x, self.joint.layout_of(viewed)[0]) if shape else x
            x, size, stride = self.placed(x, x)
            if not statistics:
                packed = self.call(ops.quantize.default, x, seed, text, stride)
                made = self.call(ops.dequantize.default, packed, text, size, stride, dtype)
            else:
                packed = self.call(ops.quantize_normalized.default, x, *statistics, seed, text, stride)
                made = self.call(ops.denormalize.default, packed, *statistics, text, size, stride, dtype)
            if shape:
                made = self.call(aten.reshape.default, made, shape)
            self.decoded[node] = self.like(node, made)
        symbols = [*_symbols(size, stride, shape), *(each for each in statistics if each is not None)]
        if settings.save_mode is SaveMode.SAVE_QUANTIZED:
            return packed, *symbols
        return node, *([] if seed is None else [seed]), *symbols

    def reader_behind(self, place: fx.Node, node: fx.Node) -> fx.Node:
        """Forward's next reader of a tensor: kernels up to it, without a call between them, are compiled as one."""
        moved = closure([node], lambda each: (x for x in readers_of(each, self.forward) if packet_of(x) in table.MOVES))
        readers = (user for each in moved for user in readers_of(each, self.forward))
        behind = (self.joint.last_input if place.op == "placeholder" else place).next
        return min((user for user in readers if user not in moved and user > place), default=behind)

    def less_mean(self, node: fx.Node) -> fx.Node:
        """Keys less their mean, where it exceeds their mean deviation: not of a few far keys, such as masked ones."""
        mean = self.call(aten.mean.dim, node, [-2], True)
        rest = self.call(aten.sub.Tensor, node, mean)
        deviation = self.call(aten.mean.dim, self.call(aten.abs.default, rest), [-2], True)
        is_common = self.call(aten.gt.Tensor, self.call(aten.abs.default, mean), deviation)
        return self.call(aten.where.self, is_common, rest, node)

    def integers(self, node: fx.Node, width: int) -> tuple[fx.Node, ...]:
        x = node.meta["val"]
        steps = [step if isinstance(step, int) else int(step.node.hint) for step in x.stride()]
        order = sorted(range(x.dim()), key=lambda dim: (-steps[dim], dim))
        with self.insert_after(node):
            sizes, _ = self.joint.layout_of(node)
            numel = math.prod(x.shape) if isinstance(x.numel(), int) else self.call(aten.sym_numel.default, node)
            flat = self.call(aten.reshape.default, self.call(aten.permute.default, node, order), [-1])
            packed = self.call(ops.pack_codes.default, flat, width, _BLOCK)
            found = self.call(ops.unpack_codes.default, packed, width, numel, _BLOCK)
            found = self.call(prims.convert_element_type.default, found, x.dtype)
            found = self.call(aten.view.default, found, [sizes[dim] for dim in order])
            back = [order.index(dim) for dim in range(x.dim())]
            self.decoded[node] = self.like(node, self.call(aten.permute.default, found, back))
        return packed, *_symbols(sizes, [numel])


def _images(graph: fx.Graph) -> dict[fx.Node, None]:
    """Contiguous tensors that convolutions read and return, and others of their sizes that are computed beside them."""

    def is_image(node: Any) -> bool:
        return node.op == "call_function" and _is_image(value_of(node))

    def near(node: fx.Node) -> Iterator[fx.Node]:
        others = (*node.users, *node.all_input_nodes)
        return (each for each in others if shape_of(each) == shape_of(node) and is_image(each))

    layers = (node for node in graph.nodes if packet_of(node) is aten.convolution)
    return closure((each for node in layers for each in (node, node.args[0]) if is_image(each)), near)


def _is_image(value: torch.Tensor | None) -> bool:
    if value is None or value.dim() != 4 or not all(isinstance(size, int) for size in value.shape):
        return False
    return value.is_contiguous()


def _symbols(*sizes: list[Any]) -> list[fx.Node]:
    return [each for size in sizes for each in size if isinstance(each, fx.Node)]


def _copy_overwritten(joint: JointGraph, kept: dict[fx.Node, None]) -> Iterator[fx.Node]:
    """Let the graph read copies of inputs that it overwrites, if backward reads these."""
    storages = {value.untyped_storage()._cdata for value in map(value_of, kept) if value is not None}
    for write in [node for node in joint.graph.nodes if packet_of(node) is aten.copy_]:
        read: Any = write.args[0]
        if read.op != "placeholder" or read.meta["val"].untyped_storage()._cdata not in storages:
            continue
        with joint.graph.inserting_before(joint.last_input.next):
            copy = joint.like(read, joint.call(aten.clone.default, read))
        others = (copy, write, joint.output)
        read.replace_all_uses_with(copy, delete_user_cb=lambda user, others=others: user not in others)
        if read in kept:
            del kept[read]
            kept[copy] = None
            yield copy
