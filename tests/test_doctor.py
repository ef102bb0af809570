"""A checkpoint's headers say what fits a model, in a folder and over HTTP, before any download."""

import http.server
import json
import re
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metainfer_lab.doctor import diagnose, doctor
from metainfer_lab.errors import InputError
from metainfer_lab.model import ModelDims, disk_tensors
from metainfer_lab.paths import MODELS
from metainfer_lab.spec import Spec

WIDTH = {"U8": 1, "F8_E4M3": 1, "F32": 4, "FLOAT": 2}


def headers_of(model: str) -> dict[str, Any]:
    """The headers that a right checkpoint of a model has."""
    headers, offset = {}, 0
    for name, stored in disk_tensors(ModelDims.load(model)).items():
        size = WIDTH[stored.dtype]
        for length in stored.shape:
            size *= length
        dtype = "BF16" if stored.dtype == "FLOAT" else stored.dtype
        headers[name] = {
            "dtype": dtype,
            "shape": list(stored.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    return headers


def write_shard(path: Path, headers: dict[str, Any]) -> None:
    """A safetensors file of zeros (sparse) with these headers."""
    blob = json.dumps(headers).encode()
    end = max((item["data_offsets"][1] for item in headers.values()), default=0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(blob)) + blob)
        file.truncate(8 + len(blob) + end)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A right folder of the tiny Qwen3, in two shards with an index."""
    (tmp_path / "config.json").write_text((MODELS / "qwen3-tiny" / "config.json").read_text())
    headers = headers_of("qwen3-tiny")
    names = sorted(headers)
    halves = {"a.safetensors": names[:20], "b.safetensors": names[20:]}
    for shard, part in halves.items():
        write_shard(tmp_path / shard, {name: headers[name] for name in part})
    weight_map = {name: shard for shard, part in halves.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_a_right_folder_fits(tiny):
    found = doctor(tiny, "qwen3-tiny-cpu")
    assert found.passed and found.groups["text"] == found.tensors == 47
    assert found.spec == "qwen3-tiny-cpu" and str(found).endswith("fits")
    assert doctor(tiny).passed


def test_nvidias_names_are_all_known_vision_and_mtp_among_them():
    headers = headers_of("qwen3.6-35b-a3b-nvfp4")
    dims = ModelDims.load("qwen3.6-35b-a3b-nvfp4")
    found = diagnose("nvidia", dims, dims, {"__metadata__": {}, **headers})
    assert found.passed and found.tensors == 124_468
    assert (found.groups["vision"], found.groups["mtp"]) == (333, 19)
    assert found.bytes == pytest.approx(23.41e9, rel=1e-3)
    text = {
        name: item
        for name, item in headers.items()
        if not name.startswith(("mtp.", "model.visual."))
    }
    assert diagnose("text only", dims, dims, text).passed


def test_missing_unknown_and_wrong_tensors_are_named():
    dims, headers = ModelDims.load("qwen3.6-35b-a3b-nvfp4"), headers_of("qwen3.6-35b-a3b-nvfp4")
    scale = "model.language_model.layers.3.mlp.experts.9.up_proj.input_scale"
    del headers[scale]
    headers["model.language_model.layers.3.mystery"] = headers["lm_head.weight"]
    headers["lm_head.weight_scale_2"] = headers["lm_head.weight_scale_2"] | {"shape": [1]}
    headers["lm_head.weight"] = headers["lm_head.weight"] | {"dtype": "BF16"}
    headers["model.language_model.layers.3.self_attn.k_proj.k_scale"] = headers[
        "lm_head.weight_scale_2"
    ]
    found = diagnose("broken", dims, dims, headers)
    assert found.missing == (scale,)
    assert found.unknown == ("model.language_model.layers.3.mystery",)
    assert found.wrong == ("lm_head.weight is BF16 [248320, 1024], needs U8 [248320, 1024]",)
    assert found.groups["unused"] == 1 and not found.passed
    assert str(found).endswith("does not fit")


def test_a_bf16_checkpoint_does_not_fit_the_mixed_spec():
    spec = Spec.load("qwen3.6-35b-a3b-nvfp4-h200")
    plain = ModelDims.load("qwen3.6-35b-a3b")
    found = diagnose("bf16", ModelDims.load(spec.model), plain, headers_of("qwen3.6-35b-a3b"))
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in found.unknown
    assert "model.language_model.layers.0.mlp.experts.0.up_proj.weight_scale" in found.missing


def test_another_models_config_is_told_apart(tiny):
    found = doctor(tiny, "qwen3-8b-bf16-h200")
    assert "hidden_size: 128 here, 4096 in the spec's model" in found.config


def test_a_tied_head_that_was_written_anyway_is_unused():
    dims, headers = ModelDims.load("smollm2-135m"), headers_of("smollm2-135m")
    headers["lm_head.weight"] = headers["model.embed_tokens.weight"]
    found = diagnose("tied", dims, dims, headers)
    assert found.passed and found.groups == {"text": 272, "unused": 1}


def test_bad_files_are_named(tiny):
    shard = tiny / "b.safetensors"
    whole = shard.read_bytes()
    for blob, message in [
        (whole[:-7], "b.safetensors: truncated"),
        (whole[:100], "b.safetensors: safetensors header unreadable"),
        (whole[:4], "b.safetensors: no safetensors header"),
        (b"<html>not found</html>" * 9, "b.safetensors: no safetensors header"),
        (struct.pack("<Q", 16) + b'{"w": {"s": [1]}', "header unreadable"),
        (struct.pack("<Q", 17) + b'{"w": {"s": [1]}}', "header without offsets"),
    ]:
        shard.write_bytes(blob)
        with pytest.raises(InputError, match=re.escape(message)):
            doctor(tiny)


def test_a_folder_without_weights_is_named():
    with pytest.raises(InputError, match=r"no \*\.safetensors file"):
        doctor(MODELS / "qwen3-8b")


class Hub(http.server.SimpleHTTPRequestHandler):
    """Files of one folder under /org/name/resolve/main/, by byte range, counting the bytes."""

    sent = 0
    root = Path()

    def do_GET(self) -> None:
        file = self.root / self.path.split("/resolve/main/")[-1]
        if not self.path.startswith("/org/tiny/") or not file.is_file():
            self.send_error(404)
            return
        blob, status = file.read_bytes(), 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted:
            blob, status = blob[int(wanted[1]) : int(wanted[2]) + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(blob)))
        self.end_headers()
        self.wfile.write(blob)
        Hub.sent += len(blob)

    def log_message(self, *_: Any) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def hub(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The tiny folder behind an address that the hub client takes for the hub."""
    from huggingface_hub import constants

    Hub.root, Hub.sent = tiny, 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    address = f"http://127.0.0.1:{server.server_port}"
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield tiny
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_remote_checkpoint_is_read_by_its_headers_alone(hub):
    found = doctor("org/tiny", "qwen3-tiny-cpu")
    assert found.passed and found.tensors == 47
    weights = sum(path.stat().st_size for path in hub.glob("*.safetensors"))
    assert Hub.sent < 20_000 < weights


def test_a_remote_single_file_is_read_too(hub):
    for path in hub.glob("*.safetensors*"):
        path.unlink()
    write_shard(hub / "model.safetensors", headers_of("qwen3-tiny"))
    assert doctor("org/tiny").passed


def test_an_absent_or_unreachable_repository_is_named(hub, monkeypatch):
    from huggingface_hub import constants

    with pytest.raises(InputError, match=r"hub org/other: no config\.json there"):
        doctor("org/other")
    dead = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", dead)
    with pytest.raises(InputError, match="hub org/tiny: not reachable"):
        doctor("org/tiny")
