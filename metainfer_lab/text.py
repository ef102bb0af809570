"""Text on both ends of an engine: tokenizer, chat template, incremental detokenisation, stops."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    import tokenizers

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}
INCOMPLETE = "�"  # what a decoder prints for bytes that are not yet a whole character


class Tokenizer:
    """A checkpoint folder's tokenizer.json and chat template."""

    def __init__(self, folder: Path, tokenizer: tokenizers.Tokenizer, settings: dict[str, Any]):
        self.folder = folder
        self.tokenizer = tokenizer
        self.settings = settings

    @classmethod
    def open(cls, folder: Path | str) -> Tokenizer:
        """Read a checkpoint folder; InputError names the file that is missing."""
        import tokenizers

        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"tokenizer: {path} is missing; the checkpoint cannot speak text")
        settings = _read_json(folder / "tokenizer_config.json")
        return cls(folder, tokenizers.Tokenizer.from_file(str(path)), settings)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens written out in it are recognised, none is added."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of token ids; special tokens only where asked for."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=not special)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end an answer: of generation_config.json, config.json and the tokenizer."""
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = _read_json(self.folder / name).get("eos_token_id")
            found.update([value] if isinstance(value, int) else value or [])
        token = self.settings.get("eos_token")
        identity = self.tokenizer.token_to_id(_token_text(token)) if token else None
        return frozenset(found if identity is None else found | {identity})

    @cached_property
    def chat_template(self) -> str:
        """The Jinja chat template, from tokenizer_config.json or chat_template.jinja."""
        if template := self.settings.get("chat_template"):
            return template
        path = self.folder / "chat_template.jinja"
        if not path.is_file():
            raise InputError(f"chat: {self.folder.name} has no chat template; give token ids")
        return path.read_text()

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt text of a conversation, opened for the assistant's turn."""
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        special = {
            name: _token_text(self.settings[name])
            for name in ("bos_token", "eos_token")
            if self.settings.get(name)
        }
        template = environment.from_string(self.chat_template)
        return template.render(messages=list(messages), add_generation_prompt=True, **special)

    def chat(self, messages: Sequence[Message] | str) -> list[int]:
        """Token ids of a conversation; a plain string is one user message."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.encode(self.render(messages))

    def stream(self, stop: Sequence[str] = ()) -> Stream:
        """An incremental detokeniser for one answer."""
        return Stream(self, stop)


class Stream:
    """Turns token ids into text piece by piece: whole characters only, never past a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self.tokenizer = tokenizer
        self.stop = [s for s in stop if s]
        self.stopped = False
        self._ids: list[int] = []
        self._shown_ids = 0  # ids whose text is out; decoding starts here, so a push stays cheap
        self._pending = ""  # text that may be the beginning of a stop string

    def push(self, token: int) -> str:
        """The text that became certain with one more token, often empty."""
        if self.stopped:
            return ""
        self._ids.append(token)
        before = self.tokenizer.decode(self._ids[self._context() : self._shown_ids])
        after = self.tokenizer.decode(self._ids[self._context() :])
        if after.endswith(INCOMPLETE):
            return ""
        self._shown_ids = len(self._ids)
        return self._release(after[len(before) :])

    def flush(self) -> str:
        """What was held back, once no more tokens come."""
        if self.stopped:
            return ""
        tail = self.tokenizer.decode(self._ids[self._shown_ids :])
        self._shown_ids = len(self._ids)
        text = self._release(tail) + self._pending
        self._pending = ""
        return text

    def _context(self) -> int:
        # A few ids before the new ones: a decoder's output for a token can depend on the last one.
        return max(0, self._shown_ids - 4)

    def _release(self, text: str) -> str:
        self._pending += text
        ends = [at for s in self.stop if (at := self._pending.find(s)) >= 0]
        if ends:
            self.stopped = True
            return self._pending[: min(ends)]
        keep = max((_overlap(self._pending, s) for s in self.stop), default=0)
        cut = len(self._pending) - keep
        out, self._pending = self._pending[:cut], self._pending[cut:]
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest ending of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def _token_text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}
