"""Every parameter tensor of a model, with its module class: the base of all counts and bytes.

Names and shapes are those of transformers (weights [out, in], experts fused); they were checked
against the models themselves built on the meta device (tests).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from metainfer_lab.model.config import GdnDims, ModelDims, MoeDims, VisionDims

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """A parameter: role is a module class of the spec, or `vision` or `mtp`; layer or None."""

    name: str
    shape: Shape
    role: str
    layer: int | None = None

    @property
    def size(self) -> int:
        """Number of weights."""
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether a token's hidden state is multiplied by it (2 operations a weight)."""
        stacked = self.role == "routed_experts"
        return self.role != "embedding" and len(self.shape) == (3 if stacked else 2)

    @property
    def module(self) -> str:
        """The module that a quantisation map names; the experts of a layer are one."""
        if self.role == "routed_experts":
            return self.name.rpartition(".")[0]
        return self.name.removesuffix(".weight")

    @property
    def projections(self) -> dict[str, slice]:
        """Of fused experts: projection -> its rows in [experts, rows, in]; gate comes before up."""
        rows = self.shape[1]
        if self.name.endswith("down_proj"):
            return {"down_proj": slice(0, rows)}
        return {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}

    def parts(self) -> Iterator[tuple[str, slice, int | None]]:
        """(module, its rows, its expert) of what a quantised checkpoint stores by itself."""
        if self.role != "routed_experts":
            yield self.module, slice(None), None
            return
        for expert in range(self.shape[0]):
            for projection, rows in self.projections.items():
                yield f"{self.module}.{expert}.{projection}", rows, expert


def inventory(dims: ModelDims) -> tuple[Tensor, ...]:
    """All parameter tensors of the checkpoint, in order: text, vision, MTP."""
    return (*_text(dims), *_vision(dims.vision), *_mtp(dims))


def text_prefix(dims: ModelDims) -> str:
    """What the text model's tensors start with; a multimodal wrapper adds a level."""
    return "model.language_model." if dims.wrapped else "model."


def _text(dims: ModelDims) -> Iterator[Tensor]:
    prefix, table = text_prefix(dims), (dims.vocab_size, dims.hidden_size)
    # A tied matrix is read whole for every token: it is the head, and its lookup costs a row.
    role = "head" if dims.tie_word_embeddings else "embedding"
    yield Tensor(f"{prefix}embed_tokens.weight", table, role)
    for layer, kind in enumerate(dims.layer_types):
        yield from _layer(dims, f"{prefix}layers.{layer}.", kind, layer)
    yield Tensor(f"{prefix}norm.weight", (dims.hidden_size,), "small")
    if not dims.tie_word_embeddings:
        yield Tensor("lm_head.weight", table, "head")


def _layer(dims: ModelDims, prefix: str, kind: str, layer: int) -> Iterator[Tensor]:
    shapes: dict[str, tuple[Shape, str]] = {}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{norm}.weight"] = ((dims.hidden_size,), "small")
    if kind == "full_attention":
        shapes |= _attention(dims)
    elif dims.gdn is not None:
        shapes |= _gdn(dims.hidden_size, dims.gdn)
    if dims.moe is not None:
        shapes |= _moe(dims.hidden_size, dims.moe)
    elif dims.intermediate_size is not None:
        shapes |= _mlp("mlp", dims.hidden_size, dims.intermediate_size, "mlp")
    for name, (shape, role) in shapes.items():
        yield Tensor(prefix + name, shape, role, layer)


def _attention(dims: ModelDims) -> dict[str, tuple[Shape, str]]:
    hidden, width = dims.hidden_size, dims.head_dim
    queries, keys = dims.num_attention_heads * width, dims.num_key_value_heads * width
    shapes: dict[str, tuple[Shape, str]] = {
        "self_attn.q_proj.weight": ((queries * (1 + dims.attn_output_gate), hidden), "attention"),
        "self_attn.k_proj.weight": ((keys, hidden), "attention"),
        "self_attn.v_proj.weight": ((keys, hidden), "attention"),
        "self_attn.o_proj.weight": ((hidden, queries), "attention"),
    }
    if dims.qk_norm:
        for norm in ("q_norm", "k_norm"):
            shapes[f"self_attn.{norm}.weight"] = ((width,), "small")
    return shapes


