"""Sizes of language models that `plan` knows by name, and configurations of transformers."""

from __future__ import annotations

import copy
import difflib
from pathlib import Path
from typing import Any

#: Figures of config.json by the model's name on huggingface.co, where each stands in the file of that name.
SIZES: dict[str, dict[str, Any]] = {
    "meta-llama/Meta-Llama-3-8B": {
        **{"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    },
    "mistralai/Mistral-7B-v0.3": {
        **{"model_type": "mistral", "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None},
    },
    "Qwen/Qwen3-8B": {
        **{"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288},
        **{"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    },
    "Qwen/Qwen3-32B": {
        **{"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 25600},
        **{"num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128},
    },
    "google/gemma-3-1b-pt": {
        **{"model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912},
        **{"num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256},
    },
    "google/gemma-3-4b-pt": {
        **{"model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240},
        **{"num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    },
    "google/gemma-3-12b-pt": {
        **{"model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 3840, "intermediate_size": 15360},
        **{"num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256},
    },
    "google/gemma-3-27b-pt": {
        **{"model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 5376, "intermediate_size": 21504},
        **{"num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128},
    },
}


def configuration(name: str) -> Any:
    """Return the configuration of a text model: of the table, of a path, or of a name in the local cache."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"MODEL {name}: transformers makes it; pip install transformers") from error
    found = _named(name)
    if found is not None:
        figures = dict(SIZES[found])
        return transformers.AutoConfig.for_model(figures.pop("model_type"), **figures)
    try:
        given = transformers.AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        text = copy.deepcopy(given.get_text_config(decoder=True))
        assert text.num_hidden_layers >= 1
    except (OSError, ValueError, KeyError, AttributeError, AssertionError) as error:
        near = difflib.get_close_matches(name, names(), n=1, cutoff=0.6)
        raise ValueError(
            f"MODEL {name}: {'no such file' if '.' in Path(name).name and '/' in name else 'not known'}"
            f"{f'; nearest: {near[0]}' if near else ''}. Accepted are {', '.join(names())}; the path of a "
            "config.json of a language model, or of its folder; and the name of a model in the local cache of "
            "huggingface.co (nothing is downloaded)"
        ) from error
    return text


def names() -> dict[str, str]:
    """Return the full names by the last part of each."""
    return {name.rpartition("/")[2]: name for name in SIZES}


def _named(name: str) -> str | None:
    small = {key.lower(): full for short, full in names().items() for key in (short, full)}
    return small.get(name.lower()) if not Path(name).exists() else None
