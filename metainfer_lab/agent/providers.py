"""Where replies come from: transports under the Anthropic SDK's own client.

The SDK is always the client. `replay` answers from a recorded transcript, `file` from a folder in
which an author puts one reply at a time, `anthropic` is the API itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import httpx2
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from metainfer_lab.agent.prompts import readable_request
from metainfer_lab.agent.transcript import Line
from metainfer_lab.paths import write_atomic
from metainfer_lab.spec import explain

if TYPE_CHECKING:
    import anthropic

Event = dict[str, Any]
POLL_S = 0.5
SETTLED_S = 1.0  # a reply younger than this may still be being written
# The SDK's stream cannot take null; the record stores null where no API said a usage.
NO_USAGE = {"input_tokens": 0, "output_tokens": 0}
DELTAS = {"text": ("text", "text_delta"), "thinking": ("thinking", "thinking_delta")}


def client(transport: httpx2.BaseTransport) -> anthropic.Anthropic:
    """The SDK's client over a transport that needs neither key nor network."""
    from anthropic import Anthropic, DefaultHttpxClient

    http = DefaultHttpxClient(transport=transport)
    return Anthropic(
        api_key="none", http_client=http, max_retries=0, base_url="http://transport.invalid"
    )


def stream_events(reply: dict[str, Any]) -> Iterator[Event]:
    """A reply ({content, stop_reason, model, usage?}) as the events of the API's stream."""
    usage = reply.get("usage", NO_USAGE)
    message = {"id": "msg_local", "type": "message", "role": "assistant", "model": reply["model"]}
    empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield {"type": "message_start", "message": message | empty}
    for index, block in enumerate(reply["content"]):
        yield from _block_events(index, block)
    delta = {"stop_reason": reply["stop_reason"], "stop_sequence": None}
    yield {
        "type": "message_delta",
        "delta": delta,
        "usage": {"output_tokens": usage["output_tokens"]},
    }
    yield {"type": "message_stop"}


def _block_events(index: int, block: dict[str, Any]) -> Iterator[Event]:
    start, deltas = dict(block), []
    if block["type"] == "tool_use":
        start["input"] = {}
        deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    elif block["type"] in DELTAS:
        field, kind = DELTAS[block["type"]]
        start[field] = ""
        deltas = [{"type": kind, field: block[field]}]
        if "signature" in block:
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
    yield {"type": "content_block_start", "index": index, "content_block": start}
    for delta in deltas:
        yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}


def stream_response(reply: dict[str, Any]) -> httpx2.Response:
    """A reply as the HTTP response that the SDK's stream reads."""
    text = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in stream_events(reply))
    headers = {"content-type": "text/event-stream"}
    return httpx2.Response(200, headers=headers, content=text.encode())


class ReplayTransport(httpx2.BaseTransport):
    """Answers request k with the k-th recorded reply."""

    def __init__(self, replies: Sequence[Line], turn: Callable[[], int]) -> None:
        self.replies, self.turn = replies, turn

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        line = self.replies[self.turn()]
        model = json.loads(request.content)["model"]
        return stream_response(
            {"content": line.blocks, "stop_reason": line.stop_reason, "model": line.model or model}
        )


class NoTransport(httpx2.BaseTransport):
    """Under the client of a run that asks nobody: one that adopts what was written elsewhere."""

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        raise RuntimeError("this run has no author to ask")


class _Text(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str = Field(min_length=1)


class _ToolUse(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["tool_use"]
    name: str
    input: dict[str, Any]
    id: str | None = None


Content = Annotated[
    list[Annotated[_Text | _ToolUse, Field(discriminator="type")]], Field(min_length=1)
]


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")

    content: Content
    stop_reason: Literal["end_turn", "tool_use", "max_tokens", "refusal"] | None = None


def parse_reply(text: str, number: int) -> dict[str, Any]:
    """An author's JSON (a list of blocks, or {content, stop_reason}) as a whole reply.

    ValueError says in one line what is wrong with it.
    """
    try:
        data = json.loads(text)
        reply = TypeAdapter(_Reply).validate_python(
            {"content": data} if isinstance(data, list) else data
        )
    except ValidationError as error:
        raise ValueError(explain(error)) from None
    content = [block.model_dump(exclude_none=True) for block in reply.content]
    calls = [block for block in content if block["type"] == "tool_use"]
    for index, block in enumerate(calls):
        block["id"] = f"toolu_{number:04d}_{index:02d}"
    reason = reply.stop_reason or ("tool_use" if calls else "end_turn")
    return {"content": content, "stop_reason": reason}


class FileTransport(httpx2.BaseTransport):
    """Writes each request into a folder and waits for the author's reply beside it.

    turn: number of replies so far, so that a request asked again after a kill keeps its number, and
    an answer that already lies there is taken. prepare: called before each request is written.
    """

    def __init__(self, folder: Path, turn: Callable[[], int], prepare: Callable[[], None]) -> None:
        self.folder, self.turn, self.prepare = folder, turn, prepare

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        body, number = json.loads(request.content), self.turn() + 1
        self.prepare()
        write_atomic(self.folder / f"request-{number:04d}.md", readable_request(body, number))
        write_atomic(self.folder / f"request-{number:04d}.json", json.dumps(body, indent=1))
        return stream_response(self._wait(number) | {"model": body["model"]})

    def _wait(self, number: int) -> dict[str, Any]:
        path = self.folder / f"reply-{number:04d}.json"
        while True:
            if path.is_file() and time.time() - path.stat().st_mtime > SETTLED_S:
                try:
                    return parse_reply(path.read_text(), number)
                except ValueError as error:
                    self._reject(path, str(error))
            time.sleep(POLL_S)

    def _reject(self, path: Path, reason: str) -> None:
        """Put a malformed reply aside and say why; the author writes it again."""
        count = len(list(self.folder.glob(f"{path.stem}.rejected-*.json"))) + 1
        path.replace(path.with_name(f"{path.stem}.rejected-{count}.json"))
        text = f"{path.name} was not taken: {reason}\nCorrect it and write {path.name} again.\n"
        write_atomic(path.with_suffix(".error.txt"), text)
