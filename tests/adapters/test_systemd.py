from __future__ import annotations

import os
import socket

import pytest

from vllm_watchdog.tell.systemd import Notifier


@pytest.fixture(params=["file", "abstract"])
def systemd(request, tmp_path):
    """Stands for systemd: its socket, and its address as systemd writes it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.settimeout(5)
        name = f"llm-watchdog-test-{os.getpid()}" if request.param == "abstract" else str(tmp_path / "notify")
        end.bind("\0" + name if request.param == "abstract" else name)
        yield end, "@" + name if request.param == "abstract" else name


def test_each_state_is_one_datagram(systemd):
    end, address = systemd
    notifier = Notifier(address)
    notifier.ready("all\nengines serve")
    notifier.watchdog()
    notifier.status("loading")
    notifier.stopping("stopping")
    assert [end.recv(4096) for _ in range(4)] == [
        b"READY=1\nSTATUS=all engines serve", b"WATCHDOG=1", b"STATUS=loading",
        b"STOPPING=1\nSTATUS=stopping"]
    assert notifier.lost == 0
    notifier.close()


def test_the_variables_are_taken_so_that_no_engine_inherits_them(systemd):
    end, address = systemd
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid()), "PATH": "/bin"}
    notifier = Notifier.from_environ(environ)
    assert environ == {"PATH": "/bin"}
    assert notifier.watchdog_s == 15.0
    notifier.watchdog()
    assert end.recv(100) == b"WATCHDOG=1"
    notifier.close()


@pytest.mark.parametrize(("variables", "expected_s"), [
    ({}, None), ({"WATCHDOG_USEC": "0"}, None), ({"WATCHDOG_USEC": "soon"}, None),
    ({"WATCHDOG_USEC": "2000000"}, 1.0), ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, None),
])
def test_a_watchdog_that_is_not_for_us_is_not_ours(variables, expected_s):
    assert Notifier.from_environ({"NOTIFY_SOCKET": "/run/x"} | variables).watchdog_s == expected_s


@pytest.mark.parametrize("address", ["", "relative", "vsock:2:1", "/" + "x" * 107])
def test_without_an_address_we_can_use_nothing_is_sent(address):
    notifier = Notifier.from_environ({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "2000000"})
    assert notifier == Notifier(None, None)
    notifier.ready("x")
    assert notifier.lost == 0


def test_a_systemd_that_does_not_read_never_makes_us_wait(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        notifier = Notifier(str(tmp_path / "notify"))
        for _ in range(2000):
            notifier.watchdog()
        assert 0 < notifier.lost < 2000
        notifier.close()


def test_a_systemd_that_is_gone_is_counted(tmp_path):
    notifier = Notifier(str(tmp_path / "nobody"))
    notifier.watchdog()
    assert notifier.lost == 1
    notifier.close()


def test_the_socket_is_not_inherited(systemd):
    _, address = systemd
    notifier = Notifier(address)
    notifier.watchdog()
    assert not notifier._socket.get_inheritable()
    notifier.close()
