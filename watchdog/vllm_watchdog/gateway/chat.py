"""A chat as the text that the model reads: its messages made plain, then the model's template.

Follows vLLM (0.32) and transformers (5): the same environment, variables and filters, so that the same text comes out.  The
sandbox keeps a template to its data; how long it may work is the caller's to say.  Raises UnreadableError for messages that
are none, TemplateRefusalError where the template won't have them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vllm_watchdog.gateway.bodies import UnreadableError

Json = dict[str, Any]
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
OPEN_END = "CONTINUE_FINAL_MESSAGE_TAG "    # marks where the last message ends, to cut off what the template adds
FILTERED = frozenset({"chat_template", "tokenize"})
TOOL_KEYS = ("name", "description", "parameters", "strict", "defer_loading")
TOOL_DEFAULTS = ("description", "parameters")
BILLING = "x-anthropic-billing-header"      # Claude Code's, different each time: vLLM drops the line


class TemplateRefusalError(Exception):
    """The template raised, by intention or not; the engine's own words on it are better than ours."""


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what a model has written, for training; here it is only passed through."""

    tags = {"generation"}      # noqa: RUF012  # Jinja wants a set

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_through"), [], [], body).set_lineno(line)

    def _through(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Jinja's own would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(      # what it writes is for a model, no page
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    made.filters["tojson"] = _tojson
    made.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return made


ENVIRONMENT = _environment()


class Template:
    """One template, compiled.  `specials`: bos_token and the like.  Raises jinja2.TemplateError."""

    def __init__(self, text: str, specials: Mapping[str, str], content: str = "auto") -> None:
        self._text, self._specials = text, dict(specials)
        self._compiled = ENVIRONMENT.from_string(text)
        tree = ENVIRONMENT.parse(text)
        self._variables = meta.find_undeclared_variables(tree)
        self._parts = content == "openai" or (content == "auto" and _walks_parts(tree))
        self._developer = '"developer"' in text or "'developer'" in text

    def render(self, asked: Json) -> str:
        """`asked`: the body of a chat.  Raises UnreadableError, TemplateRefusalError."""
        chat = [_message(each, self._parts) for each in _list(asked.get("messages"), "messages")]
        if not self._developer and any(message["role"] == "developer" for message in chat):
            chat = _one_system(chat)
        tools = _tools(asked)
        open_end = asked.get("continue_final_message") is True
        given = {key: value for key, value in _object(asked.get("chat_template_kwargs"), "chat_template_kwargs").items()
                 if key in self._variables and key not in FILTERED}
        effort = asked.get("reasoning_effort")
        own = {
            "documents": asked.get("documents"), "reasoning_effort": effort,
            "enable_thinking": effort != "none" if effort is not None and "enable_thinking" not in given else None,
        }
        given |= {key: value for key, value in own.items() if value is not None and value != "auto"}
        given["add_generation_prompt"] = asked.get("add_generation_prompt", True)
        if open_end:
            _leave_open(chat)
        try:
            text = self._compiled.render(self._specials | {"messages": chat, "tools": tools, "documents": None} | given)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError,
                RecursionError) as error:
            raise TemplateRefusalError(type(error).__name__) from None
        return _closed_at_the_mark(text) if open_end else text


def _leave_open(chat: list[Json]) -> None:
    last = chat[-1] if chat else {}
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + OPEN_END
        return
    texts = [part for part in content or () if isinstance(part, dict) and "text" in part]
    if not texts:
        raise TemplateRefusalError("no text to go on from")
    texts[-1]["text"] += OPEN_END


def _closed_at_the_mark(text: str) -> str:
    at = text.rfind(OPEN_END.strip())
    if at < 0:
        raise TemplateRefusalError("leaves the last message out")
    return text[:at] if text.startswith(OPEN_END, at) else text[:at].rstrip()


def _walks_parts(tree: nodes.Template) -> bool:
    """Does the template loop over a message's content?  Else it wants one text."""
    return any(_names_content(loop.iter) for loop in tree.find_all(nodes.For))


def _names_content(node: nodes.Node) -> bool:
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name == "content"


def _tools(asked: Json) -> list[Json] | None:
    """As vLLM writes them: its own order of keys, its defaults, nothing that it doesn't know."""
    if asked.get("tools") is None:
        return None
    return [_tool(_object(tool, "tools")) for tool in _list(asked["tools"], "tools")]


def _tool(tool: Json) -> Json:
    function = _object(tool.get("function"), "tools: function")
    known = {key: function.get(key) for key in TOOL_KEYS if key in TOOL_DEFAULTS or function.get(key) is not None}
    return {"type": "function", "function": known}


def _message(value: object, parts: bool) -> Json:
    message = _object(value, "messages")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise UnreadableError("messages: role: expected text")
    if content is None:
        content = []
    items: list[object] = [content] if isinstance(content, str) else _list(content, "messages: content")
    if role == "system":
        items = [item for item in map(_without_billing, items) if item is not None]
    made = [part for part in map(_part, items) if part is not None]
    said: Json = {"role": role, "content": made if parts else "\n".join(part["text"] for part in made if part.get("text"))}
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            said[key] = message[key]
    if role == "assistant":
        said |= _assistant(message)
    elif role == "tool":
        said |= {"tool_call_id": message["tool_call_id"]} if "tool_call_id" in message else {}
        if parts and all(part["type"] == "text" for part in made):
            said["content"] = "\n".join(part["text"] for part in made)
    elif role == "developer":
        said["tools"] = message.get("tools")
    return said


def _part(item: object) -> Json | None:
    if isinstance(item, str):
        return {"type": "text", "text": item}
    part = _object(item, "messages: content")
    kind = part.get("type")
    key = TEXTS.get(kind) if isinstance(kind, str) else "text"
    if key is None:
        return {"type": _modality(str(kind))}
    if part.get(key) is None:
        return None
    return {"type": "text", "text": _text(part[key], "messages: content")}


def _modality(kind: str) -> str:
    return next((word for word in ("image", "audio", "video") if word in kind), kind)


def _without_billing(item: object) -> object:
    text = item if isinstance(item, str) else item.get("text") if isinstance(item, dict) else None
    if not isinstance(text, str) or not text.startswith(BILLING):
        return item
    rest = text.partition("\n")[2]
    return {"type": "text", "text": rest} if rest else None


def _assistant(message: Json) -> Json:
    said: Json = {}
    if isinstance(message.get("reasoning"), str):
        said = {"reasoning": message["reasoning"], "reasoning_content": message["reasoning"]}
    if message.get("tool_calls"):
        said["tool_calls"] = [_call(_object(call, "tool_calls")) for call in _list(message["tool_calls"], "tool_calls")]
    return said


def _call(call: Json) -> Json:
    """Templates want the arguments as an object."""
    function = _object(call.get("function"), "tool_calls: function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    return call | {"function": function | {"arguments": arguments if isinstance(arguments, dict) else {}}}


def _one_system(chat: list[Json]) -> list[Json]:
    """For a template without developers: they are the system, and there is one system message, the first."""
    chat = [{"role": "system", "content": each["content"]} if each["role"] == "developer" else each for each in chat]
    system = [message for message in chat if message["role"] == "system"]
    if len(system) == 1 and chat[0] is system[0]:
        return chat
    texts = [text for message in system if (text := _joined(message["content"]))]
    return [{"role": "system", "content": "\n\n".join(texts)}, *(m for m in chat if m["role"] != "system")]


def _joined(content: str | Iterable[Json]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise UnreadableError(f"{where}: expected a list")
    return value


def _object(value: object, where: str) -> Json:
    if value is None and where == "chat_template_kwargs":
        return {}
    if not isinstance(value, dict):
        raise UnreadableError(f"{where}: expected an object")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise UnreadableError(f"{where}: expected text")
    return value
