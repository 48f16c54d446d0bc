from __future__ import annotations

import re
import threading
import time

import pytest
from tests.web.site import BEARER, ID, TOKEN, Site, story

from vllm_watchdog.web import openapi
from vllm_watchdog.web.api import STATIC

OPERATIONS = ["/api/v1/engines/primary/restart", *(f"/api/v1/{verb}" for verb in openapi.VERBS)]


def test_the_status_is_the_report(site: Site) -> None:
    assert site.get("/api/v1/status").json == site.document


def test_ready_while_every_service_is_served_and_alive_while_the_loop_turns(site: Site) -> None:
    site.document = site.document | {"at": time.time()}
    assert (site.get("/livez").status, site.get("/readyz").status) == (200, 200)
    site.document = site.document | {"at": time.time() - 31, "health": "down"}
    assert site.get("/livez").problem == "the loop has not turned for 31 s"
    assert site.get("/readyz").status == 503


def test_the_history_is_listed(site: Site) -> None:
    assert len(site.get("/api/v1/incidents?limit=2").json["incidents"]) == 2
    assert len(site.get("/api/v1/incidents").json["incidents"]) == 3
    whole = site.get(f"/api/v1/incidents/{ID}").json
    assert whole["title"]["en"] and whole["advice"][0].keys() == {"en", "zh"}


def test_every_class_has_its_title_in_both_languages(site: Site) -> None:
    titles = site.get("/api/v1/classes").json["classes"]
    died = titles["engine_proc_died"]
    assert (died["en"], died["zh"]) == ("The engine process was ended from outside", "引擎进程被外部终止")
    assert died["advice"] and all(each["en"] and each["zh"] for each in died["advice"])


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "x", "", "1e3", "9" * 30, "١"])
def test_a_limit_that_is_none_is_refused(site: Site, limit: str) -> None:
    from urllib.parse import quote

    answer = site.get(f"/api/v1/incidents?limit={quote(limit)}")
    assert answer.status == 400 and "expected a whole number from 1 to 1000" in answer.problem


def test_a_history_that_can_not_be_read_is_said(site: Site) -> None:
    answer = site.get("/api/v1/incidents?limit=13")
    assert (answer.status, answer.problem) == (503, "history.db: is locked")


def test_samples_come_in_columns(site: Site) -> None:
    assert site.get("/api/v1/samples").json["series"]["gpu/0"]["t"] == [1.0]
    assert site.get("/api/v1/samples?since=7.5").json["series"]["gpu/0"]["t"] == [8.5]
    for none in ("x", "nan", "-1", "1e99", ""):
        assert site.get(f"/api/v1/samples?since={none}").problem == f"since: '{none}', expected epoch seconds"
    assert site.get("/api/v1/samples?range=1y").problem == "range: '1y' is not kept, expected 10m, 6h or 7d"


