"""Writes the model that the tests serve: a Llama of two small layers with random weights, whose tokens are bytes.

    python make_model.py FOLDER         needs torch, tokenizers, transformers; no network; 0.3 MB

It answers with noise, for as long as it is asked to: enough to load, hang and kill a real engine.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def tokenizer() -> PreTrainedTokenizerFast:
    words = [*SPECIAL.values(), *sorted(ByteLevel.alphabet())]
    bytes_only = Tokenizer(BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    bytes_only.pre_tokenizer = ByteLevel(add_prefix_space=False)
    bytes_only.decoder = ByteDecoder()
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_only, **SPECIAL)
    made.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    return made


def model(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(1)    # the same model on every machine
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=131072, bos_token_id=1, eos_token_id=2,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def main() -> None:
    folder = Path(sys.argv[1])
    words = tokenizer()
    words.save_pretrained(folder)
    model(-(-len(words) // 64) * 64).save_pretrained(folder)    # vLLM pads vocabularies to 64


if __name__ == "__main__":
    main()
