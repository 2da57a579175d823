"""Backward quantization in other libraries' training loops; each library is optional.

| class | for |
|---|---|
| ``TrainingPolicy`` | any loop; with Accelerate, ``accelerator.register_for_checkpointing(policy)`` |
| ``HuggingFaceCallback`` | ``transformers.Trainer`` and its subclasses, such as TRL's trainers; PEFT's models |
| ``LightningCallback`` | ``lightning.Trainer`` |
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from brevact.trainers.training_policy import TrainingPolicy

if TYPE_CHECKING:
    from brevact.trainers.hugging_face import HuggingFaceCallback as HuggingFaceCallback
    from brevact.trainers.lightning import LightningCallback as LightningCallback

__all__ = ["HuggingFaceCallback", "LightningCallback", "TrainingPolicy"]

#: Module and required packages of each class.
_LAZY = {
    "HuggingFaceCallback": ("brevact.trainers.hugging_face", "transformers accelerate"),
    "LightningCallback": ("brevact.trainers.lightning", "lightning"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, packages = _LAZY[name]
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ImportError(f"{__name__}.{name} does not import ({error}); install it: pip install {packages}") from error
