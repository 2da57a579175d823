"""One training run of a model with a policy: measurements, and settings that change during the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from brevact.bit_widths.adaptive import Adaptive
from brevact.policy.mixing import MixSchedule
from brevact.reports.gradient_passes import Loss
from brevact.reports.gradients import gradient_report
from brevact.reports.memory import memory_of
from brevact.reports.memory_table import MemoryReport
from brevact.reports.step import StepLoss
from brevact.tables import MIB

_log = logging.getLogger(__name__)
#: Batches for fitting a policy and measuring sensitivities; noise is measured on half of them.
BATCHES = 8
#: Seeds per batch in a noise measurement.
_DRAWS = 2


#: State before a run begins.
FIRST_STATE = {"steps": 0, "noise": None, "adaptive": None, "mix_schedule": None}


class Run:
    """A training run of one model; measures batches with the loss in the model's region, or nothing without a loss."""

    def __init__(self, model: nn.Module, batches: list[Any], loss: Loss | None) -> None:
        self.model, self.batches, self.loss = model, batches, loss
        self.steps = 0
        self.has_attached = False
        self.noise: float | None = None
        self.memory: MemoryReport | None = None
        self.adaptive: Adaptive | None = None
        self.schedule: MixSchedule | None = None

    def measure(self) -> None:
        """Measure the bytes that a training step saves, if there are a batch and a loss."""
        if self.batches and self.loss is not None:
            batch, loss = self.batches[0], StepLoss(self.loss)
            self.memory = memory_of(self.model, lambda model: loss(model, batch), batch)
            _log.info("a step stores %.1f of %.1f MiB", self.memory.saved_bytes / MIB, self.memory.plain_bytes / MIB)

    def adapt(self, every: int) -> None:
        """Adapt widths to the layers' sensitivities, at the measured bytes."""
        assert self.memory is not None and self.loss is not None
        if not self.memory.saved_bytes:
            raise ValueError(f"adapt_every={every}: the model stores nothing for backward: {self.memory.note}")
        ratio = max(1.0, self.memory.ratio)
        try:
            self.adaptive = Adaptive(self.model, self.batches[0], self.loss, ratio=ratio, every=every)
        except ValueError as error:
            raise ValueError(
                f"adapt_every={every}, at the bytes that the policy stores: {error}; or pass a policy of more bits"
            ) from error

    def mix(self, kind: str, settings: Mapping[str, Any], steps: int | None) -> None:
        """Schedule the probability of quantizers that mix two widths."""
        if kind != "constant" and "steps" not in settings and steps is None:
            raise ValueError(f'mix_schedule={kind!r}: the run has no known length; add it: "{kind}:steps=1000"')
        self.schedule = MixSchedule(self.model, kind, **{"steps": max(1, steps or 1), **settings})

    def step(self, noise_every: int | None) -> None:
        """Advance by one training step."""
        self.steps += 1
        if self.adaptive is not None:
            self.adaptive.step(self.batches[self.steps % len(self.batches)])
        if self.schedule is not None:
            self.schedule.step()
        if noise_every is not None and self.steps % noise_every == 0:
            assert self.loss is not None
            batches = self.batches[: BATCHES // 2]
            report = gradient_report(self.model, batches, self.loss, None, _DRAWS, layers=None, progress=False)
            self.noise = report.noise

    def figures(self) -> dict[str, float]:
        """Return metrics where known: saved MiB, mean bit width, noise and mixing probability."""
        found: dict[str, float] = {}
        if self.adaptive is not None:
            widths = self.adaptive.bit_widths.values()
            found["brevact/saved_mib"] = self.adaptive.saved_bytes / MIB
            found["brevact/bit_width"] = sum(widths) / len(widths)
        if self.noise is not None:
            found["brevact/noise"] = self.noise
        if self.schedule is not None:
            found["brevact/mix_prob"] = self.schedule.mix_prob
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next steps depend on, as plain values."""
        return {
            "steps": self.steps,
            "noise": self.noise,
            "adaptive": None if self.adaptive is None else self.adaptive.state_dict(),
            "mix_schedule": None if self.schedule is None else self.schedule.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state; skips parts that this run or the state lacks."""
        self.steps, self.noise = state["steps"], state["noise"]
        for name, part in (("adaptive", self.adaptive), ("mix_schedule", self.schedule)):
            if part is not None and state[name] is not None:
                part.load_state_dict(state[name])
