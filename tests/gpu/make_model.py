"""A Llama without weights, for `--load-format dummy`: a configuration and the byte tokenizer of the real-vLLM tests.

    python -m tests.gpu.make_model FOLDER [tiny|1b|8b]      8b has 7.0 billion parameters, 13 GiB in bfloat16

A second's work: vLLM makes the weights up, on the card, so no disk has a part in a start.
"""

import sys
from pathlib import Path

from tests.real.make_model import tokenizer
from transformers import LlamaConfig

# hidden size, feed-forward size, layers, heads, heads of keys and values
SIZES = {"tiny": (64, 128, 2, 2, 2), "1b": (2048, 8192, 16, 32, 8), "8b": (4096, 14336, 32, 32, 8)}


def main() -> None:
    folder, (hidden, inner, layers, heads, kv_heads) = Path(sys.argv[1]), SIZES[sys.argv[2] if sys.argv[2:] else "8b"]
    words = tokenizer()
    words.save_pretrained(folder)
    LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=-(-len(words) // 64) * 64, hidden_size=hidden,
        intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=hidden // heads, max_position_embeddings=131072, bos_token_id=1, eos_token_id=2, dtype="bfloat16",
    ).save_pretrained(folder)


if __name__ == "__main__":
    main()
