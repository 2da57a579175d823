"""Training steps as CUDA graphs: `brevact.captured`."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from brevact.autograd.region.running import nodes_behind
from brevact.private_names.of_torch import WeakTensorKeyDictionary, tree_flatten, tree_unflatten
from brevact.quantizers.brief import brief
from brevact.quantizers.checks import check_int
from brevact.user_lines import warn

#: The type of device whose work is captured.
_DEVICE = "cuda"
_CONSTANTS = (type(None), bool, int, float, str)
#: What a graph depends on, by its place in the key.
_PARTS = (
    "shapes, types or constants of its arguments (pad batches to few sizes, pass numbers that change as tensors)",
    "autocast or grad mode",
    "training flags, policies, parameters or buffers of modules (fill a buffer in place, such as by copy_)",
    "parameters, which are frozen or moved",
    "constants of optimizers (for an lr that changes, give fused=True or capturable=True, or a tensor)",
)
_SYNCHRONIZES = "called a synchronizing CUDA operation"


def captured(
    step: Callable[..., Any], *, graphs: int = 8, warm_up: int = 3, generators: Iterable[torch.Generator] = ()
) -> Any:
    """Replay a training step as a CUDA graph, so that the GPU does not wait for Python; on a CPU, return ``step``.

    ``step`` takes a batch and trains on it: forward, ``loss.backward()`` and, if you like, the optimizer's step. Its
    first ``warm_up`` calls for a kind of arguments run as they are, on a side stream; the next call is captured, and
    replayed from then on. Each call is one step. There is a graph for each set of shapes, strides, types and
    constants of the arguments, of training flags, policies and frozen parameters of the modules, of the optimizers'
    constants, and of autocast and grad mode.

    >>> import torch, torch.nn.functional as F, brevact
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> model = brevact.quantize_backward(torch.nn.Linear(512, 10).to(device))
    >>> optimizer = torch.optim.AdamW(model.parameters(), capturable=device == "cuda")
    >>> @brevact.captured
    ... def step(inputs, targets):
    ...     optimizer.zero_grad()
    ...     with brevact.backward_quant(model):
    ...         loss = F.cross_entropy(model(inputs), targets)
    ...     loss.backward()
    ...     optimizer.step()
    ...     return loss
    >>> for _ in range(5):
    ...     loss = step(torch.randn(64, 512, device=device), torch.zeros(64, dtype=torch.long, device=device))

    - Arguments are copied into the graph's inputs; results are copies, without their autograd graph.
    - ``.grad`` equals that of the plain step, also if the program sets it to None between steps, or accumulates.
    - Replays draw new random numbers, those of packing, too. Name generators of your own in ``generators``.
    - ``lr`` of capturable and fused optimizers is read at each call, so that schedulers work: call them outside the
      step. ``GradScaler`` needs a fused optimizer (``fused=True, capturable=True``), others read the device.
    - Python runs at capture alone: replays print, count and rebind nothing.
    - While a number that a module holds changes in each call, as in quantizers that collect statistics, calls run as
      they are; the step is captured once it stays.

    A step that cannot be captured runs without a graph, and a warning says why, once: it synchronizes, draws or counts
    on the CPU, its arguments are on the CPU, memory is too small for a graph, or kinds are more than ``graphs``. An
    error of the step is raised unchanged.

    Args:
        step: function of tensors on the GPU, and of constants; its results are tensors and constants. Lists, tuples
            and dicts of them are fine.
        graphs: the most kinds of arguments that are captured; each graph keeps its inputs, results and gradients, and
            all share the memory of other tensors.
        warm_up: calls before a capture, at least 2; 11 for ``DistributedDataParallel``, as PyTorch asks.
        generators: CUDA generators, other than the default one, that the step draws from.

    Returns:
        A function with the arguments of ``step``.

    Raises:
        TypeError: ``step`` is not callable, or ``generators`` has something else.
        ValueError: ``graphs`` or ``warm_up`` is too small.
    """
    if not callable(step):
        raise TypeError(f"step: got {brief(step)}; accepted is a function of a batch: brevact.captured(train_step)")
    check_int("graphs", graphs, 1)
    check_int("warm_up", warm_up, 2)
    generators = tuple(generators)
    for each in generators:
        if not isinstance(each, torch.Generator):
            raise TypeError(f"generators: got {brief(each)}; accepted are torch.Generator(device='cuda')")
    return _Captured(step, graphs, warm_up, generators) if torch.cuda.is_available() else step


class _Captured:
    """A step. By kind of call: the number of its runs so far, or the replay of its graph, or None if it gets none."""

    def __init__(
        self, step: Callable[..., Any], most: int, warm_up: int, generators: tuple[torch.Generator, ...]
    ) -> None:
        functools.update_wrapper(self, step, updated=())
        self._step, self._most, self._warm_up, self._generators = step, most, warm_up, generators
        self._kinds: dict[Hashable, int | Callable[[list[Tensor]], Any] | None] = {}
        self._constants: dict[Hashable, Any] = {}
        self._reasons: set[str] = set()
        self._program = _Program()
        self._is_off = False
        self._side: Any = None
        self._pool: Any = None

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_off or torch.cuda.is_current_stream_capturing() or torch.compiler.is_compiling():
            return self._step(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if reason := _why_not_these(leaves, tensors):
            self._tell(reason)
            return self._step(*args, **kwargs)
        arguments = (spec, tuple(map(_kind_of, leaves))), _modes()
        key = *arguments, *self._program.kind()
        kind = self._kinds.get(key, 0)
        if self._program.absent and any(p.grad is not None for p in self._program.absent):
            kind = None  # it adds to gradients that it has not found before
        if callable(kind):
            return kind(tensors)
        if key not in self._kinds and len(self._kinds) >= self._most:
            parts = zip(_PARTS, key, *self._kinds, strict=True)
            differing = "; ".join(text for text, *values in parts if len({*values}) > 1)
            self._tell(f"it was called in more than graphs={self._most} ways, which differ in {differing}")
            kind = None
        if kind is None:
            return self._step(*args, **kwargs)
        if kind < self._warm_up:
            is_last = kind == self._warm_up - 1
            numbers = self._program.numbers() if is_last else {}
            result, is_known, reason = self._run_aside(args, kwargs, tensors, is_last)
            after = *arguments, *self._program.kind()
            count = kind + (is_known or not is_last)  # the last one knows all that a graph depends on
            if not is_known:
                key = after  # with the modules that this call has found
            elif is_last and not reason and after != key:
                reason = (
                    "it changes settings or buffers of modules, or optimizers; do that between its calls, or in place"
                )
            elif is_last and not reason and (name := self._program.changed_number(numbers)):
                count = kind
                self._tell(f"{name}, a number of a module, changes; the step is captured once it stays")
            self._kinds[key] = None if reason else count
            self._constants[key] = _constants_of(result)
            self._tell(reason)
            return result
        replay = self._capture(leaves, spec, self._constants[key])
        if callable(replay):
            self._kinds[key] = replay
            return replay(tensors)
        result = self._step(*args, **kwargs)  # raises the step's own error
        self._kinds[key] = None
        self._tell(replay)
        return result

    def _tell(self, reason: str) -> None:
        if reason and reason not in self._reasons:
            self._reasons.add(reason)
            name = getattr(self._step, "__qualname__", type(self._step).__name__)
            warn(f"brevact.captured: {name} runs without a CUDA graph: {reason}", RuntimeWarning)

    def _run_aside(self, args: Any, kwargs: Any, tensors: list[Tensor], is_last: bool) -> tuple[Any, bool, str]:
        """Run a step on the side stream, as PyTorch asks before a capture."""
        program = self._program
        if self._side is None:
            self._side, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        versions = [_version_of(x) for x in tensors]
        before, grads = program.state_on_host(), [p.grad for p in program.parameters]
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        try:
            with torch.cuda.stream(self._side), program.watched() as found, _syncs(is_last) as syncs:
                result = self._step(*args, **kwargs)
        finally:
            current.wait_stream(self._side)
        program.note_gradients(grads)
        reason = _why_not_result(result, bool(tensors or program.parameters), program.has_gradients)
        if versions != [_version_of(x) for x in tensors]:
            reason = "it changes an argument in place; keep such tensors outside of its arguments"
        if syncs:
            reason = f"it waits for the GPU, at {syncs[0]}"
        if is_last and not reason and not found:
            reason = program.why_not(before)
        return result, not found, reason

    def _capture(self, leaves: list[Any], spec: Any, constants: Any) -> Callable[[list[Tensor]], Any] | str:
        """Return the function that replays a step, or why there is none; parameters and gradients stay as they are."""
        program = self._program
        inputs = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = tree_unflatten(inputs, spec)
        parameters, rates, starts = program.parameters, program.rates(), program.starting_gradients()
        before = [p.grad for p in parameters]
        watched = [*parameters, *program.buffers()]
        versions = [x._version for x in watched]
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        cause: Exception | None = None
        try:
            for generator in self._generators:
                graph.register_generator_state(generator)
            for group, rate, _ in rates:
                group["lr"] = rate
            _set_gradients(parameters, starts)
            torch.clear_autocast_cache()  # its copies would not follow the weights
            with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
                try:
                    result = self._step(*args, **kwargs)
                except Exception as error:
                    cause = error  # the end of the capture may fail, too
                    raise
            ends = [p.grad for p in parameters]
        except Exception as error:
            torch.cuda.set_stream(current)
            self._mend_generators()
            reason, cause = _why_failed(cause or error), None
            return reason
        finally:
            torch.clear_autocast_cache()
            _set_gradients(parameters, before)
            for group, _, lr in rates:
                group["lr"] = lr
        if _constants_of(result) != constants:
            return "it returns numbers or a structure that change; return tensors"
        kept, (results, shape) = [x for x in inputs if isinstance(x, Tensor)], tree_flatten(result)
        added_to = [
            (p, start)
            for p, start, end in zip(parameters, starts, ends, strict=True)
            if start is not None and (end is None or end is start)
        ]
        changed = [x for x, version in zip(watched, versions, strict=True) if x._version != version]
        settings = [*map(_settings_of, program.modules)]  # alive: their identities are in the key

        @torch.no_grad()
        def replay(tensors: list[Tensor], _settings: Any = settings) -> Any:
            for own, x in zip(kept, tensors, strict=True):
                own.copy_(x)
            for p, buffer in added_to:
                if p.grad is None:
                    buffer.zero_()
                elif p.grad is not buffer:
                    buffer.copy_(p.grad)
            for group, rate, _ in rates:
                rate.fill_(group["lr"])
            graph.replay()
            _set_gradients(parameters, ends)
            torch.autograd.graph.increment_version(changed)
            return tree_unflatten([x.detach().clone() if isinstance(x, Tensor) else x for x in results], shape)

        return replay

    def _mend_generators(self) -> None:
        """Take generators out of a failed capture, which some versions of PyTorch leave them in."""
        for generator in (torch.cuda.default_generators[torch.cuda.current_device()], *self._generators):
            try:
                torch.rand((), device=generator.device, generator=generator)
            except RuntimeError:
                generator.graphsafe_set_state(generator.clone_state())
                self._is_off = True  # other graphs advance the old state


class _Program:
    """The modules and optimizers that a step calls, found in its first calls."""

    def __init__(self) -> None:
        self.modules: dict[nn.Module, None] = {}
        self.optimizers: dict[Optimizer, None] = {}
        #: Leaves that calls of backward reach, from calls on in which they are met again: a step may make others.
        self.leaves: dict[Tensor, None] = {}
        self._met: Any = WeakTensorKeyDictionary()
        self.parameters: list[Any] = []
        #: Those whose gradients a step replaces, and those that have none before and behind it.
        self.replaced: set[nn.Parameter] = set()
        self.absent: set[nn.Parameter] = set()
        self.has_gradients = False

    @contextmanager
    def watched(self) -> Iterator[list[Any]]:
        """Find modules, optimizers and leaves in a block; the list has the new ones behind it."""
        known: set[Any] = {*self.modules, *self.optimizers, *self.leaves}
        found: list[Any] = []
        hooks = (
            register_module_forward_pre_hook(lambda module, _: self.modules.setdefault(module)),
            register_optimizer_step_pre_hook(lambda optimizer, *_: self.optimizers.setdefault(optimizer)),
        )
        reached: dict[Tensor, None] = {}
        try:
            with _leaves_of_backward(reached):
                yield found
        finally:
            for hook in hooks:
                hook.remove()
            every: list[Any] = [p for module in self.modules for p in module.parameters()]
            every += [p for group in self._groups() for p in group["params"]]
            for x in reached.keys() - {*every}:
                if x in self._met:
                    self.leaves[x] = None
                self._met[x] = None
            found += {*self.modules, *self.optimizers, *self.leaves} - known
            # those of before stay: their identities are in keys
            every = [*every, *self.leaves, *self.parameters]
            self.parameters = [p for p in dict.fromkeys(every) if p.device.type == _DEVICE]

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def kind(self) -> tuple[Hashable, ...]:
        """Everything of modules and optimizers that a graph depends on."""
        return (
            tuple(
                (
                    module.training,
                    tuple(map(id, _settings_of(module))),
                    *map(id, module._parameters.values()),
                    *(x.data_ptr() for x in module._buffers.values() if x is not None),
                )
                for module in self.modules
            ),
            tuple((p.requires_grad, p.data_ptr()) for p in self.parameters),
            tuple(
                (name, value)
                for group in self._groups()
                for name, value in group.items()
                if isinstance(value, (*_CONSTANTS, tuple)) and not (name == "lr" and _takes_tensor_lr(group))
            ),
        )

    def numbers(self) -> dict[tuple[nn.Module, str], float]:
        """Numbers that modules hold, such as the counts of calls on which the code of Brevitas' quantizers depends."""
        every = dict.fromkeys(each for module in self.modules for each in module.modules())
        return {
            (module, name): value
            for module in every
            for name, value in vars(module).items()
            if isinstance(value, int | float)
        }

    def changed_number(self, before: dict[tuple[nn.Module, str], float]) -> str:
        """Return the module's type and the name of a number that has changed, or ""."""
        after = self.numbers()
        changed = (key for key, value in before.items() if after.get(key) != value)
        return next((f"{type(module).__name__}.{name}" for module, name in changed), "")

    def buffers(self) -> list[Tensor]:
        return [*dict.fromkeys(buffer for module in self.modules for buffer in module.buffers())]

    def note_gradients(self, before: list[Tensor | None]) -> None:
        """Note which gradients a step replaces instead of adding to them, and which are not there."""
        self.has_gradients = bool(self.optimizers) or any(p.grad is not None for p in self.parameters)
        if len(before) == len(self.parameters):
            pairs = [*zip(self.parameters, before, strict=True)]
            self.replaced = {p for p, old in pairs if old is not None and p.grad is not old}
            self.absent = {p for p, old in pairs if old is None and p.grad is None}

    def starting_gradients(self) -> list[Tensor | None]:
        """Return gradients to capture with: those that a step adds to, and None for others."""
        return [
            None
            if p in self.replaced or p in self.absent
            else torch.zeros_like(p)
            if p.grad is None and p.requires_grad
            else p.grad
            for p in self.parameters
        ]

    def rates(self) -> list[tuple[dict[str, Any], Tensor, float]]:
        """Groups with a number as learning rate that may be a tensor, that tensor, and the number."""
        return [
            (group, torch.full((), group["lr"], device=group["params"][0].device), group["lr"])
            for group in self._groups()
            if group["params"] and isinstance(group.get("lr"), float) and _takes_tensor_lr(group)
        ]

    def state_on_host(self) -> dict[str, Any]:
        """What no replay would change, by the reason."""
        values = [
            value.tolist() if isinstance(value, Tensor) else value
            for optimizer in self.optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, int | float) or (isinstance(value, Tensor) and value.device.type != _DEVICE)
        ]
        rates = [group.get("lr") for group in self._groups()]
        return {
            "it draws random numbers on the CPU": (torch.get_rng_state().numpy().tobytes(), random.getstate()),
            "an optimizer counts steps on the CPU; give it capturable=True": values,
            "it changes lr; call scheduler.step() between its calls": [
                lr._version if isinstance(lr, Tensor) else lr for lr in rates
            ],
        }

    def why_not(self, before: dict[str, Any]) -> str:
        """Return why a step cannot be captured, given its state on the host before it."""
        for reason, value in self.state_on_host().items():
            if before[reason] != value:
                return reason
        if any(group.get("capturable") is False for group in self._groups()):
            return "an optimizer has capturable=False; give it capturable=True"
        return ""


