"""Private and undocumented names of PyTorch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from brevact.private_names.lookup import find

if TYPE_CHECKING:
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch.utils._pytree import TreeSpec as TreeSpec
    from torch.utils.weak import WeakTensorKeyDictionary as WeakTensorKeyDictionary

#: Refused as a whole if one of its names is missing: saved tensors might be wrong.
REGIONS = "storing packed activations for backward"
COMPILING = "torch.compile of a region"
BATCHES = "a batch of gradients through packed activations"

# --- autograd

push_hooks = find("torch._C._autograd._push_saved_tensors_default_hooks", REGIONS)
pop_hooks = find("torch._C._autograd._pop_saved_tensors_default_hooks", REGIONS)
top_hooks = find("torch._C._autograd._top_saved_tensors_default_hooks", REGIONS)
current_graph_task = find("torch._C._current_graph_task_id", REGIONS)  #: -1 outside of a backward pass
#: Number of tensors and Python objects that hold the storage at an address.
count_holders = find("torch._C._storage_Use_Count", REGIONS, fallback=lambda address: 1 << 30)
#: The graph node whose backward this thread runs; None outside of one.
current_autograd_node = find("torch._C._current_autograd_node", REGIONS, fallback=lambda: None)
queue_callback = find("torch.autograd.Variable._execution_engine.queue_callback", REGIONS)
BackwardCFunction = find("torch.autograd.function.BackwardCFunction", REGIONS)
#: Code of `Function.apply`; None from torch 2.14 on, where it is no Python function.
function_apply_code = find("torch.autograd.Function.apply.__func__.__code__", COMPILING, fallback=None)


#: The saved-tensor hooks around the forward pass of a non-reentrant checkpoint.
CheckpointHooks = find("torch.utils.checkpoint._checkpoint_hook", COMPILING)


def checkpoint_of(hook: Callable) -> Any:
    """Return a non-reentrant checkpoint's object for one call, from the pack hook of a pass through it."""
    names = inspect.getclosurevars(inspect.unwrap(hook)).nonlocals
    return names["frame"] if "frame" in names else names["target_frame_ref"]()


# --- random numbers

_set_seed = find("torch.random._manual_seed_impl", REGIONS)


def watch_manual_seed(watch: Callable[[], None]) -> Callable[[], None]:
    """Call a function after each ``torch.manual_seed``, by whatever name that is called."""

    @functools.wraps(_set_seed)
    def set_seed(seed: Any) -> Any:
        generator = _set_seed(seed)
        watch()
        return generator

    torch.random._manual_seed_impl = set_seed
    return watch


# --- collectives

_collectives = find("torch.distributed.distributed_c10d", REGIONS, fallback=None)


def watch_collectives(watch: Callable[[Tensor], None]) -> None:
    """Call a function with each tensor of a ``torch.distributed`` collective, before that runs."""
    for name in ("_check_single_tensor", "_check_tensor_list"):
        if check := getattr(_collectives, name, None):
            setattr(_collectives, name, _watched(check, watch))


def _watched(check: Callable[..., None], watch: Callable[[Tensor], None]) -> Callable[..., None]:
    @functools.wraps(check)
    def watched(given: Any, *args: Any, **kwargs: Any) -> None:
        check(given, *args, **kwargs)
        for x in given if isinstance(given, list) else (given,):
            watch(x)

    return watched


# --- modes and transforms

DisableTorchFunction = find("torch._C.DisableTorchFunction", REGIONS)
#: Whether `__torch_function__` of subclasses runs, which it does except inside of `DisableTorchFunction`.
is_torch_function_on = find("torch._C._is_torch_function_enabled", REGIONS, fallback=lambda: True)
EnableTorchFunction = find("torch._C._EnableTorchFunction", COMPILING)
DisableFuncTorch = find("torch._C._DisableFuncTorch", "making the tables of a format")
len_function_stack = find("torch._C._len_torch_function_stack", COMPILING)
function_stack_at = find("torch._C._get_function_stack_at", COMPILING)
function_modes = find("torch.overrides._get_current_function_mode_stack", REGIONS)
pop_function_mode = find("torch._C._pop_torch_function_stack", REGIONS)
push_function_mode = find("torch._C._push_on_torch_function_stack", REGIONS)
len_dispatch_stack = find("torch._C._len_torch_dispatch_stack", REGIONS)
#: Context that hides ops from all dispatch modes, including others'.
no_dispatch_modes = find("torch._C._DisableTorchDispatch", REGIONS)
active_fake_mode = find("torch._guards.active_fake_mode", REGIONS)  #: None without fake tensors
disable_modes = find(
    "torch.utils._python_dispatch._disable_current_modes", COMPILING, placeholder=contextlib.nullcontext
)
is_functorch_tensor = find("torch._C._functorch.is_functorch_wrapped_tensor", REGIONS)
#: State of modules that FSDP and the like wrap without a module of their own.
states_of_modules = find("torch.distributed._composable_state._module_state_mapping", REGIONS, fallback=(True,))
#: Whether a tensor is a batch of ``is_grads_batched``, adding and removing its dimension; then ``torch.func.vmap``'s.
is_batched = find("torch._C._functorch.is_legacy_batchedtensor", BATCHES, fallback=lambda x: False)
add_legacy_batch_dim = find("torch._add_batch_dim", BATCHES)
remove_legacy_batch_dim = find("torch._remove_batch_dim", BATCHES)
is_functorch_batched = find("torch._C._functorch.is_batchedtensor", BATCHES, fallback=lambda x: False)
level_of = find("torch._C._functorch.maybe_get_level", BATCHES)
add_batch_dim = find("torch._C._functorch._add_batch_dim", BATCHES)
remove_batch_dim = find("torch._C._functorch._remove_batch_dim", BATCHES)
outside_of_transform = find("torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack", BATCHES)
_ExcludeDispatchKeys = find("torch._C._ExcludeDispatchKeyGuard", BATCHES)
_DispatchKeySet = find("torch._C.DispatchKeySet", BATCHES)
_key_named = find("torch._C._dispatch_key_parse", BATCHES)
#: torch's error message if saved-tensor hooks are off; None if they are on.
why_hooks_are_off = find(
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message", REGIONS, fallback=lambda: None
)
functorch_interpreter = find("torch._C._functorch.peek_interpreter_stack", REGIONS)
is_jit_tracing = find("torch._C._is_tracing", REGIONS, fallback=torch.jit.is_tracing)
tree_flatten = find("torch.utils._pytree.tree_flatten", REGIONS)
tree_unflatten = find("torch.utils._pytree.tree_unflatten", REGIONS)

if not TYPE_CHECKING:
    TreeSpec = find("torch.utils._pytree.TreeSpec", REGIONS)

# --- attributes: read where needed, checked here

ATTRIBUTES = (
    *("torch.Tensor._version", "torch.Tensor._base", "torch.Tensor._is_view"),
    *("torch.Tensor._post_accumulate_grad_hooks",),
    *("torch.UntypedStorage._cdata", "torch.UntypedStorage._fix_weakref"),
    *("torch.autograd.Function._backward_cls._forward_cls", "torch.autograd.forward_ad._current_level"),
    *("torch.nn.Module._parameters", "torch.nn.Module._buffers"),
    *("torch.nn.Module._forward_hooks", "torch.nn.Module._forward_pre_hooks"),
    *("torch.nn.Module._forward_hooks_with_kwargs", "torch.nn.Module._forward_pre_hooks_with_kwargs"),
    *("torch.nn.Module._forward_hooks_always_called",),
    *("torch.nn.Module._backward_hooks", "torch.nn.Module._backward_pre_hooks"),
    "torch.library.CustomOpDef._qualname",
)
for _path in ATTRIBUTES:
    find(_path, REGIONS)


def outside_of_legacy_vmap() -> Any:
    """Return a context in which ``is_grads_batched`` does not refuse random numbers."""
    return _ExcludeDispatchKeys(_DispatchKeySet(_key_named("VmapMode")))


# --- modules

global_forward_pre_hooks = find("torch.nn.modules.module._global_forward_pre_hooks", REGIONS, placeholder=set())
global_forward_hooks = find("torch.nn.modules.module._global_forward_hooks", REGIONS)
global_backward_pre_hooks = find("torch.nn.modules.module._global_backward_pre_hooks", REGIONS)
global_backward_hooks = find("torch.nn.modules.module._global_backward_hooks", REGIONS)

# --- torch.compile

