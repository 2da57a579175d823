"""Private and undocumented names of PyTorch."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from brevact.private_names.lookup import find

if TYPE_CHECKING:
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch.utils._pytree import TreeSpec as TreeSpec
    from torch.utils.weak import WeakTensorKeyDictionary as WeakTensorKeyDictionary

F = TypeVar("F", bound=Callable[..., Any])

# --- the profiler

_LEVEL = "KINETO_LOG_LEVEL"
_one_at_a_time = threading.RLock()  # two profilers in two threads crash the process


@contextmanager
def quietly() -> Iterator[None]:
    """Start the profiler without terminal output unless the user set its log level; threads wait for each other."""
    with _one_at_a_time:
        is_set = _LEVEL in os.environ
        os.environ.setdefault(_LEVEL, "99")  # read once per process
        try:
            yield
        finally:
            if not is_set:
                os.environ.pop(_LEVEL, None)


def allocations(profile: Any) -> Iterator[int]:
    """Yield the bytes of each allocation in a finished ``torch.profiler.profile``, negative for freed ones."""
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            yield event.nbytes()


# --- autograd

push_hooks = find("torch._C._autograd._push_saved_tensors_default_hooks")
pop_hooks = find("torch._C._autograd._pop_saved_tensors_default_hooks")
top_hooks = find("torch._C._autograd._top_saved_tensors_default_hooks")
current_graph_task = find("torch._C._current_graph_task_id")  #: -1 outside of a backward pass
#: Number of tensors and Python objects that hold the storage at an address.
count_holders = find("torch._C._storage_Use_Count")
#: The graph node whose backward this thread runs; None outside of one.
current_autograd_node = find("torch._C._current_autograd_node")
queue_callback = find("torch.autograd.Variable._execution_engine.queue_callback")
BackwardCFunction = find("torch.autograd.function.BackwardCFunction")
#: Code of `Function.apply`; None from torch 2.14 on, where it is no Python function.
function_apply_code = find("torch.autograd.Function.apply.__func__.__code__", fallback=None)


#: The saved-tensor hooks around the forward pass of a non-reentrant checkpoint.
CheckpointHooks = find("torch.utils.checkpoint._checkpoint_hook")


def checkpoint_of(hook: Callable) -> Any:
    """Return a non-reentrant checkpoint's object for one call, from the pack hook of a pass through it."""
    names = inspect.getclosurevars(inspect.unwrap(hook)).nonlocals
    return names["frame"] if "frame" in names else names["target_frame_ref"]()


# --- random numbers

_set_seed = find("torch.random._manual_seed_impl")


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


#: By its name, or by that below PyTorch 2.13; None without ``torch.distributed``.
all_gather_single = find("torch.distributed.all_gather_single", fallback=None) or find(
    "torch.distributed.all_gather_into_tensor", fallback=None
)
_collectives = find("torch.distributed.distributed_c10d", fallback=None)


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

DisableTorchFunction = find("torch._C.DisableTorchFunction")
#: Whether `__torch_function__` of subclasses runs, which it does except inside of `DisableTorchFunction`.
is_torch_function_on = find("torch._C._is_torch_function_enabled")
DisableFuncTorch = find("torch._C._DisableFuncTorch")
len_function_stack = find("torch._C._len_torch_function_stack")
function_stack_at = find("torch._C._get_function_stack_at")
function_modes = find("torch.overrides._get_current_function_mode_stack")
pop_function_mode = find("torch._C._pop_torch_function_stack")
push_function_mode = find("torch._C._push_on_torch_function_stack")
len_dispatch_stack = find("torch._C._len_torch_dispatch_stack")
#: Context that hides ops from all dispatch modes, including others'.
no_dispatch_modes = find("torch._C._DisableTorchDispatch")
active_fake_mode = find("torch._guards.active_fake_mode")  #: None without fake tensors
DispatchMode = find("torch.utils._python_dispatch.TorchDispatchMode")
tree_leaves = find("torch.utils._pytree.tree_leaves")
disable_modes = find("torch.utils._python_dispatch._disable_current_modes")
is_functorch_tensor = find("torch._C._functorch.is_functorch_wrapped_tensor")
#: State of modules that FSDP and the like wrap without a module of their own.
states_of_modules = find("torch.distributed._composable_state._module_state_mapping", fallback=(True,))
#: Whether a tensor is a batch of ``is_grads_batched``, and of ``torch.func.vmap``.
is_batched = find("torch._C._functorch.is_legacy_batchedtensor")
is_functorch_batched = find("torch._C._functorch.is_batchedtensor")
#: torch's error message if saved-tensor hooks are off; None if they are on.
why_hooks_are_off = find("torch._C._autograd._saved_tensors_hooks_get_disabled_error_message")
functorch_interpreter = find("torch._C._functorch.peek_interpreter_stack")
is_jit_tracing = find("torch._C._is_tracing")
tree_flatten = find("torch.utils._pytree.tree_flatten")
tree_unflatten = find("torch.utils._pytree.tree_unflatten")

if not TYPE_CHECKING:
    TreeSpec = find("torch.utils._pytree.TreeSpec")