def _takes_tensor_lr(group: dict[str, Any]) -> bool:
    return bool(group.get("capturable") or group.get("fused"))


def _settings_of(module: nn.Module) -> list[Any]:
    hooks: Iterable[Any] = module._forward_pre_hooks.values()
    return [hook.settings for hook in hooks if getattr(hook, "is_of_region", False)]


def _modes() -> tuple[Hashable, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(_DEVICE) and (torch.get_autocast_dtype(_DEVICE), torch.is_autocast_cache_enabled()),
    )


def _kind_of(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf  # 0.0 equals -0.0, and NaN not itself


def _why_not_these(leaves: list[Any], tensors: list[Tensor]) -> str:
    for x in tensors:
        if x.device.type != _DEVICE or x.layout is not torch.strided:
            return (
                f"an argument, of shape {tuple(x.shape)}, is on {x.device}, {x.layout}; pass strided tensors on the GPU"
            )
        if x.requires_grad:
            return f"an argument, of shape {tuple(x.shape)}, requires gradients; pass x.detach()"
    for leaf in leaves:
        try:
            hash(leaf)
        except TypeError:
            return f"an argument, {brief(leaf)}, is neither a tensor nor hashable"
    return ""


def _why_not_result(result: Any, is_on_device: bool, has_gradients: bool) -> str:
    leaves, _ = tree_flatten(result)
    for x in leaves:
        if not isinstance(x, (Tensor, *_CONSTANTS)):
            return f"it returns {brief(x)}; accepted are tensors, numbers, and lists, tuples and dicts of them"
        if isinstance(x, Tensor) and x.device.type != _DEVICE:
            return f"it returns a tensor on {x.device}; return tensors on the GPU"
        if isinstance(x, Tensor) and x.requires_grad and not has_gradients:
            return (
                "its result needs gradients, and it computes none; call loss.backward() in it, or capture a module by "
                "torch.cuda.make_graphed_callables"
            )
        is_on_device = is_on_device or isinstance(x, Tensor)
    return "" if is_on_device else "it has no tensors on the GPU"


def _why_failed(error: BaseException) -> str:
    line = (str(error).splitlines() or [""])[0]
    if isinstance(error, torch.OutOfMemoryError):
        return f"the GPU has too little memory for another graph: {line}"
    return f"its capture failed with {type(error).__name__}: {line}"


def _constants_of(result: Any) -> Any:
    leaves, spec = tree_flatten(result)
    return spec, [None if isinstance(x, Tensor) else x for x in leaves]


def _version_of(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


@contextmanager
def _leaves_of_backward(found: dict[Tensor, None]) -> Iterator[None]:
    """Collect the leaves whose gradients calls of backward in a block compute."""
    run = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        roots = [tensors] if isinstance(tensors, Tensor) else [*tensors]
        for node in nodes_behind([x.grad_fn for x in roots if isinstance(x, Tensor)]):
            if isinstance(leaf := getattr(node, "variable", None), Tensor):
                found[leaf] = None
        run(roots, *args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = run


def _set_gradients(parameters: list[nn.Parameter], grads: list[Tensor | None]) -> None:
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad


@contextmanager
def _syncs(wanted: bool) -> Iterator[list[str]]:
    """Collect the lines of a block that synchronize; other warnings are shown as ever."""
    places: list[str] = []
    if not wanted:
        yield places
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", f".*{_SYNCHRONIZES}")
        show = warnings.showwarning

        def note(message: Warning | str, category: type[Warning], filename: str, lineno: int, *others: Any) -> None:
            if _SYNCHRONIZES in str(message):
                places.append(f"{filename}:{lineno}")
            else:
                show(message, category, filename, lineno, *others)

        warnings.showwarning = note  # type: ignore[assignment]
        if mode == 0:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(mode)
