"""A thousand requests as clients might send them, the same on every machine: texts of all scripts, chats, tools, token ids.

And a model's folder to ask them of: the tests' model with a tokenizer that merges, composes and has special tokens.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

Body = dict[str, Any]
SPECIALS = ["<unk>", "<s>", "</s>", "<|turn|>", "<|end|>"]
VOCABULARY = 320        # as many as the model has rows
WORDS = r"(?i:'s|'t|'ll)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PLAIN = (       # wants a message's content as one text
    "{{- bos_token }}\n"
    "{%- if tools %}\n"
    "    {{- '<|turn|>tools\n' }}\n"
    "    {%- for tool in tools %}\n        {{- tool | tojson(indent=2) + '\n' }}\n    {%- endfor %}\n"
    "    {{- '<|end|>\n' }}\n"
    "{%- endif %}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.role not in ('system', 'user', 'assistant', 'tool') %}\n"
    "        {{- raise_exception('no such role') }}\n    {%- endif %}\n"
    "    {{- '<|turn|>' + message.role }}{% if message.name is defined %}{{ ' ' + message.name }}{% endif %}{{ '\n' }}\n"
    "    {%- if message.content is string %}{{ message.content | trim if trimmed else message.content }}{% endif %}\n"
    "    {%- for call in message.tool_calls or [] %}\n"
    "        {{- '\n' + call.function.name + ' ' + (call.function.arguments | tojson) }}\n    {%- endfor %}\n"
    "    {{- '<|end|>\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|turn|>assistant\n' }}\n"
    "    {%- if enable_thinking is defined and not enable_thinking %}{{ '(at once)' }}{% endif %}\n{%- endif %}\n"
)
IN_PARTS = (    # walks through a message's parts
    "{{ bos_token }}{% for message in messages %}<|turn|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}[{{ part['text'] }}]{% endif %}{% endfor %}{% endif %}<|end|>\n"
    "{% generation %}{% endgeneration %}{% if loop.index > 40 %}{% break %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
SCRIPTS = (
    (0x20, 0x7E), (0x20, 0x7E), (0x20, 0x7E), (0xA1, 0x24F), (0x300, 0x36F), (0x370, 0x5FF), (0x600, 0x6FF), (0x900, 0xDFF),
    (0x1100, 0x11FF), (0x2000, 0x206F), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFB00, 0xFDFB),
    (0x1D15E, 0x1D164), (0x1F300, 0x1FAFF), (0x01, 0x1F), (0xE000, 0xE0FF),
)
PHRASES = (
    "The quick brown fox jumps over the lazy dog. ", "def f(x):\n    return {'a': [1, 2, 3]}\n", "  \t \n\n   ", "</s><s>",
    "<|turn|>user\n", "他们说：“今天天气很好。”", "Ünïcödé ", "\u200d\U0001f469\u200d\U0001f4bb",
    "1234567890.5e-7 ", "\\n\\u0041\"'", "don't we'll ",
)


def folder(model: Path, made: Path) -> Path:
    shutil.copytree(model, made, ignore=shutil.ignore_patterns("tokenizer*", "*.jinja"))
    rust = Tokenizer(BPE(unk_token=None))
    rust.normalizer = NFC()
    rust.pre_tokenizer = Sequence([Split(Regex(WORDS), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False)
    rust.train_from_iterator(PHRASES * 50, trainer)
    rust.post_processor = TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    rust.save(str(made / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    (made / "chat_template.jinja").write_text(PLAIN)
    return made


def text(rng: random.Random, most: int) -> str:
    size, made = rng.randint(0, most), ""
    while len(made) < size:
        if rng.random() < 0.4:
            made += rng.choice(PHRASES)
        else:
            low, high = rng.choice(SCRIPTS)
            made += "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 12)))
    return made[:size]


def completion(rng: random.Random, most: int) -> Body:
    def ids() -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 60))]

    kinds: tuple[Callable[[], Any], ...] = (
        lambda: text(rng, most) or "a", lambda: text(rng, most) or "a",
        lambda: [text(rng, 80) or "a" for _ in range(rng.randint(1, 4))],
        ids, lambda: [ids() for _ in range(rng.randint(1, 3))],
    )
    body: Body = {"prompt": rng.choice(kinds)()}
    if rng.random() < 0.2:
        body["add_special_tokens"] = rng.random() < 0.5
    if body.get("add_special_tokens") is not False and rng.random() < 0.1:
        body["truncate_prompt_tokens"] = rng.randint(1, 50)
    return body


def content(rng: random.Random, most: int) -> Any:
    if rng.random() < 0.7:
        return text(rng, most)
    return [{"type": "text", "text": text(rng, most // 2)} for _ in range(rng.randint(1, 3))]


def tool(rng: random.Random) -> Body:
    function: Body = {"name": f"f{rng.randint(0, 99)}"}
    if rng.random() < 0.8:
        function["description"] = text(rng, 60)
    if rng.random() < 0.8:
        one: Body = {text(rng, 8) or "p": {"type": "string", "enum": [text(rng, 8)]}}
        function["parameters"] = {"type": "object", "properties": one, "required": []}
    if rng.random() < 0.2:
        function |= {"strict": True, "unknown": 1}
    made: Body = {"function": function, "type": "function"}
    return made


def chat(rng: random.Random, most: int) -> Body:
    messages: list[Body] = []
    if rng.random() < 0.5:
        messages.append({"role": rng.choice(("system", "system", "developer")), "content": content(rng, 60)})
    for number in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": content(rng, most)} | ({"name": "Zoë"} if rng.random() < 0.1 else {}))
        if rng.random() < 0.5:
            messages.append({"role": "assistant", "content": content(rng, 80)})
        elif rng.random() < 0.4:
            arguments = rng.choice(('{"a": "é", "b": [1, 2.50, null]}', "", "no json", '{"x":"' + "y" * 30 + '"}'))
            call = {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": arguments}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": content(rng, 60)})
    body: Body = {"messages": messages}
    if rng.random() < 0.3:
        body |= {"tools": [tool(rng) for _ in range(rng.randint(1, 3))], "tool_choice": "none"}
    if rng.random() < 0.1:
        body |= {"add_generation_prompt": False, "continue_final_message": rng.random() < 0.5}
    if rng.random() < 0.2:
        body["chat_template_kwargs"] = rng.choice(({"enable_thinking": False}, {"trimmed": True}, {"unheard_of": 1}))
    if rng.random() < 0.1:
        body["add_special_tokens"] = True
    if rng.random() < 0.2 and "tools" not in body:
        body["chat_template"] = IN_PARTS
    return body


def all_kinds(seed: int, number: int, huge: int) -> list[tuple[str, Body]]:
    """Path and body; the first `huge` of them are long."""
    rng = random.Random(seed)
    made: list[tuple[str, Body]] = []
    for index in range(number):
        most = 100_000 if index < huge else rng.choice((5, 40, 300, 2000))
        if rng.random() < 0.4:
            made.append(("/v1/completions", completion(rng, most)))
        else:
            made.append(("/v1/chat/completions", chat(rng, most)))
    return made