@functools.cache
def differentiate_composite_ops() -> None:
    """Let AOTAutograd differentiate composite ops of meta tensors: their Python kernels for these have no gradient."""
    key, has_kernel = find("torch._C.DispatchKey.AutogradMeta"), find("torch._C._dispatch_has_kernel_for_dispatch_key")
    kind, item = find("torch._ops.OpOverload"), torch.ops.aten.item.default
    for op in find("torch._decomp.decomposition_table"):
        if isinstance(op, kind) and op is not item and has_kernel(op.name(), "CompositeImplicitAutograd"):
            op.py_impl(key)(op.decompose)


def parts_of_coo(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values of a sparse tensor, coalesced or not."""
    return x._indices(), x._values()


# --- modules

global_forward_pre_hooks = find("torch.nn.modules.module._global_forward_pre_hooks")
global_forward_hooks = find("torch.nn.modules.module._global_forward_hooks")
global_backward_pre_hooks = find("torch.nn.modules.module._global_backward_pre_hooks")
global_backward_hooks = find("torch.nn.modules.module._global_backward_hooks")
find("torch.nn.modules.module._has_any_global_hook")


def has_foreign_global_hook() -> bool:
    """Return whether others have global hooks: a compiled module warns that they run twice, which ours may."""
    tables = global_forward_pre_hooks, global_forward_hooks, global_backward_pre_hooks, global_backward_hooks
    hooks = [hook for table in tables for hook in table.values()]
    return not all(str(getattr(hook, "__module__", "")).startswith("brevact.") for hook in hooks)


torch.nn.modules.module._has_any_global_hook = has_foreign_global_hook

# --- torch.compile

dynamo_config = find("torch._dynamo.config")
fx_traceback = find("torch.fx.traceback")
#: Context in which nodes that are traced get entries of `meta["custom"]`.
annotate = find("torch.fx.traceback.annotate")
call_module = find("torch.nn.Module._call_impl")
#: Dynamo's classes of variables: of any, of frozen dataclasses, methods and modes.
VariableTracker = find("torch._dynamo.variables.base.VariableTracker")
#: Name of the method that reads an attribute: PyTorch 2.15 has renamed it.
GET_ATTRIBUTE = "var_getattr" if hasattr(VariableTracker, "var_getattr") else "tp_getattro_impl"
FrozenDataClassVariable = find("torch._dynamo.variables.user_defined.FrozenDataClassVariable")
MethodVariable = find("torch._dynamo.variables.functions.UserMethodVariable")
FunctionModeVariable = find("torch._dynamo.variables.torch_function.TorchFunctionModeVariable")
_set_strategy = find("torch._dynamo.eval_frame.set_code_exec_strategy")
_skips = find("torch._dynamo.types.FrameExecStrategy")(*2 * (find("torch._dynamo.types.FrameAction.SKIP"),))
get_overridable_functions = find("torch._dynamo.variables.torch.get_overridable_functions")
#: Prefix of the modules where torch.compile makes the functions that run its graphs.
COMPILED = "torch._functorch."
#: Module of `torch._dynamo.explain`, and of its compiler.
DYNAMO = "torch._dynamo.eval_frame"
#: Contexts that Dynamo knows, by their factory functions.
contexts_in_graphs = find("torch._dynamo.variables.torch.supported_ctx_manager_classes")
#: Dynamo's callback for functions called here: not None between the graphs of a compiled model.
frame_callback = find("torch._C._dynamo.eval_frame.get_eval_frame_callback")
FakeTensor = find("torch._subclasses.fake_tensor.FakeTensor")
is_functional_tensor = find("torch._is_functional_tensor")
#: `torch.nn.functional.pad`, as Dynamo shows it to modes.
nn_pad = find("torch._C._nn.pad")

if not TYPE_CHECKING:
    HigherOrderOperator = find("torch._ops.HigherOrderOperator")
    WeakTensorKeyDictionary = find("torch.utils.weak.WeakTensorKeyDictionary")


def skipped_by_dynamo(function: F) -> F:
    """Let Dynamo skip a function that Python calls, and what it calls, and trace it if traced code calls it."""
    _set_strategy(function.__code__, _skips)
    return function


def has_compiled() -> bool:
    """Return whether torch.compile has traced anything in this process: graphs call no module hooks."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return bool(dynamo is not None and dynamo.counters["stats"])


# --- autocast


is_any_autocast_enabled = find("torch._C._is_any_autocast_enabled")
DisableAutocast = find("torch._C._DisableAutocast")
has_kernel_for_key = find("torch._C._dispatch_has_kernel_for_dispatch_key")

# --- ops

#: The schemas of an operator of `torch.ops`, by "namespace::name".
schemas_of_operator = find("torch._C._jit_get_schemas_for_operator")
softmax_backward = find("torch.ops.aten._softmax_backward_data.default")
fused_rms_norm_backward = find("torch.ops.aten._fused_rms_norm_backward.default")
fused_rms_norm = find("torch.ops.aten._fused_rms_norm")
batch_norm_impl_index = find("torch._batch_norm_impl_index")
attention_by_math = find("torch.ops.aten._scaled_dot_product_attention_math")
flash_attention = find("torch.ops.aten._scaled_dot_product_flash_attention")
choose_attention = find("torch._fused_sdp_choice")
grouped_mm = find("torch._grouped_mm")
suggest_memory_format = find("torch._prims_common.suggest_memory_format")
