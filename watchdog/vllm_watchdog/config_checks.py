"""What is wrong, or only doubtful, about settings whose every value fits by itself.

Reads the file system (does a command exist, may a folder be written), and changes nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_watchdog import config_channels, config_rules
from vllm_watchdog.config_levels import card_parts, card_shares, full, told
from vllm_watchdog.config_problems import near
from vllm_watchdog.config_sources import Path_
from vllm_watchdog.core.plan import Standby
from vllm_watchdog.launch import holds_password, most_at_once, unknown_flags
from vllm_watchdog.prompt_plan import context_of

if TYPE_CHECKING:
    from vllm_watchdog.config import Settings
    from vllm_watchdog.config_sections import Engine

Found = Iterator[tuple[Path_, str]]

SOCKET_BYTES = 107      # the kernel's limit for the path of a Unix socket
# Flags that the watchdog passes itself, or that would hide the engine from its probes.
RESERVED_ARGS = {
    "api-key": "can be read by every user of the host, expected engines.{name}.api_key",
    "hf-token": "can be read by every user of the host, expected engines.{name}.env.HF_TOKEN",
    "host": "passed by the watchdog, expected engines.{name}.host",
    "model": "passed by the watchdog, expected engines.{name}.model",
    "model-tag": "passed by the watchdog, expected engines.{name}.model",
    "port": "passed by the watchdog, expected engines.{name}.port",
    "ssl-certfile": "the watchdog probes plain HTTP, expected TLS to end in front of the engine",
    "ssl-keyfile": "the watchdog probes plain HTTP, expected TLS to end in front of the engine",
    "uds": "the watchdog probes a TCP port, expected none",
}
RESERVED_ENV = {"VLLM_API_KEY": "the watchdog's probes need it too, expected engines.{name}.api_key"}
DOUBTFUL_ARGS = {
    "disable-log-stats": "without counters a busy engine and a hung one look alike for hang.patience_blind_s",
    "kv-cache-memory-bytes": 'the share of the card is not known from it; "auto" thresholds take 0.92 for it',
}


def problems(settings: Settings) -> Found:
    """Everything that keeps the daemon from starting, each with the key that it is about."""
    if not settings.engines:
        yield ("engines",), "none, expected a table [engines.NAME] with model and port"
    for name in settings.engines:
        yield from chain(_missing(settings, name), _backup(settings, name), _standby(settings, name))
        yield from chain(_reserved(settings, name), _share(settings, name), _command(settings, name), _cards(settings, name))
    yield from chain(_ports(settings), _ordered(settings), _folders(settings), config_channels.wrong(settings.alerts),
                     config_rules.wrong(settings))


def _missing(settings: Settings, name: str) -> Found:
    if not settings.engines[name].port:
        yield ("engines", name, "port"), "missing, expected the port that the engine listens on"
    if not settings.engine(name).model and not _astray(settings, name):
        yield ("engines", name, "model"), "missing, expected the model's name or folder"


def _astray(settings: Settings, name: str) -> bool:
    """A backup of none that could be one: what it lacks may be in the engine that was meant."""
    primary = settings.engines[name].backup_for
    return primary is not None and (primary not in settings.engines or not settings.engines[primary].model)


def _backup(settings: Settings, name: str) -> Found:
    primary = settings.engines[name].backup_for
    path = ("engines", name, "backup_for")
    others = [other for other, engine in settings.engines.items() if other != name and engine.backup_for is None]
    if primary is None:
        return
    if primary == name:
        yield path, f"is the engine itself, expected {near(name, others)}"
    elif primary not in settings.engines:
        yield path, f'no engine is called "{primary:.32}", expected {near(primary, others)}'
    elif settings.engines[primary].backup_for is not None:
        yield path, f'"{primary}" is a backup itself, expected {near(primary, others)}'
    else:
        first = next(other for other, engine in settings.engines.items() if engine.backup_for == primary)
        if first != name:
            yield path, f'"{primary}" has a backup, "{first}", expected one backup for each engine'


LOOPBACK = ("127.0.0.1", "::1", "localhost")


def _standby(settings: Settings, name: str) -> Found:
    own, engine = settings.engines[name], settings.engine(name)
    if own.backup_for is None and "standby" in own.model_fields_set:
        yield ("engines", name, "standby"), "only a backup stands by, expected it beside backup_for"
    elif engine.standby is Standby.SLEEPING and engine.host not in LOOPBACK:
        what = f'"{engine.host:.40}" would expose vLLM\'s developer endpoints, which sleep needs, expected 127.0.0.1'
        yield ("engines", name, "host"), what


def _reserved(settings: Settings, name: str) -> Found:
    engine = settings.engines[name]
    for table, given, reserved in (("args", engine.args, RESERVED_ARGS), ("env", engine.env, RESERVED_ENV)):
        for key in given:
            if key in reserved:
                yield ("engines", name, table, key), reserved[key].format(name=name)
    for key in engine.env:
        if key.startswith("LLM_WATCHDOG_MARK"):
            yield ("engines", name, "env", key), "set by the watchdog, expected another name"
        elif key == "CUDA_VISIBLE_DEVICES" and settings.engine(name).gpus:
            yield ("engines", name, "env", key), f"set from engines.{name}.gpus, expected only one of the two"


def _share(settings: Settings, name: str) -> Found:
    share = settings.engines[name].args.get("gpu-memory-utilization")
    if isinstance(share, int | float) and not 0 < share <= 1:
        what = f"is {share!r:.40}, expected a share of the card above 0, at most 1"
        yield ("engines", name, "args", "gpu-memory-utilization"), what


def _command(settings: Settings, name: str) -> Found:
    engine = settings.engine(name)
    if settings.engines[name].backup_for is not None and "command" not in settings.engines[name].model_fields_set:
        return      # it is the primary's, and told there
    word = engine.command[0]
    path = ("engines", name, "command")
    if "/" not in word:
        if shutil.which(word, path=engine.env.get("PATH")) is None:
            yield path, f'"{word:.100}" is not found in PATH, expected a program or its full path'
    elif not os.access(word, os.F_OK):
        yield path, f'"{word:.100}" does not exist, expected a program'
    elif not os.access(word, os.X_OK) or not Path(word).is_file():
        yield path, f'"{word:.100}" is not executable, expected a program'


def _cards(settings: Settings, name: str) -> Found:
    gpus = settings.engines[name].gpus
    if len(set(gpus)) < len(gpus):
        yield ("engines", name, "gpus"), "names a card twice, expected each once"


def _ports(settings: Settings) -> Found:
    taken: dict[int, str] = {}
    for name, engine in settings.engines.items():
        if engine.port and (other := taken.setdefault(engine.port, name)) != name:
            yield ("engines", name, "port"), f"{engine.port} is also engines.{other}.port, expected a port of its own"
        if engine.port and engine.port == settings.daemon.port:
            yield ("engines", name, "port"), f"{engine.port} is also the port of daemon.listen, expected a port of its own"
        if engine.port == settings.gateway.port and "gateway" in settings.model_fields_set:
            yield ("engines", name, "port"), f"{engine.port} is also the port of gateway.listen, expected a port of its own"


def _ordered(settings: Settings) -> Found:
    asked, restart = settings.thresholds, settings.restart
    if asked.vram_warn != "auto" and asked.vram_degrade != "auto" and asked.vram_degrade < asked.vram_warn:
        yield (
            ("thresholds", "vram_degrade"),
            f"{asked.vram_degrade:g} lies below vram_warn, expected at least {asked.vram_warn:g}",
        )
    if restart.backoff_max_s < restart.backoff_s:
        yield (
            ("restart", "backoff_max_s"),
            f"{restart.backoff_max_s:g} lies below backoff_s, expected at least {restart.backoff_s:g}",
        )


def _folders(settings: Settings) -> Found:
    daemon = settings.daemon
    folders = {"state_dir": daemon.state_dir, "log_dir": daemon.log_dir, "socket": daemon.socket.parent}
    told: set[Path] = set()
    for key, folder in folders.items():
        if folder not in told and (why := _unwritable(folder)):
            told.add(folder)
            yield ("daemon", key), f"{why}, expected a folder that can be written"
    if len(os.fsencode(daemon.socket)) > SOCKET_BYTES:
        yield (
            ("daemon", "socket"),
            f"{daemon.socket} is {len(os.fsencode(daemon.socket))} bytes long, expected at most {SOCKET_BYTES}",
        )


def _unwritable(folder: Path) -> str:
    """Why nothing can be written there, judged by the nearest part of it that exists; empty if it can."""
    try:
        nearest = next(part for part in (folder, *folder.parents) if part.exists())
    except OSError as error:
        return f"{folder}: {error.strerror}"
    if not nearest.is_dir():
        return f"{nearest} is not a folder"
    return "" if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} can't be written"


def doubts(settings: Settings) -> Found:
    """What can be meant, but seldom is."""
    for name in settings.engines:
        yield from chain(_doubtful_flags(settings, name), _doubtful_model(settings, name), _doubtful_prompts(settings, name))
    yield from config_channels.doubtful(settings.alerts)
    yield from config_rules.doubtful(settings)
    yield from _doubtful_levels(settings)
    if settings.daemon.port and settings.daemon.host not in LOOPBACK:
        what = f'"{settings.daemon.host:.40}" lets everybody who can reach it read the page; only changes need the token'
        yield ("daemon", "listen"), what


def _doubtful_flags(settings: Settings, name: str) -> Found:
    engine, own = settings.engine(name), settings.engines[name]
    for word in unknown_flags(settings.launches()[name].argv):
        yield ("engines", name), word
    if holds_password(settings.launches()[name].argv):
        yield ("engines", name, "args"), "holds a URL with a password, which every user of the host can read in ps"
    for key in own.args:
        if key in DOUBTFUL_ARGS and own.args[key] is not False:
            yield ("engines", name, "args", key), DOUBTFUL_ARGS[key]
    drain = engine.args.get("shutdown-timeout")
    if isinstance(drain, int | float) and drain >= engine.stop_timeout_s:
        yield (
            ("engines", name, "stop_timeout_s"),
            f"{engine.stop_timeout_s:g} kills the engine before its --shutdown-timeout of {drain:g} s is over",
        )
    most = most_at_once(engine.args)
    if own.max_concurrent is not None and most is not None and own.max_concurrent > most:
        what = f"{own.max_concurrent} is over its max-num-seqs of {most}: the rest waits in vLLM, first in first out"
        yield ("engines", name, "max_concurrent"), what
    if (wanted := _cards_wanted(engine)) > len(engine.gpus) > 0:
        yield ("engines", name, "gpus"), f"names {len(engine.gpus)} cards, but its args spread it over {wanted}"


def _doubtful_prompts(settings: Settings, name: str) -> Found:
    own, context = settings.engines[name], context_of(settings.engine(name).args)
    limit = own.prompt_limit
    if context is not None and limit != "auto" and limit > context:
        yield ("engines", name, "prompt_limit"), f"{limit} is more than its max-model-len of {context}, which then counts"
    if own.vram_share is not None and not settings.engine(name).gpus:
        yield ("engines", name, "vram_share"), "limits nothing, since the engine names no gpus"


def _doubtful_model(settings: Settings, name: str) -> Found:
    """A folder may be mounted later, or exist only in a container that the command starts."""
    model = settings.engines[name].model
    if model and model.startswith(("/", "./", "../")) and not os.path.lexists(model):
        yield ("engines", name, "model"), f'"{model:.200}" does not exist here: an engine that can\'t read it is held'


def _cards_wanted(engine: Engine) -> int:
    wanted = 1
    for key in ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size-local"):
        value = engine.args.get(key, 1)
        wanted *= value if isinstance(value, int) else 1
    return wanted


def _doubtful_levels(settings: Settings) -> Found:
    shares = card_shares(settings.plan(seed=0).engines)
    fixed = {
        key: level
        for key in ("vram_warn", "vram_degrade")
        if (level := getattr(settings.thresholds, key)) != "auto"
    }
    for key, level in fixed.items():
        if not shares:
            yield ("thresholds", key), "watches no card, since no engine names its gpus"
        for gpu, share in shares.items():
            if level <= share:
                yield ("thresholds", key), f"{level:g} of GPU {gpu} is crossed as long as its engines take {share:g}"
    for gpu, parts in card_parts(settings.plan(seed=0).engines).items():
        if len(parts) > 1 and full(parts) > 1:
            yield ("engines",), f"on GPU {gpu} {told(parts)}: more than the card, the last one to start will not fit"
