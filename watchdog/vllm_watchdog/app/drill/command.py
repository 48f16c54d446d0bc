"""`llm-watchdog drill`: lists, asks, rehearses, reports.

Exit codes: 0 every promise was kept; 1 one was not, or the host is not calm; 2 bad input; 4 no daemon.
Whatever ends it, Ctrl-C and SIGTERM too, a fault that was injected is taken back and a sandbox is torn down.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from vllm_watchdog.app.drill.apart import APART, encoded, perform_apart
from vllm_watchdog.app.drill.inject import OURS
from vllm_watchdog.app.drill.inject_sandbox import SANDBOXED
from vllm_watchdog.app.drill.page import page
from vllm_watchdog.app.drill.perform import Result, perform
from vllm_watchdog.app.drill.sandbox import Sandbox, sandbox
from vllm_watchdog.app.drill.site import Site
from vllm_watchdog.app.show import table
from vllm_watchdog.app.throwaway import StepError
from vllm_watchdog.config import Settings
from vllm_watchdog.core.drill_verdict import unfit
from vllm_watchdog.core.drills import FAULTS, Fault
from vllm_watchdog.core.units import utc
from vllm_watchdog.tell.client import Unreachable
from vllm_watchdog.tell.lock import Busy, Lock

LOCK = "drill.lock"
CALM_AGAIN_S, LOOK_S = 30.0, 0.25
ONLY_SANDBOX = "only in a sandbox: it touches more than the service's own processes"


class RefusedError(Exception):
    """The drill is not begun: one sentence, and the exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Wish:
    """What was asked for on the command line."""

    names: tuple[str, ...] = ()
    all_: bool = False
    sandboxed: bool = False
    service: str = ""
    yes: bool = False
    force: bool = False
    json: bool = False
    report: Path | None = None


def listing() -> str:
    """Every fault that can be rehearsed."""
    return "\n".join(table(("NAME", "WHERE", "WHAT"), (
        (fault.name, "sandbox" if fault.sandbox else "anywhere", fault.does) for fault in FAULTS)))


def chosen(wish: Wish) -> tuple[Fault, ...]:
    """The faults in the table's order.  Raises RefusedError."""
    by_name = {fault.name: fault for fault in FAULTS}
    for name in wish.names:
        if name not in by_name:
            raise RefusedError(f"{name}: no such drill; `llm-watchdog drill --list` names them", 2)
        if by_name[name].sandbox and not wish.sandboxed:
            raise RefusedError(f"{name}: {ONLY_SANDBOX}; add --sandbox", 2)
    if wish.report and not wish.report.parent.is_dir():
        raise RefusedError(f"{wish.report.parent}: expected a folder for the report", 2)
    if not (wish.names or wish.all_):
        raise RefusedError("expected the name of a drill, --all or --list", 2)
    return tuple(fault for fault in FAULTS if wish.all_ or fault.name in wish.names)


def drill(wish: Wish, settings: Callable[[], Settings], out: TextIO, ask: Callable[[str], str] | None) -> int:
    """`settings` reads the configuration, for a running service only; `ask` reads an answer, None: nobody is there."""
    def tell(text: str) -> None:
        print(text, file=sys.stderr if wish.json else out, flush=True)

    try:
        faults = chosen(wish)
        with orderly(), place(wish, faults, settings, tell, ask) as (site, where):
            results = [one(site, fault, wish, tell) for fault in faults]
    except RefusedError as error:
        print(error, file=sys.stderr)
        return error.code
    except Unreachable as error:
        print(error, file=sys.stderr)
        return 4
    except StepError as error:
        print(f"the sandbox: {error}", file=sys.stderr)
        return 1
    if wish.json:
        print(json.dumps([encoded(result) for result in results], indent=1), file=out)
    code = summary(results, tell)
    return code if wish.report is None or saved(wish.report, page(results, where, utc(time.time())), tell) else 1


def saved(report: Path, text: str, tell: Callable[[str], None]) -> bool:
    try:
        report.write_text(text, "utf-8")
    except OSError as error:
        print(f"{report}: {error.strerror}; expected a place for the report", file=sys.stderr)
        return False
    tell(f"report: {report}")
    return True


@contextmanager
def place(wish: Wish, faults: Sequence[Fault], settings: Callable[[], Settings], tell: Callable[[str], None],
          ask: Callable[[str], str] | None) -> Iterator[tuple[Site, str]]:
    """Where the drills take place, calm and ours alone, and its name.  Raises RefusedError, Unreachable, StepError."""
    if wish.sandboxed:
        consent(wish, faults, "a sandbox of stand-in engines", tell, ask)
        folder = Path(tempfile.mkdtemp(prefix="llm-watchdog-drill-"))
        try:
            tell("starting the sandbox: a primary, a sleeping backup, the gateway")
            with sandbox(folder) as box:
                yield box, "a sandbox with stand-in engines"
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    site = running(wish, settings())
    with alone(site):
        calm(site, wish)
        where = f"service {site.service}, daemon on {site.socket}"
        consent(wish, faults, where, tell, ask)
        yield site, where


