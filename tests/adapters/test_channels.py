"""Every kind of channel against a local receiver that checks what the real service checks."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace

import pytest
from pydantic import SecretStr
from tests.fakes import receivers as r
from tests.fakes.house import WRITER
from tests.fakes.tell import WALL, incident

from vllm_watchdog.app import channels as made
from vllm_watchdog.app.alert_test import test as alert_test
from vllm_watchdog.config import Settings
from vllm_watchdog.config_channels import Kind, address
from vllm_watchdog.config_sections import Alerts, Channel
from vllm_watchdog.core.catalog import CATALOG
from vllm_watchdog.core.commands import Alert
from vllm_watchdog.core.failures import Failure
from vllm_watchdog.core.incidents import Entry, Need, Urgency
from vllm_watchdog.tell.channel import Outcome
from vllm_watchdog.tell.payload import Language, trial

KEY = "R0UT1NGK3Y0123456789012345678901"
# kind -> its receiver, the secret it wants, the path of its address
SERVICES = {
    Kind.DINGTALK: (r.DingTalk, "SECdingsecret1", "robot/send?access_token=tok3n"),
    Kind.FEISHU: (r.Feishu, "feishusecret1", "open-apis/bot/v2/hook/1234-abcd"),
    Kind.WECOM: (r.WeCom, "", "cgi-bin/webhook/send?key=k3y-of-the-robot"),
    Kind.SLACK: (r.Slack, "", "services/T000/B000/hunter2"),
    Kind.PAGERDUTY: (r.PagerDuty, KEY, "v2/enqueue"),
    Kind.ALERTMANAGER: (r.Alertmanager, "", "api/v2/alerts"),
    Kind.WEBHOOK: (r.Hook, "hooks3cret", "hook"),
}
CHATS = (Kind.DINGTALK, Kind.FEISHU, Kind.WECOM, Kind.SLACK)
NASTY = "*b* _i_ `c` [l](http://x) <@U1> <!channel> & # > ~ | \\ $HOME \udcff " + "显存不足 " * 40


def channel(kind, url, secret="", **keys):
    keys |= {"secret": SecretStr(secret)} if secret else {}
    alerts = Alerts(channels={"oncall": Channel(type=kind, url=SecretStr(url), **keys)})
    return made.channels(Settings.model_construct(alerts=alerts))[0]


@pytest.fixture
def serve():
    servers = []

    def start(kind, secret=None):
        service, wanted, path = SERVICES[kind]
        taker = service(time.time, wanted)
        servers.append(r.Server(taker, path))
        return taker, channel(kind, servers[-1].url, wanted if secret is None else secret)

    yield start
    for server in servers:
        server.close()


def worst(class_, urgency=Urgency.PAGE):
    """As much text as an incident can hold, and none of it harmless."""
    failures = tuple(Failure(60.0, f"primary#{number}", class_, NASTY, number=number) for number in range(1, 13))
    return replace(incident(urgency=urgency), class_=class_, text=NASTY, failures=failures,
                   needs=(Need("primary", class_, NASTY * 3, NASTY * 3),),
                   timeline=tuple(Entry(60.0 + step, "action", f"{step} {NASTY}") for step in range(300)))


@pytest.mark.parametrize("kind", SERVICES)
@pytest.mark.parametrize("language", Language)
def test_every_message_is_taken_by_a_receiver_that_checks_what_the_service_checks(serve, kind, language):
    service, told = serve(kind)
    writer = replace(WRITER, language=language)
    alerts = [Alert("opened", incident()), Alert("worsened", worst("oom_runtime")), Alert("reminder", worst("wedged")),
              Alert("resolved", incident(over=True)), trial(time.time())]
    payloads = [writer.payload(alert, time.time()) for alert in alerts]
    if kind in CHATS:
        storm = [Alert("opened", replace(worst("nccl_error"), id=f"{n}-" + "x" * 60)) for n in range(20)]
        payloads.append(writer.group([writer.payload(alert, WALL) for alert in storm]))
    for payload in payloads:
        outcome, answer = told.test(payload)
        assert outcome.ok, (payload["kind"], outcome, answer)
    assert len(service.taken) == len(payloads)


@pytest.mark.parametrize("kind", CHATS)
@pytest.mark.parametrize("class_", CATALOG)
def test_every_class_fits_every_chat_and_says_the_same_of_each(kind, class_):
    form = made.FORMS[kind](address(Channel(type=kind, url=SecretStr("https://x/y"))), {})
    payload = WRITER.payload(Alert("opened", worst(class_)), WALL)
    body = json.loads(form.request(payload, WALL).body)
    text = json.dumps(body, ensure_ascii=False)
    for label, _ in payload["lines"]:
        assert label in text, label
    assert class_ in text
    assert "<!channel>" not in text and "<@U1>" not in text     # a log line calls nobody


@pytest.mark.parametrize(("kind", "secret", "why"), [
    (Kind.DINGTALK, "wrong-secret",
     "HTTP 200, errcode 310000: sign not match, more: access_token=tok3n"),
    (Kind.FEISHU, "wrong-secret",
     "HTTP 200, code 19021: sign match fail or timestamp is not within one hour from current time"),
    (Kind.PAGERDUTY, "X" * 32, "HTTP 400"),
    (Kind.PAGERDUTY, "short", "HTTP 400"), (Kind.WEBHOOK, "wrong-secret", "HTTP 401"),
])
def test_a_wrong_secret_is_a_no_and_says_why(serve, kind, secret, why):
    service, told = serve(kind, secret)
    outcome, answer = told.test(WRITER.payload(trial(WALL), WALL))
    assert not outcome.ok and not service.taken
    assert outcome.why == why and answer


def test_what_a_service_repeats_of_our_token_is_masked():
    long = "0123456789abcdef"
    server = r.Server(lambda handler: r.Service.__call__(Echo(time.time), handler), f"robot/send?access_token={long}")
    try:
        outcome, answer = channel(Kind.DINGTALK, server.url).test(WRITER.payload(trial(WALL), WALL))
    finally:
        server.close()
    assert outcome.why == "HTTP 200, errcode 1: ***" and long not in answer and "***" in answer


class Echo(r.Service):
    def check(self, path, headers, raw, body):
        return r._json(errcode=1, errmsg=path.partition("=")[2])


@pytest.mark.parametrize(("kind", "answer", "outcome"), [
    (Kind.DINGTALK, {"errcode": 130101, "errmsg": "send too fast"},
     Outcome(False, "HTTP 200, errcode 130101: send too fast", 600.0)),
    (Kind.WECOM, {"errcode": 45009, "errmsg": "api freq out of limit"},
     Outcome(False, "HTTP 200, errcode 45009: api freq out of limit", 60.0)),
    (Kind.FEISHU, {"code": 11232, "msg": "frequency limited"},
     Outcome(False, "HTTP 200, code 11232: frequency limited", 60.0)),
    (Kind.WECOM, {"hello": "captive portal"}, Outcome(False, "HTTP 200, an answer without errcode", refused=True)),
    (Kind.SLACK, {"ok": False, "error": "no_text"}, Outcome(False, "HTTP 200, no_text", refused=True)),
])
def test_a_no_in_an_answer_with_status_200_is_a_no(kind, answer, outcome):
    class Says(r.Service):
        def check(self, path, headers, raw, body):
            return r._json(**answer)

    server = r.Server(Says(time.time))
    try:
        assert channel(kind, server.url).send(WRITER.payload(trial(WALL), WALL)) == outcome
    finally:
        server.close()


def test_pagerduty_has_one_incident_for_each_of_ours_and_it_is_resolved(serve):
    service, told = serve(Kind.PAGERDUTY)
    worse = Alert("worsened", incident(urgency=Urgency.PAGE))
    for alert in (Alert("opened", incident()), Alert("opened", incident()), worse):
        assert told.send(WRITER.payload(alert, WALL)).ok
    assert service.open == {incident().id}
    assert [event["payload"]["severity"] for event in service.taken] == ["error", "error", "critical"]
    assert told.send(WRITER.payload(Alert("resolved", incident(over=True)), WALL)).ok
    assert not service.open


def test_an_alertmanager_has_one_alert_at_a_time_for_each_incident_and_none_when_it_is_over(serve):
    service, told = serve(Kind.ALERTMANAGER)
    service.now = "2026-11-29T22:00:00.000Z"
    mild = incident(urgency=Urgency.WARNING)
    assert told.send(WRITER.payload(Alert("opened", mild), WALL)).ok
    assert [labels["severity"] for labels in service.firing] == ["warning"]
    told._wall = lambda: WALL
    assert told.send(WRITER.payload(Alert("worsened", replace(mild, urgency=Urgency.PAGE)), WALL)).ok
    assert [labels["severity"] for labels in service.firing] == ["page"]
    over = replace(incident(over=True), urgency=Urgency.PAGE)
    assert told.send(WRITER.payload(Alert("resolved", over), WALL)).ok
    assert service.firing == []


def test_the_signature_covers_body_and_time(serve):
    _, told = serve(Kind.WEBHOOK)
    told._wall = lambda: time.time() - 600
    assert told.send(WRITER.payload(trial(WALL), WALL)) == Outcome(False, "HTTP 401")
    told._wall = time.time
    assert told.send(WRITER.payload(trial(WALL), WALL)).ok


# -- which kind an address is

@pytest.mark.parametrize(("url", "kind", "to", "secret"), [
    ("https://hooks.slack.com/services/T0/B0/x", Kind.SLACK, None, ""),
    ("slack://T0AAA/B0AAA/xyz", Kind.SLACK, "https://hooks.slack.com/services/T0AAA/B0AAA/xyz", ""),
    ("slack://xoxb-1234-5678-abc/#channel", Kind.APPRISE, None, ""),
    ("https://oapi.dingtalk.com/robot/send?access_token=t", Kind.DINGTALK, None, ""),
    ("dingtalk://SECx@t", Kind.DINGTALK, "https://oapi.dingtalk.com/robot/send?access_token=t", "SECx"),
    ("dingtalk://t", Kind.DINGTALK, "https://oapi.dingtalk.com/robot/send?access_token=t", ""),
    ("dingtalk://t/13800000000", Kind.APPRISE, None, ""),
    ("https://open.feishu.cn/open-apis/bot/v2/hook/t", Kind.FEISHU, None, ""),
    ("feishu://t", Kind.FEISHU, "https://open.feishu.cn/open-apis/bot/v2/hook/t", ""),
    ("lark://t/", Kind.FEISHU, "https://open.larksuite.com/open-apis/bot/v2/hook/t", ""),
    ("https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=k", Kind.WECOM, None, ""),
    ("wecombot://k", Kind.WECOM, "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=k", ""),
    ("pagerduty://integ@api", Kind.PAGERDUTY, "https://events.pagerduty.com/v2/enqueue", "integ"),
    ("pagerduty://integ@api/?region=eu", Kind.PAGERDUTY, "https://events.eu.pagerduty.com/v2/enqueue", "integ"),
    ("https://example.com/hook", Kind.WEBHOOK, None, ""),
    ("mailtos://u:p@example.com", Kind.APPRISE, None, ""),
])
def test_the_kind_is_known_by_the_address(url, kind, to, secret):
    found = address(Channel(url=SecretStr(url)))
    assert (found.kind, found.url, found.secret) == (kind, to or url, secret)
    assert "example" not in repr(found) and (secret or "https") not in repr(found)


# -- alert test

def test_alert_test_sends_to_every_channel_and_says_what_each_answered(serve):
    service, _ = serve(Kind.DINGTALK)
    server = r.Server(service, SERVICES[Kind.DINGTALK][2])
    channels = {
        "good": Channel(type=Kind.DINGTALK, url=SecretStr(server.url), secret=SecretStr(service.secret)),
        "bad": Channel(type=Kind.DINGTALK, url=SecretStr(server.url), secret=SecretStr("wrong")),
        "gone": Channel(url=SecretStr("http://127.0.0.1:1/x")),
    }
    settings = Settings(alerts=Alerts(channels=channels))
    out = io.StringIO()
    assert alert_test(settings, None, out) == 1
    assert alert_test(settings, "good", out) == 0
    assert alert_test(settings, "other", out) == 2
    server.close()
    assert out.getvalue().splitlines() == [
        'good: taken, HTTP 200: {"errcode": 0, "errmsg": "ok"}',
        'bad: NOT TAKEN, HTTP 200, errcode 310000: sign not match, more: access_token=tok3n: '
        '{"errcode": 310000, "errmsg": "sign not match, more: access_token=tok3n"}',
        "gone: NOT TAKEN, ConnectionError (Connection refused)",
        'good: taken, HTTP 200: {"errcode": 0, "errmsg": "ok"}',
        "alerts.channels.other: not configured; there are: good, bad, gone",
    ]
