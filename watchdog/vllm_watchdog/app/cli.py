"""`llm-watchdog`: the command line.  What each command does is in commands.py; this says what one can type.

Blocks only on the command that it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_watchdog.app import commands

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


def _completion(options: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(_parser(), options.shell))
    return 0


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

    add("run", commands.run, "the daemon, in the foreground")
    add("gateway", commands.gateway, "the data plane: one address in front of all engines of this host")
    add("check-config", commands.check_config, "validate the configuration and print each engine's full command line")
    explained = add("explain", commands.explain, "which of the gateway's rules a request meets, and where it goes")
    explained.add_argument("--model", metavar="NAME", help="the request's model; default: what the body names")
    explained.add_argument("--path", default="/v1/chat/completions", help="default: /v1/chat/completions")
    explained.add_argument("--header", action="append", default=[], metavar="'NAME: VALUE'", help="may be repeated")
    explained.add_argument("--api-key", metavar="NAME", help="the client's key, by its name in gateway.keys")
    length = explained.add_mutually_exclusive_group()
    length.add_argument("--tokens", type=_tokens, metavar="N", help="tokens of the prompt")
    length.add_argument("--file", type=Path, metavar="BODY.json", help="the request's body, whose prompt is counted")
    status = add("status", commands.status, "engines, GPUs, route, open incidents, alert channels")
    shape = status.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="the whole report, as docs/status.md describes it")
    shape.add_argument("--watch", action="store_true", help="again each second, until Ctrl-C")
    listing = add("incidents", commands.incidents, "the history of incidents, or one of them")
    listing.add_argument("id", nargs="?", metavar="ID", help="all that is known of this one")
    listing.add_argument("--json", action="store_true", help="the records as they are")
    listing.add_argument("--limit", type=_count, default=20, metavar="N", help="the newest N (default: 20)")
    logs = add("logs", commands.logs, "an engine's log with the findings marked")
    logs.add_argument("engine", metavar="ENGINE")
    events = add("events", commands.events, "the journal in words")
    events.add_argument("--json", action="store_true", help="its lines as they are")
    for one in (logs, events):
        one.add_argument("-f", "--follow", action="store_true", help="and what comes, until Ctrl-C")
        one.add_argument("-n", "--lines", type=_count, default=50, metavar="N", help="the last N lines (default: 50)")
    snapshot = add("snapshot", commands.operate, "write an evidence bundle now")
    snapshot.add_argument("engine", nargs="?", metavar="ENGINE", help="default: each that is in service")
    snapshot.add_argument("--reason", default="", metavar="TEXT", help="stands in the bundle")
    add("restart", commands.operate, "stop and start an engine; its failures are forgiven").add_argument(
        "engine", metavar="ENGINE")
    for name, text in (("failover", "let the backup serve"), ("failback", "let the primary serve again")):
        add(name, commands.operate, text).add_argument(
            "engine", nargs="?", metavar="ENGINE", help="of this one's service; default: of every one that has a backup")
    add("pause", commands.operate, "stop automatic actions, not watching")
    add("resume", commands.operate, "automatic actions again")
    add("reload", commands.operate,
        "read the configuration again: thresholds, rules and alerts at once, arguments at the next start")
    add("handover", commands.operate, "leave the engines as they are to the next daemon, which systemd starts")
    alert = add("alert", commands.alert_test, "send a test message and print the receiver's answer")
    alert.add_argument("test", choices=["test"])
    alert.add_argument("channel", nargs="?", metavar="CHANNEL", help="default: all of them")
    classify = add(
        "classify", commands.classify, "read any vLLM log and print the verdict with the lines that prove it", False)
    classify.add_argument("files", nargs="+", metavar="FILE")
    classify.add_argument("--json", action="store_true", help="one object a file, a line each")
    add("replay", commands.replay, "fold a recorded journal again; print the first difference", False).add_argument(
        "journal", nargs="+", metavar="JOURNAL")
    add("completion", _completion, "print the shell's completion: llm-watchdog completion bash > FILE", False).add_argument(
        "shell", choices=["bash", "zsh", "tcsh"])
    add("doctor", commands.doctor, "what this host has and lacks, with remedies")
    for name, text in (("install", "users, folders and units on a systemd host; the configuration is kept"),
                       ("uninstall", "stop and remove the services; configuration, history and user stay")):
        one = add(name, commands.install, text, False)
        one.add_argument("--dry-run", action="store_true", help="only say what would be done")
    _add_drill(add("drill", commands.drill, "rehearse faults, time the recovery, judge it against what is promised"))
    demo = add(
        "demo", commands.demo, "the main job on this machine with a stand-in engine: boots, breaks, fails over", False)
    demo.add_argument("--keep", action="store_true", help="keep the folder with its logs and evidence")
    return parser


def _tokens(text: str) -> int:
    with contextlib.suppress(ValueError):
        if 0 <= (number := int(text)) <= 1 << 30:
            return number
    raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of tokens, 0 or more")


def _add_drill(drill: argparse.ArgumentParser) -> None:
    drill.add_argument("names", nargs="*", metavar="NAME", help="which faults; --list names them")
    drill.add_argument("--list", action="store_true", help="every fault, and where it may be rehearsed")
    drill.add_argument("--all", action="store_true", help="all of them, one after the other")
    drill.add_argument("--sandbox", action="store_true",
                       help="not on the running service, but on a throw-away one with stand-in engines")
    drill.add_argument("--service", default="", metavar="NAME", help="by its primary's name (default: the first one)")
    drill.add_argument("--yes", action="store_true", help="do not ask")
    drill.add_argument("--force", action="store_true", help="also on a host that is not calm")
    drill.add_argument("--json", action="store_true", help="the results as JSON, the talk on standard error")
    drill.add_argument("--report", type=Path, metavar="FILE", help="write a page with table and plots (HTML)")


def _count(text: str) -> int:
    with contextlib.suppress(ValueError):
        if 0 < (number := int(text)) <= 100_000:
            return number
    raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 to 100000")


if __name__ == "__main__":
    sys.exit(main())