def test_a_bug_costs_one_answer(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.get("/api/v1/samples?range=7d").status == 500
    assert site.said.of("web.failed") == [{"path": "/api/v1/samples", "why": "ZeroDivisionError"}]
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert site.get("/api/v1/status").status == 200


# -- evidence

def test_evidence_needs_the_token_since_its_files_are_the_owners_alone(site: Site) -> None:
    for path in ("files", "files/README.md"):
        assert site.get(f"/api/v1/incidents/{ID}/{path}").status == 401
    listed = site.get(f"/api/v1/incidents/{ID}/files", BEARER).json
    assert listed["files"] == [{"name": "README.md", "bytes": 15}] and listed["folder"].endswith(ID)
    answer = site.get(f"/api/v1/incidents/{ID}/files/README.md", BEARER)
    assert answer.body == b"# what happened" and answer.headers["Content-Type"].startswith("text/plain")


@pytest.mark.parametrize("name", [
    "link.txt", "sub", "nothing", "..", "%2e%2e%2fx", ".hidden", "a%00b", "..%2f..%2fetc%2fpasswd"])
def test_nothing_but_plain_files_of_the_folder_is_read(site: Site, name: str) -> None:
    assert site.get(f"/api/v1/incidents/{ID}/files/{name}", BEARER).status == 404


@pytest.mark.parametrize("id_", ["nope", "..", "%2e%2e", "a b", "x" * 300])
def test_an_incident_that_is_not_there_is_not_found(site: Site, id_: str) -> None:
    assert site.get(f"/api/v1/incidents/{id_.replace(' ', '%20')}", BEARER).status == 404


# -- operators

@pytest.mark.parametrize("path", OPERATIONS)
def test_what_changes_something_needs_the_token(site: Site, path: str) -> None:
    missing = site.post(path, {})
    assert missing.status == 401 and missing.headers["WWW-Authenticate"] == "Bearer" and missing.problem
    for wrong in ("Bearer nope", "Bearer", f"Basic {TOKEN}", f"Bearer {TOKEN[:-1]}"):
        assert site.post(path, {"Authorization": wrong}).status in (401, 403)
    assert site.post(path, {"Cookie": f"token={TOKEN}"}).status == 401
    assert not site.asked
    assert site.get(path, BEARER).status == 405
    answer = site.post(path)
    assert (answer.status, answer.json) == (200, {"ok": True, "text": "done"})
    assert site.asked[0]["verb"] == path.rpartition("/")[2]


def test_without_a_configured_token_only_the_socket_operates(tmp_path) -> None:
    site = Site(tmp_path, story().document(), token="")
    answer = site.post("/api/v1/pause", {"Authorization": "Bearer "})
    assert answer.status == 403 and "control socket" in answer.problem
    assert site.post("/api/v1/pause").status == 403 and not site.asked
    site.web.stop(5)


def test_a_wish_is_told_with_its_engine_and_reason(site: Site) -> None:
    site.post("/api/v1/engines/primary/restart", body={"reason": "new weights"})
    site.post("/api/v1/failover", body={"engine": "primary"})
    assert [{key: value for key, value in wish.items() if key != "wait_s"} for wish in site.asked] == [
        {"verb": "restart", "engine": "primary", "text": "new weights"}, {"verb": "failover", "engine": "primary"}]


def test_what_is_refused_says_why(site: Site) -> None:
    site.answer = {"ok": False, "text": "primary has no backup"}
    answer = site.post("/api/v1/failover")
    assert (answer.status, answer.problem) == (409, "primary has no backup")
    assert site.post("/api/v1/engines/ghost/restart").problem == "no engine 'ghost', expected one of primary, backup"


@pytest.mark.parametrize(("body", "status"), [
    ("{", 415), ([], 400), ({"x": "y"}, 400), ({"reason": 5}, 400), ({"reason": "x" * 501}, 400),
    ({"reason": "x" * 20_000}, 413)])
def test_a_body_that_is_none_is_refused(site: Site, body: object, status: int) -> None:
    assert site.post("/api/v1/pause", body=body).status == status
    assert not site.asked


def test_a_body_that_does_not_come_is_not_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_watchdog.web.api.BODY_S", 0.1)
    with site.connect() as link:
        link.sendall(f"POST /api/v1/pause HTTP/1.1\r\nHost: localhost\r\nAuthorization: {BEARER['Authorization']}\r\n"
                     "Content-Length: 9\r\n\r\n".encode())
        assert link.recv(100).startswith(b"HTTP/1.1 408")


def test_too_many_that_wait_are_refused_and_the_page_answers_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_watchdog.web.api.ASIDE", 2)
    hung = threading.Event()
    site.answer = lambda _: {"ok": hung.wait(10), "text": "late"}
    waiting = [threading.Thread(target=site.post, args=("/api/v1/pause",)) for _ in range(2)]
    for thread in waiting:
        thread.start()
    while len(site.asked) < 2:
        time.sleep(0.01)
    assert site.post("/api/v1/pause").status == 503
    assert site.get("/api/v1/status").status == 200
    hung.set()
    for thread in waiting:
        thread.join(10)


# -- the description

def test_every_address_is_described_and_nothing_else(site: Site) -> None:
    document = site.get("/api/v1/openapi.json").json
    from vllm_watchdog.web.api import Api

    routes = {(re.sub(r"{engine}", "{engine}", route.path), route.method.lower())
              for route in Api(None, None, "").routes()}  # type: ignore[arg-type]
    described = {(path, method) for path, item in document["paths"].items() for method in item}
    assert routes - described == {("/", "get"), ("/static/{name}", "get")} and described <= routes


def test_every_reference_of_the_description_leads_somewhere() -> None:
    text = str(openapi.document())
    assert set(re.findall(r"#/components/schemas/(\w+)", text)) == set(openapi.SCHEMAS) - set()


# -- the page's files

def test_the_page_and_its_files_are_served_and_stay_small(site: Site) -> None:
    page = site.get("/")
    assert page.status == 200 and page.headers["Content-Type"] == "text/html; charset=utf-8"
    total = len(page.body)
    for name in re.findall(r'(?:src|href)="static/([^"]+)"', page.body.decode()):
        answer = site.get(f"/static/{name}")
        assert answer.status == 200, name
        total += len(answer.body)
    assert total < 150_000
    assert "http://" not in page.body.decode().replace("http://www.w3.org", "") and "https://" not in page.body.decode()
    assert all(path.suffix in (".html", ".css", ".js", ".txt", ".svg") for path in STATIC.iterdir())


@pytest.mark.parametrize("name", ["..%2fapi.py", "api.py", "%2fetc%2fpasswd", "x.js", "."])
def test_no_other_file_is(site: Site, name: str) -> None:
    assert site.get(f"/static/{name}").status == 404
