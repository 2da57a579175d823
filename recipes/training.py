"""One epoch after another: optimizer, learning-rate schedule, mixed precision, and the state a checkpoint needs."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

import brevact
from recipes.errors import RecipeError
from recipes.metrics import Scores
from recipes.recipe import BatchSource
from recipes.schedules import warmup_factor
from recipes.settings import AMP_DTYPES, Settings
from recipes.statistics import collected_statistics, restore_statistics


class Objective(nn.Module):
    """A model and the loss it trains with as one module, which a backward policy or a memory report may cover whole."""

    def __init__(self, model: nn.Module, label_smoothing: float) -> None:
        super().__init__()
        self.model = model
        self.loss = nn.CrossEntropyLoss(label_smoothing=label_smoothing)

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The model's outputs (... x classes) and the mean loss over all targets (...)."""
        outputs = self.model(inputs)
        return outputs, self.loss(outputs.flatten(0, -2), targets.flatten())


class Trainer:
    """Trains a model with AdamW.

    Args:
        objective: the model, on its device already, and its loss.
        settings: of the run.
        device: of model and batches.
        steps_per_epoch: optimizer steps in an epoch.

    Raises:
        RecipeError: the device does not compute in the type that `settings.amp` names.
    """

    def __init__(self, objective: Objective, settings: Settings, device: torch.device, steps_per_epoch: int) -> None:
        self.objective = objective
        self.model = objective.model
        self.device = device
        self.clip_grad_norm = settings.clip_grad_norm
        self.amp_dtype = AMP_DTYPES[settings.amp]
        if settings.amp == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise RecipeError(
                f"--amp bf16: {torch.cuda.get_device_name(device)} does not compute in bfloat16; use fp16"
            )
        self._make_optimizer = partial(make_optimizer, self.model, settings, steps_per_epoch)
        self._capture = brevact.captured if settings.captured else partial
        self._make_step()
        self.adaptive: brevact.Adaptive | None = None
        # PyTorch's initial scale of 2**16 overflows, and skips, the first steps of most networks.
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**12, enabled=settings.amp == "fp16")

    @property
    def lr(self) -> float:
        return self.scheduler.get_last_lr()[0]

    def train_epoch(self, batches: BatchSource, epoch: int, on_step: Callable[[], object]) -> Scores:
        """Takes one optimizer step for each batch of an epoch."""
        self.objective.train()
        meter = _Meter(self.device)
        for inputs, targets in batches.epoch(epoch):
            outputs, loss = self._step(inputs, targets)
            self.scheduler.step()
            if self.adaptive is not None:
                self.adaptive.step((inputs, targets))
            meter.add(outputs, targets, loss)
            on_step()
        scores = meter.scores()
        if not math.isfinite(scores.loss):
            raise RecipeError(
                f"the training loss became {scores.loss} in epoch {epoch}; try a smaller --lr, --clip-grad-norm 1 or "
                "more --warmup-epochs"
            )
        return scores

    def _make_step(self) -> None:
        """Makes the optimizer of the model's parameters, and the step that trains with it."""
        self.optimizer, self.scheduler = self._make_optimizer()
        self._step = self._capture(self._train)

    def _train(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with self.autocast():
            outputs, loss = self.objective(inputs, targets)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        if self.clip_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return outputs, loss

    def adapt(self, batch: tuple[Tensor, Tensor], every: int) -> None:
        """From now on bits move to the layers where they matter, at the bytes that the model's policy stores."""
        with self.autocast():
            report = brevact.memory_report(self.objective, batch)
        ratio = report.plain_bytes / report.saved_bytes
        try:
            self.adaptive = brevact.Adaptive(self.objective, batch, self._scaled_loss, ratio=ratio, every=every)
        except ValueError as error:
            raise RecipeError(f"--adapt-every {every}: {error}") from error

    def fit(self, batches: list[tuple[Tensor, Tensor]], budget: dict[str, float]) -> brevact.Policy:
        """The policy of least gradient noise of the model and its loss within a budget."""
        return brevact.fit(self.objective, batches, self._scaled_loss, **budget)

    def _scaled_loss(self, objective: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss whose gradients a step computes."""
        with self.autocast():
            _, loss = objective(*batch)
        return self.scaler.scale(loss)

    @torch.no_grad()
    def evaluate(self, batches: BatchSource) -> Scores:
        """Scores of the model in eval mode, with the plain cross-entropy as loss."""
        objective = Objective(self.model, label_smoothing=0.0).eval()
        meter = _Meter(self.device)
        for inputs, targets in batches.epoch():
            with self.autocast():
                outputs, loss = objective(inputs, targets)
            meter.add(outputs, targets, loss)
        return meter.scores()

    def autocast(self) -> torch.autocast:
        """The context that forward passes run in; it does nothing at full precision."""
        return torch.autocast(self.device.type, self.amp_dtype, enabled=self.amp_dtype is not None)

    def state_dict(self) -> dict[str, object]:
        """Everything that the next step depends on, random generators included."""
        return {
            **{name: part.state_dict() for name, part in self._parts().items()},
            "adaptive": None if self.adaptive is None else self.adaptive.state_dict(),
            "statistics": collected_statistics(self.model),
            "noise_count": brevact.noise_count(),
            "cpu_generator": torch.get_rng_state(),
            "cuda_generator": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continues from a `state_dict`, on the device of this trainer.

        Loading makes Brevitas replace its activation quantizers, their parameters with them, so the optimizer is built
        anew once the model has its state.
        """
        self.model.load_state_dict(state["model"])
        restore_statistics(self.model, state["statistics"])
        self._make_step()
        for name in ("optimizer", "scheduler", "scaler"):
            self._parts()[name].load_state_dict(state[name])
        if self.adaptive is not None:
            self.adaptive.load_state_dict(state["adaptive"])
        brevact.noise_count(state["noise_count"])
        torch.set_rng_state(state["cpu_generator"])
        if self.device.type == "cuda" and state["cuda_generator"] is not None:
            torch.cuda.set_rng_state(state["cuda_generator"], self.device)

    def _parts(self) -> dict[str, object]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
        }


class _Meter:
    """Sums loss and correct answers on the device, so that a step does not wait for its figures."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), device=device)
        self.correct = torch.zeros((), dtype=torch.int64, device=device)
        self.targets = 0

    def add(self, outputs: Tensor, targets: Tensor, loss: Tensor) -> None:
        self.loss += loss.detach() * targets.numel()
        self.correct += (outputs.detach().argmax(-1) == targets).sum()
        self.targets += targets.numel()

    def scores(self) -> Scores:
        return Scores(self.loss.item() / self.targets, self.correct.item() / self.targets)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups for an optimizer: weights decay; biases, norms and other vectors do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def make_optimizer(
    model: nn.Module, settings: Settings, steps_per_epoch: int
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """AdamW over the parameters that the model has now, and the schedule of its learning rate."""
    groups = parameter_groups(model, settings.weight_decay)
    on_device = settings.captured and next(model.parameters()).is_cuda
    kernels = {"fused": True, "capturable": True} if on_device else {}
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, **kernels)
    return optimizer, make_schedule(optimizer, settings, steps_per_epoch)


def make_schedule(optimizer: torch.optim.Optimizer, settings: Settings, steps_per_epoch: int) -> LRScheduler:
    """The learning rate of each step of a run, for `Settings.schedule`."""
    total = settings.epochs * steps_per_epoch
    warmup = round(settings.warmup_epochs * steps_per_epoch)
    if settings.schedule == "onecycle":
        if total < 4:
            raise RecipeError(f"--schedule onecycle needs at least 4 steps, this run has {total}; use constant")
        rise = max(2, warmup)  # OneCycleLR divides by the length of its rise, less one
        return OneCycleLR(optimizer, max_lr=settings.lr, total_steps=total, pct_start=rise / total)
    decay = settings.schedule == "cosine"
    return LambdaLR(optimizer, partial(warmup_factor, warmup=warmup, total=total, decay=decay))
