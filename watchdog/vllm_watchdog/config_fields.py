"""What a value of the settings may be: numbers with their limits, names, addresses, folders.

A number, switch or list from the environment comes as text and is read as JSON; from the file, text is no number.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, SecretStr

from vllm_watchdog import cards
from vllm_watchdog.config_channels import channel_url, minutes, template
from vllm_watchdog.config_sources import Text
from vllm_watchdog.core.units import DAY_S
from vllm_watchdog.launch import Arg


def _read(value: object) -> object:
    """A number, switch or list that came as text, from the environment."""
    if isinstance(value, Text):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _plain(value: str) -> str:
    if not value.isprintable():
        raise ValueError("holds a line break or a control character, expected plain text")
    return str(value)


def _name(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,31}", value):
        raise ValueError("not a name, expected at most 32 of a-z 0-9 _ -, a letter or digit first")
    if value in ("host", "gpu"):
        raise ValueError('a name with a meaning of its own in reports, expected another than "host" and "gpu"')
    return str(value)


def _variable(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError("not the name of a variable, expected letters, digits and _")
    return str(value)


def _flag(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9._+-]*", value):
        raise ValueError("not a flag, expected its long name without the dashes in front")
    return str(value)


def _arg(value: object) -> Arg:
    """What a flag of vLLM can be given: it must fit into JSON, and hold nothing that no command line can."""
    value = _read(value)
    items: list[object] = value if isinstance(value, list) else [value]
    fits = items != [] and all(isinstance(item, bool | int | float | str | dict) for item in items)
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):     # a date, nan, a thousand brackets
        fits = False
    if not fits:
        raise ValueError("not for a flag, expected true, false, a number, text, a table, or a list of them")
    if "\\u0000" in text:
        raise ValueError("holds a NUL character, expected plain text")
    return value  # type: ignore[return-value]  # narrowed item by item


def _card(value: object) -> object:
    """A card by its UUID becomes its index, by which all else knows it."""
    if not isinstance(value, str):
        return value
    if value.startswith("MIG-"):
        raise ValueError("is a part of a card, expected none in gpus, and env.CUDA_VISIBLE_DEVICES for a MIG instance")
    if not value.startswith("GPU-"):
        raise ValueError(f"{value!r:.60} is no card, expected its index or its UUID, as nvidia-smi -L shows them")
    return cards.index_of(value)


def _share_or_auto(value: object) -> float | Literal["auto"]:
    value = _read(value)
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError('is not a number, expected "auto" or a share of the card above 0, at most 1')  # noqa: TRY004
    if not 0 < value <= 1:
        raise ValueError(f'is {value!r:.20}, expected "auto" or a share of the card above 0, at most 1')
    return float(value)


def _tokens_or_auto(value: object) -> int | Literal["auto"]:
    value = _read(value)
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_TOKENS:
        raise ValueError(f'is {value!r:.20}, expected "auto" or a number of tokens, 1 to {MOST_TOKENS}')
    return value


def _channel_url(value: SecretStr) -> SecretStr:
    channel_url(value.get_secret_value())
    return value


def _hours(value: str) -> str:
    minutes(value)
    return value


def _secret_line(value: SecretStr) -> SecretStr:
    if not value.get_secret_value().isprintable():
        raise ValueError("holds a line break or a control character, expected one line")
    return value


def _listen(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"{value!r:.60} is no address, expected host:port, such as 0.0.0.0:8000")
    return value


OFF = ("", "off")
MOST_TOKENS = 1 << 30
TOKEN_LENGTH = 16       # so that guessing is hopeless without counting wrong ones


def _page(value: str) -> str:
    return value if value in OFF else _listen(_plain(value))


def _token(value: SecretStr) -> SecretStr:
    if not re.fullmatch(f"[!-~]{{{TOKEN_LENGTH},1000}}", value.get_secret_value()):
        raise ValueError(f"is no token, expected at least {TOKEN_LENGTH} letters, digits and marks without blanks")
    return value


# Headers that may hold a secret, which a rule would show; the first two are how a client shows its API key.
SECRET_HEADERS = frozenset({"authorization", "x-api-key", "proxy-authorization", "cookie"})


def _pattern(value: str) -> str:
    if "*" in value[:-1]:
        raise ValueError("holds a * that is not its last character, expected a text, or the beginning of one and *")
    return value


def _header(value: str) -> str:
    name, _, pattern = value.partition(":")
    if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name.strip()):
        raise ValueError("is no header, expected its name, or Name: value")
    if name.strip().lower() in SECRET_HEADERS:
        raise ValueError(f"{name.strip()} holds a secret, expected api_key with a name of gateway.keys")
    _pattern(pattern)
    return value


READ = BeforeValidator(_read)
Number = Field(strict=True, gt=0, allow_inf_nan=False)
Seconds = Annotated[float, READ, Number, Field(le=DAY_S)]      # nothing that guards a service waits longer than a day
Share = Annotated[float, READ, Number, Field(le=1)]            # 1 is never crossed: off
Gib = Annotated[float, READ, Number, Field(le=1 << 20)]
Count = Annotated[int, READ, Field(strict=True, ge=0, le=1000)]
Port = Annotated[int, READ, Field(strict=True, ge=1024, le=65535)]     # vLLM refuses ports under 1024
Plain = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_plain)]
Name = Annotated[str, AfterValidator(_name)]
Short = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_plain)]     # all rules are one line of the route
Pattern = Annotated[Short, AfterValidator(_pattern)]
Header = Annotated[Short, AfterValidator(_header)]
Tokens = Annotated[int, READ, Field(strict=True, ge=0, le=1 << 30)]
Location = Annotated[Path, AfterValidator(lambda path: Path(_plain(str(path))))]
Folder = Annotated[Location, AfterValidator(lambda path: Path.cwd() / path)]
Command = Annotated[tuple[Plain, ...], READ, Field(min_length=1, max_length=100)]
Card = Annotated[int, BeforeValidator(_card), Field(strict=True, ge=0, le=1023)]
Cards = Annotated[tuple[Card, ...], READ, Field(max_length=64)]
Args = dict[Annotated[str, AfterValidator(_flag)], Annotated[Any, PlainValidator(_arg)]]
Env = dict[Annotated[str, AfterValidator(_variable)], Annotated[str, AfterValidator(_plain)]]
Listen = Annotated[str, AfterValidator(_plain), AfterValidator(_listen)]
Page = Annotated[str, AfterValidator(_page)]
Token = Annotated[SecretStr, AfterValidator(_token)]
Line = Annotated[str, AfterValidator(_plain)]
Secret = Annotated[SecretStr, Field(min_length=1), AfterValidator(_secret_line)]
Url = Annotated[SecretStr, AfterValidator(_channel_url)]
Hours = Annotated[str, AfterValidator(_hours)]
Words = Annotated[str, Field(max_length=2000), AfterValidator(template)]
TokensOrAuto = Annotated[int | Literal["auto"], PlainValidator(_tokens_or_auto)]
Level = Annotated[float | Literal["auto"], PlainValidator(_share_or_auto)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)
