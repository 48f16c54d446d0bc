"""`llm-watchdog`: one small function a command.  Imports what a command needs where it needs it: `status` stays quick.

Exit codes: 0 done; 1 it was refused or went wrong; 2 bad input.  `status`: 0 healthy, 1 degraded, 3 down, 4 no daemon.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

OPERATOR_WAIT_S = 15.0
DRAINED_S = 5.0         # what is cut after the drain may still write its last words

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    options = _parser().parse_args(argv)
    command: Command = options.command
    try:
        return command(options)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())     # `| head` is not an error
        return 0
    except KeyboardInterrupt:
        return 130


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


def _to_ask(options: argparse.Namespace) -> Any:
    """As much of the settings as it takes to ask the daemon, or to read what it wrote."""
    from vllm_watchdog.config_load import load_to_ask
    from vllm_watchdog.config_problems import ConfigError

    try:
        return load_to_ask(options.config)
    except ConfigError as error:
        raise SystemExit(fail("\n".join(error.problems))) from None


# -- the daemon

def _run(options: argparse.Namespace) -> int:
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


def _gateway(options: argparse.Namespace) -> int:
    plan = _settings(options).gateway_plan()
    from vllm_watchdog.app.console import Console, journald
    from vllm_watchdog.gateway.app import run
    from vllm_watchdog.tell.systemd import Notifier

    notifier = Notifier.from_environ(os.environ)

    def stopping(status: str) -> None:
        notifier.stopping(status)
        notifier.extend(plan.drain_s + DRAINED_S)

    return run(plan, Console(journald()).say, notifier.ready, stopping)


def _check_config(options: argparse.Namespace) -> int:
    from vllm_watchdog.app.check_config import check

    return check(options.config, sys.stdout, sys.stderr)


def _classify(options: argparse.Namespace) -> int:
    from vllm_watchdog.app.classify import classify

    return classify(options.files, options.json, sys.stdout)


def _demo(options: argparse.Namespace) -> int:
    from vllm_watchdog.app.demo import demo

    return demo(sys.stdout, keep=options.keep)


def _replay(options: argparse.Namespace) -> int:
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


def _status(options: argparse.Namespace) -> int:
    from vllm_watchdog.app import status
    from vllm_watchdog.tell.client import Unreachable, call

    socket = _settings(options).daemon.socket

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


def _completion(options: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(_parser(), options.shell))
    return 0


def _incidents(options: argparse.Namespace) -> int:
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
        print(show.incident(incident, settings.daemon.log_dir / "incidents", settings.alerts.language))
    return 0


def _events(options: argparse.Namespace) -> int:
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


def _logs(options: argparse.Namespace) -> int:
    from vllm_watchdog.app.show_log import show_log

    settings = _settings(options)
    launch = settings.launches().get(options.engine)
    if launch is None:
        return fail(f"no engine {options.engine!r} is configured; there are: {', '.join(settings.launches())}")
    return show_log(launch.log_path, options.lines, options.follow, sys.stdout)


def _operate(options: argparse.Namespace) -> int:
    request = {"verb": options.verb, "engine": getattr(options, "engine", None), "text": getattr(options, "reason", "")}
    answer = _ask(options, {key: value for key, value in request.items() if value}, OPERATOR_WAIT_S)
    print(answer.get("text", ""))
    return 0 if answer.get("ok") else 1


def _doctor(options: argparse.Namespace) -> int:
    from vllm_watchdog.app.doctor import doctor

    return doctor(options.config, sys.stdout, sys.stderr)


def _install(options: argparse.Namespace) -> int:
    from vllm_watchdog.app.install import Host, InstallError, install, uninstall

    host = Host(sys.stdout, options.dry_run)
    try:
        (install if options.verb == "install" else uninstall)(host)
    except InstallError as error:
        return fail(str(error), 1)
    return 0


def _alert_test(options: argparse.Namespace) -> int:
    from vllm_watchdog.app.alert_test import test

    return test(_settings(options), options.channel, sys.stdout)


# -- the command line

def _parser() -> argparse.ArgumentParser:
    from vllm_watchdog import __version__

    parser = argparse.ArgumentParser(
        prog="llm-watchdog",
        description="A host-level watchdog daemon for vLLM: launches, watches, proves, restarts, fails over.")
    parser.add_argument("--version", action="version", version=f"llm-watchdog {__version__}")
    sub = parser.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    for place, default in ((parser, None), (common, argparse.SUPPRESS)):    # left out after a command it overrides nothing
        place.add_argument("--config", type=Path, metavar="PATH", default=default,
                           help="default: ./config.toml, then /etc/llm-watchdog/config.toml")

    def add(name: str, command: Command, text: str, configured: bool = True) -> argparse.ArgumentParser:
        one = sub.add_parser(name, help=text, description=text, parents=[common] if configured else [])
        one.set_defaults(command=command, verb=name)
        return one

    add("run", _run, "the daemon, in the foreground")
    add("gateway", _gateway, "the data plane: one address in front of all engines of this host")
    add("check-config", _check_config, "validate the configuration and print each engine's full command line")
    status = add("status", _status, "engines, GPUs, route, open incidents, alert channels")
    shape = status.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="the whole report, as docs/status.md describes it")
    shape.add_argument("--watch", action="store_true", help="again each second, until Ctrl-C")
    listing = add("incidents", _incidents, "the history of incidents, or one of them")
    listing.add_argument("id", nargs="?")
    listing.add_argument("--json", action="store_true")
    listing.add_argument("--limit", type=_count, default=20, metavar="N")
    logs = add("logs", _logs, "an engine's log with the findings marked")
    logs.add_argument("engine")
    events = add("events", _events, "the journal in words")
    events.add_argument("--json", action="store_true", help="its lines as they are")
    for one in (logs, events):
        one.add_argument("-f", "--follow", action="store_true")
        one.add_argument("-n", "--lines", type=_count, default=50, metavar="N")
    snapshot = add("snapshot", _operate, "write an evidence bundle now")
    snapshot.add_argument("engine", nargs="?")
    snapshot.add_argument("--reason", default="", metavar="TEXT")
    add("restart", _operate, "stop and start an engine; its failures are forgiven").add_argument("engine")
    for name, text in (("failover", "let the backup serve"), ("failback", "let the primary serve again")):
        add(name, _operate, text).add_argument("engine", nargs="?")
    add("pause", _operate, "stop automatic actions, not watching")
    add("resume", _operate, "automatic actions again")
    add("reload", _operate, "read the configuration again: thresholds and alerts at once, arguments at the next start")
    add("handover", _operate, "leave the engines as they are to the next daemon, which systemd starts")
    alert = add("alert", _alert_test, "send a test message and print the receiver's answer")
    alert.add_argument("test", choices=["test"])
    alert.add_argument("channel", nargs="?")
    classify = add("classify", _classify, "read any vLLM log and print the verdict with the lines that prove it", False)
    classify.add_argument("files", nargs="+", metavar="FILE")
    classify.add_argument("--json", action="store_true")
    add("replay", _replay, "fold a recorded journal again; print the first difference", False).add_argument(
        "journal", nargs="+", metavar="JOURNAL")
    add("completion", _completion, "print the shell's completion: llm-watchdog completion bash > FILE", False).add_argument(
        "shell", choices=["bash", "zsh", "tcsh"])
    add("doctor", _doctor, "what this host has and lacks, with remedies")
    for name, text in (("install", "users, folders and units on a systemd host; the configuration is kept"),
                       ("uninstall", "stop and remove the services; configuration, history and user stay")):
        add(name, _install, text, False).add_argument("--dry-run", action="store_true", help="only say what would be done")
    demo = add("demo", _demo, "the main job on this machine with a stand-in engine: boots, breaks, fails over", False)
    demo.add_argument("--keep", action="store_true", help="keep the folder with its logs and evidence")
    return parser


def _count(text: str) -> int:
    with contextlib.suppress(ValueError):
        if 0 < (number := int(text)) <= 100_000:
            return number
    raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 to 100000")


if __name__ == "__main__":
    sys.exit(main())