def _gdn(hidden: int, gdn: GdnDims) -> dict[str, tuple[Shape, str]]:
    heads, values = gdn.num_value_heads, gdn.num_value_heads * gdn.value_head_dim
    return {
        "linear_attn.dt_bias": ((heads,), "small"),
        "linear_attn.A_log": ((heads,), "small"),
        "linear_attn.conv1d.weight": ((gdn.conv_dim, 1, gdn.conv_kernel), "small"),
        "linear_attn.norm.weight": ((gdn.value_head_dim,), "small"),
        "linear_attn.out_proj.weight": ((hidden, values), "gdn"),
        "linear_attn.in_proj_qkv.weight": ((gdn.conv_dim, hidden), "gdn"),
        "linear_attn.in_proj_z.weight": ((values, hidden), "gdn"),
        "linear_attn.in_proj_b.weight": ((heads, hidden), "small"),
        "linear_attn.in_proj_a.weight": ((heads, hidden), "small"),
    }


def _mlp(prefix: str, hidden: int, width: int, role: str) -> dict[str, tuple[Shape, str]]:
    return {
        f"{prefix}.gate_proj.weight": ((width, hidden), role),
        f"{prefix}.up_proj.weight": ((width, hidden), role),
        f"{prefix}.down_proj.weight": ((hidden, width), role),
    }


def _moe(hidden: int, moe: MoeDims) -> dict[str, tuple[Shape, str]]:
    experts, width = moe.num_experts, moe.moe_intermediate_size
    shared = _mlp("mlp.shared_expert", hidden, moe.shared_expert_intermediate_size, "shared_expert")
    return {
        "mlp.gate.weight": ((experts, hidden), "small"),
        "mlp.experts.gate_up_proj": ((experts, 2 * width, hidden), "routed_experts"),
        "mlp.experts.down_proj": ((experts, hidden, width), "routed_experts"),
        **shared,
        "mlp.shared_expert_gate.weight": ((1, hidden), "small"),
    }


def _vision(vision: VisionDims | None) -> Iterator[Tensor]:
    if vision is None:
        return
    width, merged = vision.hidden_size, vision.hidden_size * vision.spatial_merge_size**2
    patch = (vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    yield Tensor("model.visual.pos_embed.weight", (vision.num_position_embeddings, width), "vision")
    weights: dict[str, Shape] = {"patch_embed.proj": (width, vision.in_channels, *patch)}
    for block in range(vision.depth):
        weights |= {
            f"blocks.{block}.norm1": (width,),
            f"blocks.{block}.norm2": (width,),
            f"blocks.{block}.attn.qkv": (3 * width, width),
            f"blocks.{block}.attn.proj": (width, width),
            f"blocks.{block}.mlp.linear_fc1": (vision.intermediate_size, width),
            f"blocks.{block}.mlp.linear_fc2": (width, vision.intermediate_size),
        }
    weights |= {
        "merger.norm": (width,),
        "merger.linear_fc1": (merged, merged),
        "merger.linear_fc2": (vision.out_hidden_size, merged),
    }
    for module, shape in weights.items():
        yield Tensor(f"model.visual.{module}.weight", shape, "vision")
        yield Tensor(f"model.visual.{module}.bias", shape[:1], "vision")


def _mtp(dims: ModelDims) -> Iterator[Tensor]:
    if not dims.mtp_layers:
        return
    hidden = dims.hidden_size
    yield Tensor("mtp.fc.weight", (hidden, 2 * hidden), "mtp")
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield Tensor(f"mtp.{norm}.weight", (hidden,), "mtp")
    for layer in range(dims.mtp_layers):
        for tensor in _layer(dims, f"mtp.layers.{layer}.", "full_attention", layer):
            yield Tensor(tensor.name, tensor.shape, "mtp")
