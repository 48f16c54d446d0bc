"""A model's folder without weights: a tokenizer whose tokens are bytes, and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

TEMPLATE = (
    "{{ bos_token }}{% if tools %}[tools]{% for tool in tools %}{{ tool | tojson }}{% endfor %}[/tools]{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write(folder: Path, template: str = TEMPLATE) -> Path:
    """One token in front of a prompt, and one for each byte."""
    folder.mkdir(exist_ok=True)
    words = ["<unk>", "<s>", "</s>", *sorted(ByteLevel.alphabet())]
    made = Tokenizer(BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder
