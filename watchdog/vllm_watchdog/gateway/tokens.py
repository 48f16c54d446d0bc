"""How many tokens a request's prompt has, by the model's own tokenizer and chat template, as the engine will count them.

Reads a model's folder once.  Raises NoTokenizerError where it has none that can be used here, UnreadableError for a request
that the engine would not take.  Blocks for as long as the text is long: 25 ms for 100,000 characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Encoding
from tokenizers import Tokenizer as Rust

from vllm_watchdog.core.kv_bytes import KvShape, NoShapeError, kv_shape
from vllm_watchdog.gateway.bodies import UnreadableError, whole_number
from vllm_watchdog.gateway.chat import Json, Template, TemplateRefusalError
from vllm_watchdog.prompt_plan import PromptPlan, is_text

CHATS = frozenset({"/v1/chat/completions", "/tokenize"})
PROMPTS = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/classify": "input", "/pooling": "input"}
BY_CODE = ("gpt_oss", "deepseek_v32", "deepseek_v4", "kimi_k3", "inkling")      # types that vLLM renders without a template
FILE_LIMIT = 64 << 20
SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class NoTokenizerError(Exception):
    """One sentence: what is missing."""


@dataclass(frozen=True, slots=True)
class Counted:
    """`tokens`: of all prompts of the request; `longest`: of one of them.  `exact`: the engine will say the same.
    `max_tokens`: of the answer, None: not said.  `strict`: an answer in a form that a cut prompt may spoil."""

    tokens: int
    longest: int
    exact: bool
    max_tokens: int | None = None
    strict: bool = False


class Tokens:
    """One model's.  Raises NoTokenizerError."""

    def __init__(self, folder: Path, plan: PromptPlan) -> None:
        self._rust = _rust(folder / "tokenizer.json")
        config = _json(folder / "tokenizer_config.json")
        self._media_tokens = plan.media_tokens
        model = _json(folder / "config.json")
        self._by_code = str(model.get("model_type", "")).startswith(BY_CODE)
        self.shape = _shape(model, plan)
        self._bos = _bos(self._rust, config)
        self._templates = _templates(folder, config, plan)
        self.longest_token = max(map(len, self._rust.get_vocab()), default=1)

    def count(self, path: str, asked: Json, enough: int | None = None) -> Counted:
        """`enough`: from so many tokens on "at least so many" will do.  Raises UnreadableError."""
        exact, lengths = self._lengths(path, asked, enough)
        media = sum(1 for _ in _media(asked))
        cut = whole_number(asked.get("truncate_prompt_tokens"), "truncate_prompt_tokens") \
            if asked.get("truncate_prompt_tokens") != -1 else enough
        if cut is not None:
            lengths = [min(length, cut) for length in lengths]
        return Counted(
            sum(lengths) + media * self._media_tokens, max(lengths, default=0) + media * self._media_tokens,
            exact and not media and not asked.get("prompt_embeds") and asked.get("suffix") is None, answer_tokens(asked),
            strict(asked),
        )

    def _lengths(self, path: str, asked: Json, enough: int | None) -> tuple[bool, list[int]]:
        if path in CHATS and "messages" in asked:
            try:
                text = self.chat_text(asked)
            except TemplateRefusalError:
                text = "\n".join(_texts(asked))
                return False, [self._length(text, False, enough)]
            exact = not self._by_code and asked.get("chat_template") is None
            return exact, [self._length(text, asked.get("add_special_tokens") is True, enough)]
        key = "prompt" if path == "/tokenize" else PROMPTS.get(path, "")
        if key in asked:
            special = asked.get("add_special_tokens") is not False
            return True, [len(each) if isinstance(each, list) else self._length(each, special, enough)
                          for each in prompts(asked[key], key)]
        return False, [self._length("\n".join(_texts(asked)), False, enough)]

    def chat_text(self, asked: Json) -> str:
        """Raises UnreadableError, TemplateRefusalError."""
        template = self._templates.get("tool_use") if asked.get("tools") is not None else None
        template = template or self._templates.get("default")
        if template is None:
            raise TemplateRefusalError("there is none")
        return template.render(asked)

    def _length(self, text: str, special: bool, enough: int | None) -> int:
        if enough is not None and len(text) > enough * self.longest_token:
            return len(text) // self.longest_token
        return len(self.encode(text, special)) + self._bos * special

    def encode(self, text: str, special: bool = False) -> Encoding:
        """With the place of each token in the text.  Raises UnreadableError."""
        try:
            return self._rust.encode(text, add_special_tokens=special)
        except (TypeError, UnicodeEncodeError):
            raise UnreadableError("The prompt holds half a character (a lone surrogate)") from None