skip_code = find("torch._dynamo.eval_frame.skip_code", COMPILING, placeholder=lambda code: None)
get_overridable_functions = find("torch._dynamo.variables.torch.get_overridable_functions", COMPILING, placeholder=set)
#: Contexts that Dynamo knows, by their factory functions.
contexts_in_graphs = find("torch._dynamo.variables.torch.supported_ctx_manager_classes", COMPILING, placeholder={})
#: Dynamo's callback for functions called here: not None between the graphs of a compiled model.
frame_callback = find("torch._C._dynamo.eval_frame.get_eval_frame_callback", COMPILING, placeholder=lambda: None)
#: Dynamo's current translator: called in traced code.
current_translator = find("torch._dynamo.symbolic_convert.InstructionTranslator.current_tx", COMPILING)
#: Dynamo's variable for a class that traced code instantiates.
ClassInGraph = find("torch._dynamo.variables.user_defined.UserDefinedClassVariable", COMPILING)
#: Makes Dynamo's variable for a Python object in traced code.
variable_of = find("torch._dynamo.variables.builder.SourcelessBuilder.create", COMPILING)
_ParametersOrBuffers = find("torch._dynamo.source.UnspecializedParamBufferSource", COMPILING)
#: Dynamo's context of the graph that it traces; None outside of a compilation.
tracing_context = find("torch._guards.TracingContext.try_get", COMPILING)
FakeTensor = find("torch._subclasses.fake_tensor.FakeTensor", COMPILING)
FunctionalTensor = find("torch._subclasses.functional_tensor.FunctionalTensor", COMPILING)
is_functional_tensor = find("torch._is_functional_tensor", COMPILING)
#: `torch.nn.functional.pad`, as Dynamo shows it to modes.
nn_pad = find("torch._C._nn.pad", COMPILING)

if not TYPE_CHECKING:
    HigherOrderOperator = find("torch._ops.HigherOrderOperator", COMPILING)
    WeakTensorKeyDictionary = find("torch.utils.weak.WeakTensorKeyDictionary", COMPILING, placeholder=dict)


def has_compiled() -> bool:
    """Return whether torch.compile has traced anything in this process: graphs call no module hooks."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return bool(dynamo is not None and dynamo.counters["stats"])


def is_parameter_or_buffer(node: Any) -> bool:
    """Return whether an input of a Dynamo graph is a parameter or buffer of a module."""
    return isinstance(getattr(getattr(node, "_dynamo_source", None), "base", None), _ParametersOrBuffers)


# --- autocast


def _is_autocast_enabled_anywhere() -> bool:
    return any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda", "xpu", "mps"))


is_any_autocast_enabled = find("torch._C._is_any_autocast_enabled", REGIONS, fallback=_is_autocast_enabled_anywhere)
DisableAutocast = find("torch._C._DisableAutocast", REGIONS)
has_kernel_for_key = find("torch._C._dispatch_has_kernel_for_dispatch_key", "a norm or PReLU in a region")

# --- ops

#: The schemas of an operator of `torch.ops`, by "namespace::name".
schemas_of_operator = find("torch._C._jit_get_schemas_for_operator", REGIONS, fallback=lambda name: ())


def argument_names(operator: Any) -> tuple[str, ...]:
    """Return the argument names of a ``torch.ops`` operator: of an overload, or the default one."""
    overload = operator if hasattr(operator, "_schema") else getattr(operator, "default", None)
    return () if overload is None else tuple(argument.name for argument in overload._schema.arguments)


def _softmax_gradient(grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    weighted = grad * out
    return (weighted - out * weighted.sum(dim, keepdim=True)).to(dtype)


def _rms_norm_in_parts(x: Tensor, shape: tuple[int, ...], weight: Tensor | None, eps: float | None) -> Any:
    """Output and inverse root of the mean square, without the op that returns both."""
    square = x.to(torch.promote_types(x.dtype, torch.float32)).square()
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    invstd = square.mean(tuple(range(-len(shape), 0)), keepdim=True).add_(eps).rsqrt_()
    return torch.rms_norm(x, shape, weight, eps), invstd


softmax_backward = find("torch.ops.aten._softmax_backward_data.default", REGIONS, fallback=_softmax_gradient)
#: None if missing; `fused_rms_norm` then consists of other ops.
fused_rms_norm_backward = find("torch.ops.aten._fused_rms_norm_backward.default", REGIONS, fallback=None)
fused_rms_norm = _rms_norm_in_parts
if fused_rms_norm_backward is not None:
    fused_rms_norm = find("torch.ops.aten._fused_rms_norm", REGIONS, fallback=_rms_norm_in_parts)
batch_norm_impl_index = find("torch._batch_norm_impl_index", "batch or instance norm in a region")
attention_by_math = find("torch.ops.aten._scaled_dot_product_attention_math", "attention in a region")
choose_attention = find("torch._fused_sdp_choice", "attention with dropout in a region")
#: `F.grouped_mm` before torch 2.10, and the function that it calls since; None if missing.
grouped_mm = find("torch._grouped_mm", "grouped matrix products in a region", fallback=None)
suggest_memory_format = find("torch._prims_common.suggest_memory_format", "group or RMS norm in a region")
verify_batch_size = find("torch.nn.functional._verify_batch_size", "batch norm in a region")
verify_spatial_size = find("torch.nn.functional._verify_spatial_size", "instance norm in a region")
