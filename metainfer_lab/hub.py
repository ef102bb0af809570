"""Parts of files on the model hub, so that headers are read before gigabytes are downloaded."""

from __future__ import annotations

import json
from typing import Any

from metainfer_lab.errors import InputError


def read_range(repo: str, file: str, start: int = 0, count: int | None = None) -> bytes:
    """Bytes [start, start + count) of a file of a hub repository's main branch; all for None.

    Uses the hub client's session, endpoint and token. Raises FileNotFoundError for an absent
    file, InputError where the hub is out of reach or says no.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import build_hf_headers, get_session

    headers = build_hf_headers()
    if count is not None:
        headers["Range"] = f"bytes={start}-{start + count - 1}"
    try:
        reply = get_session().get(hf_hub_url(repo, file), headers=headers)
    except (HTTPError, ValueError) as error:
        raise InputError(
            f"hub {repo}: not reachable ({error}); check the network or give a folder"
        ) from None
    if reply.status_code == 404:
        raise FileNotFoundError(f"{repo}/{file}")
    if reply.status_code not in {200, 206}:
        raise InputError(f"hub {repo}: {file}: HTTP {reply.status_code}; check the id and HF_TOKEN")
    body = reply.content
    return body if reply.status_code == 206 or count is None else body[start : start + count]


def read_json(repo: str, file: str) -> dict[str, Any]:
    """A small JSON file of a hub repository; InputError where it is absent or no JSON object."""
    try:
        value = json.loads(read_range(repo, file))
    except FileNotFoundError:
        raise InputError(f"hub {repo}: no {file} there; check the id") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise InputError(f"hub {repo}: {file} is not JSON; check the id") from None
    if not isinstance(value, dict):
        raise InputError(f"hub {repo}: {file} is not a JSON object; check the id")
    return value
