"""Strict reading of safetensors: what the config expects is compared with what the files hold."""

from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .config import LINEAR, Config, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F32", "BF16", "F16")
UNREAD = ("model.visual.", "mtp.")  # vision and multi-token prediction


def _linear_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Tensors of a linear_attention layer."""
    hidden, heads = c.hidden_size, c.linear_num_value_heads
    shapes = {
        "in_proj_qkv.weight": (c.conv_dim, hidden),
        "in_proj_z.weight": (c.value_dim, hidden),
        "in_proj_a.weight": (heads, hidden),
        "in_proj_b.weight": (heads, hidden),
        "conv1d.weight": (c.conv_dim, 1, c.linear_conv_kernel_dim),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (c.linear_value_head_dim,),
        "out_proj.weight": (hidden, c.value_dim),
    }
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def _full_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Tensors of a full_attention layer."""
    query, key = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes = {
        "q_proj": (2 * query, c.hidden_size),
        "k_proj": (key, c.hidden_size),
        "v_proj": (key, c.hidden_size),
        "o_proj": (c.hidden_size, query),
        "q_norm": (c.head_dim,),
        "k_norm": (c.head_dim,),
    }
    return {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}


def _common_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Tensors of every layer: its two norms and its experts."""
    hidden, shared = c.hidden_size, c.shared_expert_intermediate_size
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate.weight": (c.num_experts, hidden),
        "mlp.experts.gate_up_proj": (c.num_experts, 2 * c.moe_intermediate_size, hidden),
        "mlp.experts.down_proj": (c.num_experts, hidden, c.moe_intermediate_size),
        "mlp.shared_expert.gate_proj.weight": (shared, hidden),
        "mlp.shared_expert.up_proj.weight": (shared, hidden),
        "mlp.shared_expert.down_proj.weight": (hidden, shared),
        "mlp.shared_expert_gate.weight": (1, hidden),
    }


def expected_tensors(c: Config) -> dict[str, tuple[int, ...]]:
    """Full name -> shape of every tensor that the text model has."""
    shapes = {
        f"{c.prefix}embed_tokens.weight": (c.vocab_size, c.hidden_size),
        f"{c.prefix}norm.weight": (c.hidden_size,),
    }
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    for i, kind in enumerate(c.layer_types):
        mixer = _linear_shapes(c) if kind == LINEAR else _full_shapes(c)
        for name, shape in (_common_shapes(c) | mixer).items():
            shapes[f"{c.prefix}layers.{i}.{name}"] = shape
    return shapes


def _file_names(folder: Path) -> dict[str, list[str]]:
    """File -> names that the index says are in it (none without an index)."""
    if (folder / SINGLE).exists():
        return {SINGLE: []}
    if not (folder / INDEX).exists():
        raise ValueError(f"{SINGLE} is missing")
    placed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(placed, dict):
        raise ValueError(f"{INDEX} has no weight_map")
    files: dict[str, list[str]] = {}
    for tensor, file in placed.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{INDEX} places {tensor} in {file!r}, which is no file name")
        files.setdefault(file, []).append(tensor)
    return files


class Checkpoint:
    """The open files of a checkpoint, checked against a config. A context manager."""

    def __init__(self, folder: Path, config: Config) -> None:
        """Open and check everything; ValueError names the tensor or file at fault."""
        self._prefix = config.prefix
        self._tied = config.tie_word_embeddings
        self._stack = ExitStack()
        self._home: dict[str, object] = {}  # tensor name -> the open file that holds it
        with ExitStack() as guard:
            guard.push(self._stack)
            for file, names in _file_names(folder).items():
                self._open(folder / file, names)
            self._compare(expected_tensors(config))
            guard.pop_all()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *problem: object) -> None:
        self._home.clear()
        self._stack.close()

    def _open(self, path: Path, names: list[str]) -> None:
        """Open one file and note what it holds; `names` must be among it."""
        if not path.is_file():
            raise ValueError(f"{path.name} is missing")
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            held = list(file.keys())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path.name} is not a whole safetensors file: {error}") from None
        for name in held:
            if name in self._home:
                raise ValueError(f"tensor {name} is in two files")
            self._home[name] = file
        for name in names:
            if self._home.get(name) is not file:
                raise ValueError(f"tensor {name} is missing in {path.name}")

    def _ignored(self, name: str) -> bool:
        """Whether a tensor that is not expected may be there, unread."""
        tied_head = self._tied and name == "lm_head.weight"
        return tied_head or name.startswith(UNREAD) or name.endswith(".rotary_emb.inv_freq")

    def _compare(self, expected: dict[str, tuple[int, ...]]) -> None:
        """Missing, left-over, shape and dtype, before anything is read."""
        for name in expected:
            if name not in self._home:
                raise ValueError(f"tensor {name} is missing")
        for name in self._home:
            if name not in expected and not self._ignored(name):
                raise ValueError(f"tensor {name} is not of this model")
        for name, shape in expected.items():
            found = self._home[name].get_slice(name)
            if tuple(found.get_shape()) != shape:
                raise ValueError(f"tensor {name} has shape {found.get_shape()}, not {list(shape)}")
            if found.get_dtype() not in FLOATS:
                raise ValueError(f"tensor {name} has dtype {found.get_dtype()}")

    def take(self, name: str) -> torch.Tensor:
        """A float32 copy of one tensor; `name` is its full name."""
        return self._home[name].get_tensor(name).to(torch.float32, copy=True)

    def text(self, name: str) -> torch.Tensor:
        """A float32 copy of a tensor of the text model; `name` is below its prefix."""
        return self.take(self._prefix + name)

    def rows(self, *names: str) -> torch.Tensor:
        """Matrices [out_i, in] of the text model as one, [sum of out_i, in]."""
        return torch.cat([self.text(name) for name in names])
