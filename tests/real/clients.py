"""Those who ask: in threads, byte by byte, and programs that people use, run by the interpreter that has vLLM."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from contextlib import closing
from typing import Any

import requests
from tests.real.rig import START_S

ERROR_LAST = re.compile(rb'\n\ndata: (\{"error".*\})\n\n(?:data: \[DONE\]\n\n)?\Z')


class Asked(threading.Thread):
    """One completion of exactly `tokens`, asked for in a thread of its own: when its answer began, and what it was."""

    def __init__(self, url: str, prompt: str, tokens: int, stream: bool) -> None:
        super().__init__(daemon=True)
        self._url, self._stream = url, stream
        self._body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        self.tokens, self.status, self.text = tokens, 0, bytearray()
        self.first_at: float | None = None
        self.start()

    def run(self) -> None:
        try:
            with requests.post(self._url + "/v1/completions", json=self._body, stream=True, timeout=2 * START_S) as answer:
                self.status = answer.status_code
                for piece in answer.iter_content(None):
                    self.first_at = self.first_at or time.time()
                    self.text += piece
        except requests.RequestException as error:
            self.text += type(error).__name__.encode()

    @property
    def verdict(self) -> str:
        """`whole`; `cut`: begun, and ended with an error event; else what came."""
        if self.status == 200 and self._stream:
            if b'"error"' not in self.text and self.text.endswith(b"data: [DONE]\n\n"):
                return "whole"
            if self.text.startswith(b'data: {"id"') and ERROR_LAST.search(self.text):
                return "cut"
        elif self.status == 200 and json.loads(self.text)["usage"]["completion_tokens"] == self.tokens:
            return "whole"
        return f"{self.status} {self.text[:300]!r} ... {self.text[-300:]!r}"

    @property
    def error(self) -> str:
        """The message of the event that cut it."""
        last = ERROR_LAST.search(self.text)
        return json.loads(last[1])["error"]["message"] if last else ""

    @property
    def quarantined(self) -> bool:
        return self.status == 422 and json.loads(self.text)["error"]["code"] == "prompt_quarantined"


def ask(method: str, path: str, body: Any = None) -> bytes:
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    length = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n" if method == "POST" else ""
    return f"{method} {path} HTTP/1.1\r\nHost: engine\r\nAccept: */*\r\n{length}\r\n".encode() + data


VARIES = (      # from one answer to the next
    (rb"(?m)^date: .*\r\n", b""), (rb'"(created|id)":("[^"]*"|\d+)', rb'"\1":0'),
)


def exchanged(port: int, request: bytes) -> bytes:
    """The whole answer as it came over the wire, with the chunks' sizes, but for what differs each time."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=30)) as link, link.makefile("rb") as answer:
        link.sendall(request)
        head = b"".join(iter(answer.readline, b"\r\n"))
        length = re.search(rb"(?mi)^content-length: (\d+)", head)
        body = b""
        if re.search(rb"(?mi)^transfer-encoding: chunked", head):
            while not body.endswith(b"0\r\n\r\n"):
                line = answer.readline()
                body += line + answer.read(int(line, 16) + 2)
        elif length and not request.startswith(b"HEAD"):
            body = answer.read(int(length[1]))
    whole = head + b"\r\n" + body
    for pattern, same in VARIES:
        whole = re.sub(pattern, same, whole)
    return whole


OPENAI = """
import json, sys
import openai
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
asked = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8,
         "extra_body": {"ignore_eos": True}}
said = client.chat.completions.create(**asked)
stream = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
def error(**changed):
    try:
        client.chat.completions.create(**asked | changed)
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, bool(error.body["message"])]
print(json.dumps({
    "models": [model.id for model in client.models.list()],
    "tokens": [said.usage.completion_tokens, stream[-1].usage.completion_tokens], "finish": said.choices[0].finish_reason,
    "completion": client.completions.create(model="tiny", prompt="a", max_tokens=2).object,
    "errors": [error(model="other"), error(temperature=-1)],
}))
"""


BROKEN_OFF = """
import sys
import openai
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
try:
    stream = client.completions.create(model="tiny", prompt="a", max_tokens=int(sys.argv[2]), stream=True,
                                       extra_body={"ignore_eos": True})
    next(stream)
    print("begun", flush=True)
    for piece in stream:
        pass
except openai.APIError as error:
    print(type(error).__name__, bool(error.message))
"""


BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""     # what `vllm bench serve` runs; the command itself looks for a distribution that the CPU build calls differently
