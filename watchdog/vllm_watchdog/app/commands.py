"""What each command does: one small function a command, which takes the parsed options and returns the exit code.

Imports what a command needs where it needs it: `status` stays quick.  Exit codes: 0 done; 1 it was refused or went wrong;
2 bad input; 4 no daemon.  `status`: 0 healthy, 1 degraded, 3 down.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import deque
from pathlib import Path
from typing import Any

OPERATOR_WAIT_S = 15.0
RUN_BY = ("engines", "hang", "restart", "failover", "evidence", "thresholds", "gateway")     # what a service runs by
DRAINED_S = 5.0         # what is cut after the drain may still write its last words


def fail(text: str, code: int = 2) -> int:
    print(text, file=sys.stderr)
    return code


def _settings(options: argparse.Namespace) -> Any:
    """The settings, or an exit with one line a problem."""
    from vllm_watchdog.config_load import load
    from vllm_watchdog.config_problems import ConfigError

    try:
        return load(options.config)
    except ConfigError as error:
        raise SystemExit(fail("\n".join(error.problems))) from None


def _to_ask(options: argparse.Namespace, also: tuple[str, ...] = ()) -> Any:
    """As much of the settings as it takes to ask the daemon, or to read what it wrote, and the sections in `also`."""
    from vllm_watchdog.config_load import load_to_ask
    from vllm_watchdog.config_problems import ConfigError

    try:
        return load_to_ask(options.config, also=also)
    except ConfigError as error:
        raise SystemExit(fail("\n".join(error.problems))) from None


# -- the daemon

def run(options: argparse.Namespace) -> int:
    from vllm_watchdog.tell.lock import Busy
    from vllm_watchdog.tell.wire import ControlError

    settings = _settings(options)
    from vllm_watchdog.app.daemon import Daemon
    from vllm_watchdog.config_load import load, misspelt

    for line in misspelt():
        print(f"warning: {line}", file=sys.stderr)

    try:
        return Daemon(settings, lambda: load(options.config)).run()
    except (Busy, ControlError) as error:
        return fail(str(error), 1)
    except OSError as error:
        return fail(f"{error.filename or 'llm-watchdog'}: {error.strerror or error}", 1)


def gateway(options: argparse.Namespace) -> int:
    plan = _settings(options).gateway_plan()
    from vllm_watchdog.app.console import Console, journald
    from vllm_watchdog.gateway.app import run
    from vllm_watchdog.tell.systemd import Notifier

    notifier = Notifier.from_environ(os.environ)

    def stopping(status: str) -> None:
        notifier.stopping(status)
        notifier.extend(plan.drain_s + DRAINED_S)

    return run(plan, Console(journald()).say, notifier.ready, stopping)


def check_config(options: argparse.Namespace) -> int:
    from vllm_watchdog.app.check_config import check

    return check(options.config, sys.stdout, sys.stderr)


def explain(options: argparse.Namespace) -> int:
    settings = _settings(options)
    from vllm_watchdog.app.explain import BadRequestError, explain

    try:
        return explain(settings, options, sys.stdout)
    except BadRequestError as error:
        return fail(str(error))


def classify(options: argparse.Namespace) -> int:
    from vllm_watchdog.app.classify import classify

    return classify(options.files, options.json, sys.stdout)


def demo(options: argparse.Namespace) -> int:
    from vllm_watchdog.app.demo import demo

    return demo(sys.stdout, keep=options.keep)


def drill(options: argparse.Namespace) -> int:
    from vllm_watchdog.app.drill.command import Wish, drill, listing

    if options.list:
        print(listing())
        return 0
    wish = Wish(tuple(options.names), options.all, options.sandbox, options.service, options.yes, options.force,
                options.json, options.report)
    return drill(wish, lambda: _to_ask(options, RUN_BY), sys.stdout, input if sys.stdin.isatty() else None)


def replay(options: argparse.Namespace) -> int:
    from vllm_watchdog.app.replay import parsed, replay
    from vllm_watchdog.tell.journal import files

    lines: list[str] = []
    try:
        for path in map(Path, options.journal):
            for each in files(path) if path.is_dir() else (path,):
                lines += each.read_text("utf-8", "replace").splitlines(keepends=True)
        done = replay(parsed(lines))
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}")
    except ValueError as error:
        return fail(f"{options.journal[-1]}: {error}")
    if not done.events:
        return fail(f"{options.journal[-1]}: no daemon begins in it, expected a journal")
    if done.difference is None:
        print(f"{done.events} events, {done.decisions} decisions: the same")
        return 0
    print(f"line {done.difference.line}: first difference\n  then: {done.difference.then}\n  now:  {done.difference.now}")
    return 1


# -- asking the daemon

def _ask(options: argparse.Namespace, request: dict[str, Any], deadline_s: float = 5.0) -> dict[str, Any]:
    from vllm_watchdog.tell.client import Unreachable, call

    try:
        return call(_to_ask(options).daemon.socket, request, deadline_s)
    except Unreachable as error:
        raise SystemExit(fail(str(error), 4)) from None


def status(options: argparse.Namespace) -> int:
    from vllm_watchdog.app import status
    from vllm_watchdog.tell.client import Unreachable, call

    socket = _to_ask(options).daemon.socket

    def asked() -> tuple[dict[str, Any], dict[str, Any]]:
        doc = call(socket, {"verb": "status"}, 5.0)
        return doc, {} if options.json else call(socket, {"verb": "samples"}, 5.0).get("series", {})

    screen = status.console()
    if options.watch:
        return status.watch(asked, screen, Unreachable)
    try:
        return status.show(*asked(), options.json, screen)
    except Unreachable as error:
        return fail(str(error), status.UNREACHABLE)


def incidents(options: argparse.Namespace) -> int:
    """From the history file, so it answers without a daemon too."""
    import json

    from vllm_watchdog.app import show
    from vllm_watchdog.core.schema import CODEC
    from vllm_watchdog.tell.history import HistoryError, Reader

    settings = _to_ask(options)
    reader = Reader(settings.daemon.log_dir / "history.db")
    try:
        found: Any = reader.incident(options.id) if options.id else reader.incidents(options.limit)
    except HistoryError as error:
        return fail(str(error), 1)
    if options.id and found is None:
        return fail(f"no incident {options.id!r}, or more than one begins so; `llm-watchdog incidents` lists them")
    if options.json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    elif not options.id:
        print(show.incidents(found, settings.alerts.language))
    else:
        try:
            incident = CODEC.decode(found["incident"])
        except ValueError as error:
            return fail(f"{found['id']}: written by another version of llm-watchdog ({error}); --json shows it as it is", 1)
        languages = ("en", "zh") if settings.alerts.language == "both" else (settings.alerts.language,)
        print(show.incident(incident, settings.daemon.log_dir / "incidents", languages))
    return 0


def events(options: argparse.Namespace) -> int:
    import json

    from vllm_watchdog.app import show
    from vllm_watchdog.tell.client import Unreachable, stream
    from vllm_watchdog.tell.journal import files, read

    settings = _to_ask(options)
    folder = settings.daemon.log_dir / "journal"

    def told(line: dict[str, Any]) -> str:
        return json.dumps(line, ensure_ascii=False) if options.json else show.event(line, settings.alerts.language)

    try:
        said = (line for path in files(folder)[-2:] for line in read(path) if "say" in line)
        for line in deque(said, maxlen=options.lines):
            print(told(line))
    except OSError as error:
        print(f"{folder}: {error.strerror}: expected the journal, which the daemon writes", file=sys.stderr)
        if not options.follow:
            return 1
    if not options.follow:
        return 0
    try:
        for line in stream(settings.daemon.socket, {"verb": "events"}):
            print(told(line), flush=True)
    except Unreachable as error:
        return fail(str(error), 4)
    return 0


def logs(options: argparse.Namespace) -> int:
    from vllm_watchdog.app.show_log import show_log

    folder = _to_ask(options).daemon.log_dir
    found = sorted(path.stem for path in folder.glob("*.log"))
    if options.engine not in found:
        return fail(f"{folder}: no log of {options.engine!r}; there are: "
                    f"{', '.join(found) or 'none yet, or none that you may see'}")
    return show_log(folder / f"{options.engine}.log", options.lines, options.follow, sys.stdout)


def operate(options: argparse.Namespace) -> int:
    request = {"verb": options.verb, "engine": getattr(options, "engine", None), "text": getattr(options, "reason", "")}
    answer = _ask(options, {key: value for key, value in request.items() if value}, OPERATOR_WAIT_S)
    print(answer.get("text", ""))
    return 0 if answer.get("ok") else 1


def doctor(options: argparse.Namespace) -> int:
    from vllm_watchdog.app.doctor import doctor

    return doctor(options.config, sys.stdout)


def install(options: argparse.Namespace) -> int:
    from vllm_watchdog.app.install import Host, InstallError, install, uninstall

    host = Host(sys.stdout, options.dry_run)
    try:
        (install if options.verb == "install" else uninstall)(host)
    except InstallError as error:
        return fail(str(error), 1)
    return 0


def alert_test(options: argparse.Namespace) -> int:
    from vllm_watchdog.app.alert_test import test

    return test(_settings(options), options.channel, sys.stdout)
