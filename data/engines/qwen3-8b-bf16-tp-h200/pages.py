"""Pages of the KV cache: who holds which, and which full ones may serve another prompt.

A full page is known by the digest of all tokens up to its end. A page that nobody holds keeps its
contents, and stays findable, until it is the one that was released longest ago and a new page is
needed.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from .config import PAGE


def page_digests(tokens: Sequence[int], known: list[bytes]) -> list[bytes]:
    """`known` continued to all full pages of `tokens`; a digest covers its page and all before."""
    digests = list(known)
    for at in range(len(digests) * PAGE, len(tokens) - PAGE + 1, PAGE):
        before = digests[-1] if digests else b""
        page = np.asarray(tokens[at : at + PAGE], np.int64).tobytes()
        digests.append(hashlib.blake2b(before + page, digest_size=16).digest())
    return digests


class PagePool:
    """Pages 1..pages-1; page 0 is scratch and never given out."""

    def __init__(self, pages: int):
        self.holders = [0] * pages
        self._idle = OrderedDict.fromkeys(range(1, pages))  # released longest ago first
        self._digest_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def used(self) -> int:
        return len(self.holders) - 1 - len(self._idle)

    def can_allocate(self, count: int, shared: Iterable[int] = ()) -> bool:
        """Whether `count` new pages are there once the idle ones among `shared` are held."""
        return count <= len(self._idle) - sum(page in self._idle for page in shared)

    def allocate(self) -> int:
        """The page that was released longest ago; what it held is forgotten."""
        page, _ = self._idle.popitem(last=False)
        digest = self._digest_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]
        assert self.holders[page] == 0
        self.holders[page] = 1
        return page

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """Pages of the longest known prefix."""
        pages = []
        for digest in digests:
            if digest not in self._page_of:
                break
            pages.append(self._page_of[digest])
        return pages

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._idle.pop(page, None)
            self.holders[page] += 1

    def publish(self, page: int, digest: bytes) -> None:
        """Makes a full page findable; the first one with this digest stays the one found."""
        if digest not in self._page_of and page not in self._digest_of:
            self._digest_of[page], self._page_of[digest] = digest, page

    def release(self, pages: Sequence[int]) -> None:
        """Gives back a sequence's pages, the last first: its beginning is the likeliest to be
        shared.
        """
        for page in reversed(pages):
            self.holders[page] -= 1
            assert self.holders[page] >= 0
            if self.holders[page] == 0:
                self._idle[page] = None
