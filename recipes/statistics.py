"""Statistics that Brevitas' activation quantizers collect, which their `state_dict` does not hold in full.

An activation quantizer such as `Int8ActPerTensorFloat` averages statistics over its first 300 batches and then starts
to learn its scale. A `state_dict` taken before that holds the average as if it were the learned scale: loading it ends
the collection early. A run that goes on exactly where it stopped needs the average and the count themselves.
"""

from collections.abc import Iterator

from torch import Tensor, nn

_TENSORS = ("buffer", "value")


def collected_statistics(model: nn.Module) -> dict[str, dict[str, object]]:
    """The count, the average and the initial value of each collecting module, by its name."""
    return {
        name: {"counter": int(module.counter), "buffer": module.buffer.clone(), "value": module.value.detach().clone()}
        for name, module in _collecting(model)
    }


def restore_statistics(model: nn.Module, statistics: dict[str, dict[str, object]]) -> None:
    """Restores the result of `collected_statistics`, after `load_state_dict`."""
    for name, module in _collecting(model):
        saved = statistics[name]
        module.counter = saved["counter"]
        module.buffer.copy_(saved["buffer"])
        module.value.data.copy_(saved["value"])


def _collecting(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if hasattr(module, "counter") and all(isinstance(getattr(module, key, None), Tensor) for key in _TENSORS):
            yield name, module