def running(wish: Wish, settings: Settings) -> Site:
    services = [name for name, engine in settings.engines.items() if engine.backup_for is None]
    service = wish.service or services[0]
    if service not in services:
        raise RefusedError(f"--service {service}: expected one of {', '.join(services)}", 2)
    return Site(settings, service)


@contextmanager
def alone(site: Site) -> Iterator[None]:
    """One drill a daemon at a time.  Raises RefusedError."""
    try:
        lock = Lock.acquire(site.settings.daemon.state_dir / LOCK)
    except Busy as error:
        raise RefusedError(f"another drill is running, PID {error.pid}", 1) from None
    except OSError as error:
        raise RefusedError(f"{error.filename}: {error.strerror}; expected to run as the daemon's user or root", 1) from None
    try:
        yield
    finally:
        lock.release()


def calm(site: Site, wish: Wish) -> None:
    """Raises RefusedError, Unreachable."""
    reasons = unfit(site.status(), site.service)
    if reasons and not wish.force:
        raise RefusedError("\n".join((*reasons, "not calm, so no drill is begun; --force overrides")), 1)


def consent(wish: Wish, faults: Sequence[Fault], where: str, tell: Callable[[str], None],
            ask: Callable[[str], str] | None) -> None:
    """Says what will be done, and asks.  Raises RefusedError."""
    tell(f"on {where}, while a few clients ask through its gateway:")
    for fault in faults:
        if wish.sandboxed or not fault.sandbox:
            tell(f"  {fault.name}: {fault.does}")
    if not wish.sandboxed:
        tell("each is taken back and waited for; alerts go out as ever")
    if wish.yes:
        return
    if ask is None:
        raise RefusedError("nobody is there to be asked, expected --yes", 2)
    if ask("go ahead? [y/N] ").strip().lower() not in ("y", "yes"):
        raise RefusedError("nothing was done", 1)


def one(site: Site, fault: Fault, wish: Wish, tell: Callable[[str], None]) -> Result:
    if fault.sandbox and not site.sandboxed:
        return Result(fault.name, skipped=ONLY_SANDBOX)
    tell(f"\n{fault.name}: {fault.does}")
    result = tried(site, fault, wish, tell)
    if result.skipped:
        tell(f"  skipped: {result.skipped}")
    for check in result.checks:
        tell(f"  {'kept  ' if check.kept else 'BROKEN'}  {check.what:<17} {check.seen:<28} promised: {check.promised}")
    return result


def tried(site: Site, fault: Fault, wish: Wish, tell: Callable[[str], None]) -> Result:
    if fault.name in APART:
        with tempfile.TemporaryDirectory(prefix="llm-watchdog-drill-") as folder:
            return perform_apart(fault, Path(folder), tell)
    if not wish.force and (reasons := waited_for(site)):
        return Result(fault.name, skipped=f"the host is not calm: {'; '.join(reasons)}")
    inject: Mapping[str, Callable[[Any], Any]] = {**OURS, **(SANDBOXED if isinstance(site, Sandbox) else {})}
    return perform(site, fault, inject[fault.name], tell)


def waited_for(site: Site) -> tuple[str, ...]:
    """What is amiss still, after `CALM_AGAIN_S`: on a busy host something may have happened since the last drill."""
    end = time.monotonic() + CALM_AGAIN_S
    while (reasons := unfit(site.status(), site.service)) and time.monotonic() < end:
        time.sleep(LOOK_S)
    return reasons


def summary(results: Sequence[Result], tell: Callable[[str], None]) -> int:
    done = [result for result in results if not result.skipped]
    broken = [result.fault for result in done if not result.kept]
    skipped = f", {len(results) - len(done)} skipped" if len(done) < len(results) else ""
    tell(f"\n{len(done) - len(broken)} of {len(done)} kept every promise{skipped}"
         + (f"; broken: {', '.join(broken)}" if broken else ""))
    return 1 if broken or not done else 0


@contextmanager
def orderly() -> Iterator[None]:
    """SIGTERM and a terminal that hangs up end it as Ctrl-C does, once: what is taken back must not be broken off."""
    numbers = (signal.SIGTERM, signal.SIGHUP)

    def leave(*_: object) -> NoReturn:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
