"""What the KV cache of a prompt takes in memory, from a model's config.json.  Pure.

A layer keeps a key and a value for each KV head and token (grouped-query attention: fewer heads than the query's), or one
compressed vector for each token (multi-head latent attention, MLA); a layer with a sliding window keeps no more tokens than
the window; a layer of linear attention keeps none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model")
KV_HEADS = ("num_key_value_heads", "multi_query_group_num", "num_kv_heads", "n_head_kv")
HEAD_SIZE = ("head_dim", "kv_channels")


class NoShapeError(Exception):
    """The key that the configuration lacks, or that makes no sense."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """`layer_bytes`: of one token in one layer, on all cards together.  `window`: tokens; 0: no layer has one."""

    full_layers: int
    layer_bytes: int
    window_layers: int = 0
    window: int = 0

    def bytes(self, tokens: int) -> int:
        """What a prompt of so many takes."""
        return self.layer_bytes * (self.full_layers * tokens + self.window_layers * min(tokens, self.window))

    def tokens(self, size: float) -> int | None:
        """How many fit; None: any number, since no layer keeps them all."""
        each, both = self.layer_bytes * self.full_layers, self.layer_bytes * (self.full_layers + self.window_layers)
        if self.window_layers and size < both * self.window:
            return int(size // both)
        return int((size - self.layer_bytes * self.window_layers * self.window) // each) if each else None


def kv_shape(config: Mapping[str, Any], cache_dtype: str = "auto") -> KvShape:
    """`cache_dtype`: --kv-cache-dtype.  Raises NoShapeError."""
    text = config.get("text_config") or config.get("llm_config") or config
    if not isinstance(text, Mapping):
        raise NoShapeError("text_config")
    dtype = cache_dtype if cache_dtype != "auto" else str(_dtype(text) or _dtype(config) or "bfloat16")
    if dtype.removeprefix("torch.") not in DTYPES:
        raise NoShapeError("dtype")
    size = DTYPES[dtype.removeprefix("torch.")] * _elements(text)
    full, windowed = _layers(text)
    return KvShape(full, size, windowed, _whole(text, ("sliding_window",)) if windowed else 0)


def _dtype(config: Mapping[str, Any]) -> object:
    return config.get("dtype") or config.get("torch_dtype")


def _elements(config: Mapping[str, Any]) -> int:
    """Numbers that one layer keeps of one token."""
    if config.get("kv_lora_rank"):
        return _whole(config, ("kv_lora_rank",)) + _whole(config, ("qk_rope_head_dim",))
    heads = _whole(config, HEADS)
    head_size = _whole(config, HEAD_SIZE, _whole(config, HIDDEN, heads) // heads)
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):     # Falcon's first
        return 2 * head_size
    grouped = config.get("multi_query_attention") is not False      # a GLM that isn't names its groups, too
    return 2 * head_size * (_whole(config, KV_HEADS, heads) if grouped else heads)


def _layers(config: Mapping[str, Any]) -> tuple[int, int]:
    """With all tokens, with a window."""
    count = _whole(config, LAYERS)
    shared = int(config.get("num_kv_shared_layers") or 0)      # they read another layer's
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        own = kinds[: count - shared]
        return sum(kind == "full_attention" for kind in own), sum("sliding" in str(kind) for kind in own)
    if (interval := config.get("full_attention_interval")) is not None:     # the others are linear
        return count // int(interval), 0
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return count - shared, 0
    every = _whole(config, ("sliding_window_pattern",), 2 if config.get("model_type") == "gemma2" else count + 1)
    if config.get("use_sliding_window") is True:        # Qwen 2: the first ones are full
        full = min(count, _whole(config, ("max_window_layers",), 0))
        return full, count - full
    full = count // every
    return full, count - full


def _whole(config: Mapping[str, Any], names: tuple[str, ...], default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    if default is None:
        raise NoShapeError(names[0])
    return default
