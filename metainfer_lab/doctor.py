"""What is in a checkpoint, before it is loaded or even downloaded: tensors known, unknown, missing.

Only config.json and the headers of the safetensors files are read, from a folder or the hub.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from metainfer_lab import hub
from metainfer_lab.errors import InputError
from metainfer_lab.model import ModelDims, Stored, disk_tensors
from metainfer_lab.spec import Spec

MAX_HEADER = 100 << 20
SHOWN = 3
# Stored by some exporters and implied by the rest: named here, so that nothing else may be left.
UNUSED_SUFFIXES = (".rotary_emb.inv_freq", ".k_scale", ".v_scale")
ReadPart = Callable[[str, int, int], bytes]


class Diagnosis(BaseModel):
    """A checkpoint held against a model: counts, and every tensor that does not belong.

    groups: known tensors by kind (text, vision, mtp, unused); wrong: name, found and expected.
    """

    model_config = ConfigDict(frozen=True)

    source: str
    spec: str | None
    model: str
    parameters: int
    tensors: int
    bytes: int
    groups: dict[str, int]
    config: tuple[str, ...]
    unknown: tuple[str, ...]
    missing: tuple[str, ...]
    wrong: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the checkpoint has what the model needs and nothing that nobody knows."""
        return not (self.config or self.unknown or self.missing or self.wrong)

    def __str__(self) -> str:
        known = ", ".join(f"{count} {group}" for group, count in self.groups.items() if count)
        lines = [
            f"{self.source}: {self.tensors:,} tensors, {self.bytes / 1e9:.3f} GB, held against "
            f"{self.model} ({self.parameters:,} parameters)",
            f"  known: {known or 'none'}",
        ]
        for kind in ("config", "unknown", "missing", "wrong"):
            names = getattr(self, kind)
            if names:
                lines.append(f"  {kind}: {len(names)}: {_some(names)}")
        return "\n".join([*lines, f"  {'fits' if self.passed else 'does not fit'}"])


def doctor(source: str | Path, spec: Spec | str | None = None) -> Diagnosis:
    """Read a checkpoint's headers (folder or hub id) and say what fits a spec, or its own config.

    Raises InputError that names a file which is absent, truncated or no safetensors file.
    """
    folder = Path(source)
    if folder.exists():
        config, headers = ModelDims.from_config(folder), _folder_headers(folder)
    else:
        config, headers = ModelDims.load(str(source)), _hub_headers(str(source))
    resolved = Spec.load(spec) if isinstance(spec, str) else spec
    dims = config if resolved is None else ModelDims.load(resolved.model)
    return diagnose(str(source), dims, config, headers, resolved.id if resolved else None)


def diagnose(
    source: str,
    dims: ModelDims,
    config: ModelDims,
    headers: dict[str, Any],
    spec: str | None = None,
) -> Diagnosis:
    """Compare a checkpoint's headers (name -> dtype, shape, offsets) with a model's tensors."""
    expected = disk_tensors(dims)
    found = {name: header for name, header in headers.items() if name != "__metadata__"}
    unused = {name for name in found if name not in expected and _is_unused(name, dims)}
    return Diagnosis(
        source=source,
        spec=spec,
        model=dims.name,
        parameters=dims.parameter_count(),
        tensors=len(found),
        bytes=sum(item["data_offsets"][1] - item["data_offsets"][0] for item in found.values()),
        groups=dict(Counter(_group(name) for name in found if name in expected))
        | {"unused": len(unused)},
        config=tuple(_differences(dims, config)),
        unknown=tuple(sorted(found.keys() - expected.keys() - unused)),
        missing=tuple(sorted(_needed(expected) - found.keys())),
        wrong=tuple(_wrong(found, expected)),
    )


def _differences(dims: ModelDims, config: ModelDims) -> Iterable[str]:
    """Fields in which the checkpoint's config departs from the spec's model."""
    skipped = {"name", "quantised_layers", "vision", "mtp_layers", "max_position_embeddings"}
    for field in [name for name in ModelDims.model_fields if name not in skipped]:
        ours, theirs = getattr(dims, field), getattr(config, field)
        if ours != theirs:
            yield f"{field}: {theirs} here, {ours} in the spec's model"


def _group(name: str) -> str:
    if name.startswith("mtp."):
        return "mtp"
    return "vision" if name.startswith("model.visual.") else "text"


def _needed(expected: dict[str, Stored]) -> set[str]:
    """A text engine needs the text tensors; vision and MTP may be absent."""
    return {name for name in expected if _group(name) == "text"}


def _is_unused(name: str, dims: ModelDims) -> bool:
    tied = name == "lm_head.weight" and dims.tie_word_embeddings
    return tied or name.endswith(UNUSED_SUFFIXES)


def _wrong(found: dict[str, Any], expected: dict[str, Stored]) -> Iterable[str]:
    for name in sorted(found.keys() & expected.keys()):
        shape, dtype, stored = tuple(found[name]["shape"]), found[name]["dtype"], expected[name]
        # A ModelOpt scalar is written as [] or [1]; both hold the one number.
        same = shape == stored.shape or (stored.shape == () and shape == (1,))
        if not (same and stored.accepts(dtype)):
            yield f"{name} is {dtype} {list(shape)}, needs {stored.dtype} {list(stored.shape)}"


def _folder_headers(folder: Path) -> dict[str, Any]:
    folder = folder if folder.is_dir() else folder.parent
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise InputError(f"{folder}: no *.safetensors file; give a checkpoint folder or a hub id")
    headers: dict[str, Any] = {}
    for shard in shards:
        header = _header(shard.name, _file_part(folder))
        end = max((item["data_offsets"][1] for item in _entries(header)), default=0)
        length = _header_length(shard.name, _file_part(folder))
        if shard.stat().st_size < 8 + length + end:
            raise InputError(
                f"{shard}: truncated: fewer bytes than its header says; fetch it again"
            )
        headers |= header
    return headers


def _hub_headers(repo: str) -> dict[str, Any]:
    def part(file: str, start: int, count: int) -> bytes:
        return hub.read_range(repo, file, start, count)

    try:
        return _header("model.safetensors", part)
    except FileNotFoundError:
        index = hub.read_json(repo, "model.safetensors.index.json")
    headers: dict[str, Any] = {}
    for shard in sorted(set(index.get("weight_map", {}).values())):
        headers |= _header(shard, part)
    return headers


def _file_part(folder: Path) -> ReadPart:
    def part(file: str, start: int, count: int) -> bytes:
        with (folder / file).open("rb") as stream:
            stream.seek(start)
            return stream.read(count)

    return part


def _header_length(file: str, part: ReadPart) -> int:
    prefix = part(file, 0, 8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= MAX_HEADER:
        raise InputError(f"{file}: no safetensors header; fetch the file again")
    return length


def _header(file: str, part: ReadPart) -> dict[str, Any]:
    """The JSON header of a safetensors file: 8 bytes of its length, then name -> description."""
    blob = part(file, 8, _header_length(file, part))
    try:
        header = json.loads(blob)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise InputError(f"{file}: safetensors header unreadable; fetch the file again") from None
    if not all("data_offsets" in item for item in _entries(header)):
        raise InputError(f"{file}: safetensors header without offsets; fetch the file again")
    return header


def _entries(header: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for name, item in header.items() if name != "__metadata__"]


def _some(names: tuple[str, ...]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest
