"""Bytes of KV cache a token, against the figures of well-known models' own configurations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_watchdog.core.kv_bytes import KvShape, NoShapeError, kv_shape

LLAMA3_8B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
             "torch_dtype": "bfloat16"}
QWEN3_4B = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 99,
            "dtype": "bfloat16", "sliding_window": None, "use_sliding_window": False, "max_window_layers": 36}
QWEN25_7B = {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584,
             "torch_dtype": "bfloat16", "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28}
DEEPSEEK_V3 = {"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168,
               "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7B": (LLAMA3_8B | {"num_key_value_heads": 32, "torch_dtype": "float16"}, 512 << 10),
    "Llama-3-8B": (LLAMA3_8B, 128 << 10),
    "Llama-3.1-70B": (LLAMA3_8B | {"num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8192}, 320 << 10),
    "Qwen3-4B": (QWEN3_4B, 144 << 10),
    "Qwen2.5-7B": (QWEN25_7B, 56 << 10),
    "Qwen2.5-0.5B": ({"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 896,
                      "torch_dtype": "bfloat16"}, 12 << 10),
    "DeepSeek-V3": (DEEPSEEK_V3, 70_272),
    "DeepSeek-V2-Lite": (DEEPSEEK_V3 | {"num_hidden_layers": 27}, 31_104),
    "GLM-4-9B-128K": ({"num_layers": 40, "num_attention_heads": 32, "hidden_size": 4096, "kv_channels": 128,
                       "multi_query_attention": True, "multi_query_group_num": 2, "torch_dtype": "bfloat16"}, 40 << 10),
    "Falcon-7B": ({"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True,
                   "new_decoder_architecture": False, "torch_dtype": "bfloat16"}, 8 << 10),
    "Falcon-40B": ({"num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8, "hidden_size": 8192,
                    "multi_query": True, "new_decoder_architecture": True, "torch_dtype": "bfloat16"}, 120 << 10),
    "GPT-2": ({"n_layer": 12, "n_head": 12, "n_embd": 768, "torch_dtype": "float16"}, 36 << 10),
    "Mixtral-8x7B": (LLAMA3_8B | {"sliding_window": None}, 128 << 10),
    "Qwen3-Next-80B": ({"num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
                        "hidden_size": 2048, "full_attention_interval": 4, "torch_dtype": "bfloat16"}, 24 << 10),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_token_takes_what_the_models_papers_say(name: str) -> None:
    config, size = MODELS[name]
    assert kv_shape(config).bytes(1000) == 1000 * size


def test_a_cache_in_fp8_takes_half() -> None:
    assert kv_shape(LLAMA3_8B, "fp8").bytes(1) == 64 << 10


@pytest.mark.parametrize(("config", "full", "windowed", "window"), [
    (LLAMA3_8B | {"sliding_window": 4096, "model_type": "mistral"}, 0, 32, 4096),                      # Mistral-7B-v0.1
    (LLAMA3_8B | {"num_hidden_layers": 42, "sliding_window": 4096, "model_type": "gemma2"}, 21, 21, 4096),
    ({"text_config": LLAMA3_8B | {"num_hidden_layers": 62, "sliding_window": 1024, "sliding_window_pattern": 6}},
     10, 52, 1024),                                                                                    # Gemma 3
    (LLAMA3_8B | {"num_hidden_layers": 4, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2},
     2, 2, 128),                                                                                       # gpt-oss
    (QWEN25_7B | {"use_sliding_window": True, "max_window_layers": 21}, 21, 7, 131072),
    (LLAMA3_8B | {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}, 1, 0, 0),
])
def test_windows_keep_no_more_than_their_size(config: dict[str, Any], full: int, windowed: int, window: int) -> None:
    shape = kv_shape(config)
    assert (shape.full_layers, shape.window_layers, shape.window) == (full, windowed, window)
    each = shape.layer_bytes
    assert shape.bytes(200_000) == each * (full * 200_000 + windowed * window)


@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": 2}, LLAMA3_8B | {"torch_dtype": "int3"}, {"text_config": 3},
                                    LLAMA3_8B | {"num_hidden_layers": "32"}])
def test_what_is_no_configuration_says_which_key_is_missing(config: dict[str, Any]) -> None:
    with pytest.raises(NoShapeError):
        kv_shape(config)


@given(st.integers(0, 50), st.integers(1, 5000), st.integers(0, 50), st.integers(1, 5000), st.integers(0, 1 << 40))
def test_as_many_fit_as_take_no_more(full: int, each: int, windowed: int, window: int, size: int) -> None:
    shape = KvShape(full, each, windowed, window if windowed else 0)
    tokens = shape.tokens(size)
    if tokens is None:
        assert not full and shape.bytes(1 << 40) <= size
    else:
        assert shape.bytes(tokens) <= size < shape.bytes(tokens + 1)
