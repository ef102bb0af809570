"""safetensors into named tensors, strictly: every expected tensor once, and no other."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from . import formats
from .config import Config

Shape = tuple[int, ...]
FLOATS = ("F32", "BF16", "F16")
UNUSED = ("model.visual.", "mtp.")  # vision and multi-token prediction: known, and no text from it
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Stored(NamedTuple):
    """A tensor on disk; dtypes: safetensors' words for those that it may have."""

    shape: Shape
    dtypes: tuple[str, ...]


def parameters(config: Config) -> dict[str, Shape]:
    """Name -> shape of every tensor that the model computes with, named as in the text model."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i, kind in enumerate(config.layer_types):
        mixer = _attention(config) if kind == "full_attention" else _delta_net(config)
        norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))
        layer = mixer | _mlp(config) | {f"{name}.weight": shape for name, shape in norms.items()}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _attention(config: Config) -> dict[str, Shape]:
    hidden, width = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
    return {
        "self_attn.q_proj.weight": (2 * queries, hidden),  # a head's query, then its gate
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (width,),
        "self_attn.k_norm.weight": (width,),
    }


def _delta_net(config: Config) -> dict[str, Shape]:
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    return {
        "linear_attn.in_proj_qkv.weight": (config.conv_dim, hidden),
        "linear_attn.in_proj_z.weight": (config.value_dim, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (config.conv_dim, 1, config.linear_conv_kernel_dim),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (config.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (hidden, config.value_dim),
    }


def _mlp(config: Config) -> dict[str, Shape]:
    hidden, experts, ffn = config.hidden_size, config.num_experts, config.moe_intermediate_size
    shared = config.shared_expert_intermediate_size
    return {
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj": (experts, 2 * ffn, hidden),  # an expert's gate, then its up
        "mlp.experts.down_proj": (experts, hidden, ffn),
        "mlp.shared_expert.gate_proj.weight": (shared, hidden),
        "mlp.shared_expert.up_proj.weight": (shared, hidden),
        "mlp.shared_expert.down_proj.weight": (hidden, shared),
        "mlp.shared_expert_gate.weight": (1, hidden),
    }


def modules(name: str, shape: Shape, config: Config) -> tuple[str | None, list[str], Shape]:
    """How a parameter is stored: (format, modules that it is made of, shape of each).

    Where it is not quantised the format is None and it is its own only part.
    """
    module, _, last = name.rpartition(".")
    form = config.quantised.get(module)
    if form is None:
        return None, [name], shape
    if last == "weight":
        return form, [module], shape
    experts, rows, width = shape
    parts = [f"{module}.{expert}.{part}" for expert in range(experts) for part in FUSED[last]]
    return form, parts, (rows // len(FUSED[last]), width)


def expected(config: Config) -> dict[str, Stored]:
    """Name on disk -> shape and dtype of every tensor."""
    on_disk: dict[str, Stored] = {}
    for name, shape in parameters(config).items():
        form, parts, part_shape = modules(name, shape, config)
        for part in parts:
            on_disk |= _stored(part, part_shape, form)
    return {_disk_name(name, config): stored for name, stored in on_disk.items()}


def _stored(part: str, shape: Shape, form: str | None) -> dict[str, Stored]:
    if form is None:
        return {part: Stored(shape, FLOATS)}
    rows, width = shape
    scalars = {f"{part}.input_scale": Stored((), ("F32",))}
    if form == "fp8":
        scalars[f"{part}.weight_scale"] = Stored((), ("F32",))
        return scalars | {f"{part}.weight": Stored(shape, ("F8_E4M3",))}
    scalars[f"{part}.weight_scale_2"] = Stored((), ("F32",))
    return scalars | {
        f"{part}.weight": Stored((rows, width // 2), ("U8",)),
        f"{part}.weight_scale": Stored((rows, width // formats.BLOCK), ("F8_E4M3",)),
    }


def _disk_name(name: str, config: Config) -> str:
    return name.replace("model.", config.prefix, 1) if name.startswith("model.") else name


def read(
    folder: Path, config: Config, device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The weights as `dtype` on `device`; ValueError names the tensor or the file at fault."""
    stored = expected(config)
    raw: dict[str, torch.Tensor] = {}
    for path in _files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    if _is_unused(name, config):
                        continue
                    _check(name, file, stored, raw)
                    raw[name] = file.get_tensor(name).to(device)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"checkpoint: {path.name} cannot be read ({error})") from error
    for name in stored:
        if name not in raw:
            raise ValueError(f"checkpoint: tensor {name} is missing")
    shapes = parameters(config)
    return {name: _value(name, shape, raw, config, dtype) for name, shape in shapes.items()}


def _value(
    name: str, shape: Shape, raw: dict[str, torch.Tensor], config: Config, dtype: torch.dtype
) -> torch.Tensor:
    form, parts, _ = modules(name, shape, config)
    if form is None:
        return raw[_disk_name(name, config)].to(dtype)
    values = []
    for part in (_disk_name(part, config) for part in parts):
        codes, scale = raw[f"{part}.weight"], raw[f"{part}.weight_scale"]
        if form == "fp8":
            values.append(formats.dequantise_fp8(codes, scale, dtype))
        else:
            global_scale = raw[f"{part}.weight_scale_2"]
            values.append(formats.dequantise_nvfp4(codes, scale, global_scale, dtype))
    return torch.cat(values).view(shape)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    names = json.loads(index.read_text())["weight_map"].values()
    return [folder / name for name in sorted(set(names))]


def _is_unused(name: str, config: Config) -> bool:
    """Known and without effect on text, or the head's copy of a tied embedding."""
    tied_head = config.tie_word_embeddings and name == "lm_head.weight"
    return tied_head or name.startswith(UNUSED)


def _check(name: str, file: safe_open, stored: dict[str, Stored], seen: dict[str, torch.Tensor]):
    if name not in stored:
        raise ValueError(
            f"checkpoint: tensor {name} is left over; this model has none of that name"
        )
    if name in seen:
        raise ValueError(f"checkpoint: tensor {name} is there twice")
    view, wanted = file.get_slice(name), stored[name]
    if tuple(view.get_shape()) != wanted.shape:
        shape = tuple(view.get_shape())
        raise ValueError(f"checkpoint: tensor {name} has shape {shape}, expected {wanted.shape}")
    if view.get_dtype() not in wanted.dtypes:
        found, allowed = view.get_dtype(), " or ".join(wanted.dtypes)
        raise ValueError(f"checkpoint: tensor {name} has dtype {found}, expected {allowed}")
