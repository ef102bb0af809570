"""Checkpoints as Hugging Face folders: fetched once, or made on the spot from a seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..errors import InputError
from ..paths import DATA
from ..spec import Spec
from . import seeded, smollm2

# Sources that need no model hub; every other name is a folder or a hub id.
KNOWN: dict[str, Callable[[], Path]] = {smollm2.NAME: smollm2.fetch, **seeded.KNOWN}


def fetch(spec: Spec) -> Path:
    """The folder (config.json, *.safetensors, tokenizer files) of a spec's checkpoint.

    A known source is made once in the cache; `seeded` is the spec's own model at full size, drawn
    from a seed; a folder is checked and returned; anything else is a hub id and goes through
    huggingface_hub. Raises InputError that names what is missing.
    """
    source = spec.checkpoint.source
    if source in KNOWN:
        return KNOWN[source]()
    if source == seeded.FULL_SIZE:
        return seeded.fetch_full_size(spec.model)
    folder = Path(source).expanduser()
    if folder.is_dir() or source.startswith((".", "/", "~")):
        return checked_folder(folder)
    return from_hub(source)


def checked_folder(folder: Path) -> Path:
    """The folder itself, when it holds a config and at least one readable safetensors file."""
    if not (folder / "config.json").is_file():
        raise InputError(f"checkpoint: {folder} has no config.json; give a Hugging Face folder")
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise InputError(f"checkpoint: {folder} has no *.safetensors file")
    for shard in shards:
        check_safetensors(shard)
    return folder


def check_safetensors(path: Path) -> None:
    """Raise InputError that names a file which is truncated or is no safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            return
    except (SafetensorError, OSError) as error:
        raise InputError(f"checkpoint: {path} cannot be read ({error}); fetch it again") from error


def from_hub(repo: str) -> Path:
    """Download a hub repository's config, tokenizer and safetensors files into the hub's cache."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(repo, allow_patterns=["*.json", "*.safetensors", "*.jinja"])
    except Exception as error:  # the hub client's errors share no base class
        reason = str(error).splitlines()[0]
        raise InputError(
            f"checkpoint: {repo!r} is no folder, and the hub did not give it ({reason}); "
            f"give a folder, or one of {sorted(KNOWN)} ({DATA.name}/specs shows which)"
        ) from error
    return checked_folder(Path(folder))
