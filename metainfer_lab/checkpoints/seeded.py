"""Checkpoints that specs name and no hub has: tiny models from a fixed seed, with a tokenizer.

Made once in the cache. The text that they answer with means nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from metainfer_lab.paths import MODELS, cache_dir

VERSION = 1  # raised when the made weights change
SEED = 36
FULL_SIZE = "seeded"  # as a spec's source: its own model, drawn from the seed
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
LETTERS = "etaoinshrdlcumwf"  # their pairs fill the vocabulary behind the bytes
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def fetch(name: str) -> Path:
    """The folder of a named source; made on the first call, in a second."""
    return _made_once(name, *SOURCES[name])


def fetch_full_size(model: str) -> Path:
    """A shipped model at full size; made on the first call, on the GPU where there is one."""
    import torch

    from metainfer_lab.checkpoints import fullsize

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def make(config: dict[str, Any], folder: Path) -> None:
        fullsize.write(config, SEED, folder, device, text_only=True)

    return _made_once(f"{model}-{FULL_SIZE}-{device}", model, make)


def _made_once(name: str, model: str, make: Callable[[dict[str, Any], Path], None]) -> Path:
    folder = cache_dir() / f"{name}-v{VERSION}"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
        made = Path(scratch) / "made"
        config = json.loads((MODELS / model / "config.json").read_text())
        make(config, made)
        shutil.copyfile(MODELS / model / "config.json", made / "config.json")
        write_tokenizer(made, config.get("text_config", config)["vocab_size"])
        try:
            os.rename(made, folder)
        except OSError:  # another process was faster, with the same bytes
            if not folder.is_dir():
                raise
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """tokenizer.json and tokenizer_config.json: special tokens, the bytes, pairs of letters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    byte_characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    room = vocab_size - len(SPECIAL) - len(byte_characters)
    merges = [(a, b) for a in LETTERS for b in LETTERS][:room]
    tokens = [*SPECIAL, *byte_characters, *(a + b for a, b in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": SPECIAL[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _dense(config: dict[str, Any], folder: Path) -> None:
    from metainfer_lab.checkpoints.tiny import tiny_checkpoint

    tiny_checkpoint(config["model_type"], SEED, folder, **config)


def _hybrid(config: dict[str, Any], folder: Path) -> None:
    from metainfer_lab.checkpoints.tiny_qwen36 import draw_tensors, write

    write(folder, config, draw_tensors(config, SEED), shards=1)


SOURCES: dict[str, tuple[str, Callable[[dict[str, Any], Path], None]]] = {
    "qwen3-tiny-seeded": ("qwen3-tiny", _dense),
    "qwen3.6-tiny-seeded": ("qwen3.6-tiny", _hybrid),
}
KNOWN: dict[str, Callable[[], Path]] = {name: partial(fetch, name) for name in SOURCES}
