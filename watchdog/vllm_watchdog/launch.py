"""How an engine is started: its command line and environment, from the settings of one engine.

Pure but for the values it is given: it starts nothing, reads nothing and imports no vLLM.  The watchdog keeps no list
of vLLM's flags; the only ones it knows are those it passes itself and those that a newer vLLM took away.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from vllm_watchdog.core.remedies import REMOVED_FLAGS
from vllm_watchdog.prompt_plan import PromptPlan

Scalar = bool | int | float | str
Arg = Scalar | list[object] | dict[str, object]

UNSET = "unset"     # as the value of an arg: leave the flag out, although the primary has it
MASK = "********"
USER = re.compile(r"://[^@/\s]+@")        # of a URL
SECRET_WORDS = {"apikey", "auth", "credential", "credentials", "key", "passwd", "password", "secret", "token"}

APPENDED = frozenset({"--middleware"})    # vLLM's only flag that is repeated; its list flags take all values at once
REMOVED_MODULES = {"vllm.entrypoints.api_server": "gone by 0.28; use vllm serve"}


@dataclass(frozen=True, slots=True)
class Launch:
    """One engine, ready to be started.

    `env` is what the engine gets beside the inherited environment (secrets in it: never print it, see `masked_env`);
    `models` are the names that the API answers to; `gpus` are indices in PCI order, as NVML counts them.
    """

    name: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = field(repr=False)
    cwd: Path
    host: str
    port: int
    models: tuple[str, ...]
    api_key: SecretStr | None
    log_path: Path
    gpus: tuple[int, ...] = ()
    memory_max: int | None = None       # bytes of its control group, where there is one
    prompt: PromptPlan = PromptPlan()

    @property
    def model(self) -> str:
        """The name that our own requests use."""
        return self.models[0]

    @property
    def url(self) -> str:
        """Where the engine answers, without a slash at the end; an engine that listens everywhere: on loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)  # noqa: S104
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def fingerprint(launch: Launch) -> str:
    """The same for the same command line, environment and limit: tells whether an adopted engine was started like that."""
    what = repr((launch.argv, launch.env, launch.memory_max)).encode()
    return hashlib.blake2s(what, digest_size=8).hexdigest()


def command_line(
    command: Sequence[str], model: str, host: str, port: int, args: Mapping[str, Arg]
) -> tuple[str, ...]:
    """`vllm serve` takes the model as its first word, every other command as `--model`."""
    named = (model,) if command[-1] == "serve" else ("--model", model)
    flags = (word for name, value in args.items() for word in _flag(f"--{name}", value))
    return (*command, *named, "--host", host, "--port", str(port), *flags)


def _flag(flag: str, value: Arg) -> tuple[str, ...]:
    if value is True:
        return (flag,)
    if value is False:
        return (f"--no-{flag.removeprefix('--')}",)
    if isinstance(value, list) and flag in APPENDED:
        return tuple(word for item in value for word in _valued(flag, item))
    if isinstance(value, list):
        return (flag, *map(str, value))
    return _valued(flag, value)


def _valued(flag: str, value: object) -> tuple[str, ...]:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)
    return (f"{flag}={text}",) if text.startswith("-") else (flag, text)    # argparse takes "-x" for a flag


def environment(env: Mapping[str, str], gpus: Sequence[int], api_key: SecretStr | None) -> tuple[tuple[str, str], ...]:
    """What the engine gets beside the inherited environment."""
    cards = {
        # Without it CUDA counts the fastest card first, while NVML counts by PCI address.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
    } if gpus else {}
    # In the environment, since a command line can be read by every user of the host.
    key = {"VLLM_API_KEY": api_key.get_secret_value()} if api_key else {}
    return tuple((cards | dict(env) | key).items())


def served_names(model: str, args: Mapping[str, Arg]) -> tuple[str, ...]:
    """The names that vLLM answers to."""
    names = args.get("served-model-name", model)
    return tuple(map(str, names)) if isinstance(names, list) and names else (str(names or model),)


def most_at_once(args: Mapping[str, Arg]) -> int | None:
    """How many requests run at a time; None where args do not say.  --max-num-seqs counts for each data-parallel engine."""
    try:
        most = int(str(args["max-num-seqs"])) * int(str(args.get("data-parallel-size", 1)))
    except (KeyError, ValueError):
        return None
    return most if most > 0 else None       # vLLM itself refuses any other


def unknown_flags(argv: Iterable[str]) -> tuple[str, ...]:
    """A sentence for each word of a vLLM command line that newer versions refuse with exit status 2."""
    said = []
    for word in argv:
        flag = word.split("=", 1)[0].removeprefix("--").removeprefix("no-").replace("_", "-")
        if word.startswith("--") and flag in REMOVED_FLAGS:
            said.append(f"--{flag} is no flag of newer vLLM versions: {REMOVED_FLAGS[flag].en}")
        elif word in REMOVED_MODULES:
            said.append(f"{word} is no module of newer vLLM versions: {REMOVED_MODULES[word]}")
    return tuple(said)


def masked(argv: Sequence[str]) -> str:
    """A command line that can be pasted into a shell, but for its secrets."""
    words: list[str] = []
    hide = False
    for word in argv:
        flag, is_pair, _ = word.partition("=")
        if word.startswith("--"):
            hide = secret_name(flag) and not is_pair
            words.append(f"{flag}={MASK}" if is_pair and secret_name(flag) else _without_user(word))
        else:
            words.append(MASK if hide else _without_user(word))
            hide = False
    return " ".join(word if MASK in word else shlex.quote(word) for word in words)


def masked_env(env: Iterable[tuple[str, str]]) -> str:
    """Variables as a shell takes them; also hides the password of a URL such as a proxy's."""
    shown = ((name, _without_user(value)) for name, value in env)
    return " ".join(f"{name}={MASK if secret_name(name) else shlex.quote(value)}" for name, value in shown)


def _without_user(text: str) -> str:
    return USER.sub(f"://{MASK}@", text)


def holds_password(argv: Iterable[str]) -> bool:
    """Is there a URL with user and password in a command line, which every user of the host can read?"""
    return any(":" in match[0].removeprefix("://") for word in argv for match in USER.finditer(word))


def secret_name(name: str) -> bool:
    """Does a key of this name hold a secret?  `hf-token` does; `max-num-batched-tokens` and `tokenizer` do not."""
    return not SECRET_WORDS.isdisjoint(name.lower().replace("_", "-").split("-"))