def prompts(value: object, key: str) -> list[str | list[int]]:
    """A text, a list of token ids, or a list of either.  Raises UnreadableError."""
    items: list[Any] = value if isinstance(value, list) and not _are_ids(value) else [value]
    if not items or not all(isinstance(item, str) or _are_ids(item) for item in items):
        raise UnreadableError(f"{key}: expected text, token ids, or a list of them")
    return items


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)


def answer_tokens(asked: Json) -> int | None:
    """Raises UnreadableError."""
    for key in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        if (asked_for := whole_number(asked.get(key), key)) is not None:
            return asked_for
    return None


def strict(asked: Json) -> bool:
    """Must the answer have a form?"""
    form = asked.get("response_format")
    kind = form.get("type") if isinstance(form, dict) else None
    return kind not in (None, "text") or asked.get("structured_outputs") is not None


def _media(value: object) -> Iterator[str]:
    """Parts of messages that are no text, wherever they are."""
    if isinstance(value, list):
        for item in value:
            yield from _media(item)
    elif isinstance(value, dict):
        kind = value.get("type")
        if isinstance(kind, str) and kind.startswith(("image", "video", "audio", "input_audio", "input_image")):
            yield kind
        for key in ("messages", "content", "input"):
            yield from _media(value.get(key))


def _texts(value: object) -> Iterator[str]:
    """All texts of a request whose form isn't known here."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in ("model", "image_url", "data", "url"):
                yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


# -- a model's folder


def folder_of(plan: PromptPlan) -> Path:
    """Raises NoTokenizerError."""
    if not plan.tokenizer:
        raise NoTokenizerError("its engine does not say which")
    folder = Path(plan.tokenizer)
    if folder.is_dir():
        return folder
    cached = Path(plan.hub) / f"models--{plan.tokenizer.replace('/', '--')}"
    try:
        commit = (cached / "refs" / (plan.revision or "main")).read_text("ascii").strip()
    except (OSError, ValueError):
        commit = plan.revision
    folder = cached / "snapshots" / commit
    if not commit or not folder.is_dir():
        raise NoTokenizerError(f"{plan.tokenizer} is neither a folder nor in {plan.hub}")
    return folder


def _rust(path: Path) -> Rust:
    try:
        made = Rust.from_file(str(path))
    except Exception as error:      # the library raises just that
        raise NoTokenizerError(f"{path}: {str(error)[:200]}") from None
    made.no_truncation()
    made.no_padding()
    return made


def _shape(model: Mapping[str, Any], plan: PromptPlan) -> KvShape | None:
    try:
        return kv_shape(model, plan.kv_dtype)
    except NoShapeError:
        return None


def _bos(rust: Rust, config: Mapping[str, Any]) -> int:
    """A token more, or less, than tokenizer.json says: transformers goes by tokenizer_config.json where that names it."""
    wanted, token = config.get("add_bos_token"), _content(config.get("bos_token"))
    if not isinstance(wanted, bool) or not token:
        return 0
    ids = rust.encode("", add_special_tokens=True).ids
    return wanted - (rust.token_to_id(token) in ids[:1])


def _templates(folder: Path, config: Mapping[str, Any], plan: PromptPlan) -> dict[str, Template]:
    """By name; usually there is only "default"."""
    specials = {key: text for key in SPECIALS if (text := _content(config.get(key)))}
    try:
        found = {"default": _given(plan.template)} if plan.template else _own(folder, config)
        return {name: Template(text, specials, plan.template_format) for name, text in found.items()}
    except jinja2.TemplateError as error:
        raise NoTokenizerError(f"{folder}: its chat template: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise NoTokenizerError(f"{folder}: its chat template can't be read: {error}") from None


def _given(template: str) -> str:
    return template if is_text(template) else _text(Path(template))


def _own(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Of files, else of tokenizer_config.json, which may hold several."""
    named = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))[:20]}
    if (single := folder / "chat_template.jinja").is_file():
        named["default"] = single
    if named:
        return {name: _text(path) for name, path in named.items()}
    template = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        pairs = [(each.get("name"), each.get("template")) for each in template if isinstance(each, dict)]
        return {str(name): text for name, text in pairs if isinstance(text, str)}
    return {"default": template} if isinstance(template, str) else {}


def _content(token: object) -> str:
    """A special token stands there as text, or as an object with its `content`."""
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def _json(path: Path) -> dict[str, Any]:
    """Empty where there is none that can be read."""
    try:
        value = json.loads(_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _text(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.read(FILE_LIMIT)
