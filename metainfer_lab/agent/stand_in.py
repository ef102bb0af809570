"""A local server that speaks the Messages API: scripted replies, streamed, failures included.

It stands in for the API where there is none: the wire tests, and a notebook without a key.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from metainfer_lab.agent.providers import stream_events
from metainfer_lab.agent.tools import calls, creations

USAGE = {"input_tokens": 1000, "output_tokens": 200}


@dataclass(frozen=True)
class Refuse:
    """Answer with an HTTP error: status, error type, headers such as retry-after."""

    status: int
    kind: str
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "said by the stand-in"


@dataclass(frozen=True)
class Drop:
    """Send the first `events` events of a reply, then an error of a kind, or close the
    connection."""

    reply: dict[str, Any]
    events: int = 3
    kind: str | None = None


@dataclass(frozen=True)
class Garble:
    """Send a reply whose tool inputs are no JSON."""

    reply: dict[str, Any]


Answer = dict[str, Any] | Refuse | Drop | Garble
Script = Sequence[Answer] | Callable[[dict[str, Any]], Answer]


@dataclass
class StandIn:
    """The running server: its address, what it answers instead of counting tokens (one call each),
    and every request's path, headers and body."""

    url: str
    uncounted: list[Refuse] = field(default_factory=list)
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)

    @property
    def asked(self) -> list[dict[str, Any]]:
        """Bodies of the calls for a message, in order."""
        return [body for path, _, body in self.requests if path == "/v1/messages"]


def writes(files: Mapping[str, str], then: str, **given: Any) -> dict[str, Any]:
    """A reply that creates files (name -> text) and then calls one tool."""
    content = calls([*creations(files), (then, given)])
    return {"content": content, "stop_reason": "tool_use"}


@contextmanager
def stand_in(script: Script) -> Iterator[StandIn]:
    """Serve a script: a sequence, one answer a call, or a function of the request's body."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    known = StandIn(f"http://127.0.0.1:{server.server_address[1]}")
    server.known, server.script = known, script  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield known
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        known: StandIn = self.server.known  # type: ignore[attr-defined]
        path = self.path.partition("?")[0]
        headers = {name.lower(): value for name, value in self.headers.items()}
        known.requests.append((path, headers, body))
        if path.endswith("count_tokens"):
            self._count(known, body)
            return
        script = self.server.script  # type: ignore[attr-defined]
        answer = script(body) if callable(script) else script[len(known.asked) - 1]
        match answer:
            case Refuse():
                self._refuse(answer)
            case Drop(reply, events, kind):
                self._stream(reply, body, events)
                if kind:
                    self.wfile.write(
                        f"event: error\ndata: {_error(kind, 'broken off')}\n\n".encode()
                    )
                self.close_connection = True
            case Garble(reply):
                self._stream(reply, body, garbled=True)
            case _:
                self._stream(answer, body)

    def _count(self, known: StandIn, body: dict[str, Any]) -> None:
        if known.uncounted:
            self._refuse(known.uncounted.pop(0))
        else:
            self._send(200, json.dumps({"input_tokens": len(json.dumps(body)) // 4}), {})

    def _refuse(self, why: Refuse) -> None:
        self._send(why.status, _error(why.kind, why.message), why.headers)

    def _stream(
        self,
        reply: dict[str, Any],
        body: dict[str, Any],
        most: int | None = None,
        garbled: bool = False,
    ) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        # a length that is never reached makes a dropped stream a broken one, not a short one
        events = list(stream_events({"model": body["model"], "usage": USAGE, **reply}))
        for delta in (e["delta"] for e in events if garbled and "delta" in e):
            if "partial_json" in delta:
                delta["partial_json"] = "{'path': " + delta["partial_json"]
        texts = [f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in events]
        self.send_header("content-length", str(sum(map(len, texts))))
        self.end_headers()
        for text in texts[:most]:
            self.wfile.write(text)

    def _send(self, status: int, text: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"content-type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on the console."""


def _error(kind: str, message: str) -> str:
    return json.dumps({"type": "error", "error": {"type": kind, "message": message}})
