"""The weights as the operators want them: one loader for ModelOpt's mixed NVFP4 / FP8 layout."""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import formats
from .checkpoint import FLOATS
from .config import Config
from .formats import Matrix
from .naive import interleave

FP8 = (torch.float8_e4m3fn,)
ROOT = "model.language_model."


@dataclass
class Gdn:
    """Gated DeltaNet mixer."""

    in_proj: Matrix  # rows q, k, v, z
    ab: Matrix  # rows a, b
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    out: Matrix


@dataclass
class Attention:
    """Gated grouped-query attention."""

    qkv: Matrix
    q_norm: Tensor
    k_norm: Tensor
    out: Matrix


@dataclass
class Moe:
    """Router with the shared expert's gate as its last used row, routed and shared experts."""

    router: Matrix
    gate_up: Matrix
    down: Matrix
    shared_gate_up: Matrix
    shared_down: Matrix


@dataclass
class Layer:
    input_norm: Tensor
    mixer: Gdn | Attention
    post_norm: Tensor
    moe: Moe


@dataclass
class Weights:
    embedding: Tensor
    layers: list[Layer]
    final_norm: Tensor
    head: Matrix


class Loader:
    """Takes tensors from a source (checkpoint or generator) and packs them for the GPU."""

    def __init__(self, source, config: Config, packed: bool) -> None:
        self.source, self.config, self.packed = source, config, packed

    def load(self) -> Weights:
        """Read everything once; the source complains about leftovers in finish()."""
        c = self.config
        weights = Weights(
            embedding=self.source.take(ROOT + "embed_tokens.weight", (c.vocab, c.hidden)),
            layers=[self._layer(i, kind) for i, kind in enumerate(c.layer_types)],
            final_norm=self._vector(ROOT + "norm.weight", c.hidden),
            head=self._nvfp4("lm_head", c.vocab, c.hidden),
        )
        self.source.finish()
        return weights

    def _layer(self, index: int, kind: str) -> Layer:
        name = f"{ROOT}layers.{index}."
        mixer = self._gdn if kind == "linear_attention" else self._attention
        return Layer(
            input_norm=self._vector(name + "input_layernorm.weight", self.config.hidden),
            mixer=mixer(name),
            post_norm=self._vector(name + "post_attention_layernorm.weight", self.config.hidden),
            moe=self._moe(name + "mlp."),
        )

    def _gdn(self, name: str) -> Gdn:
        c, name = self.config, name + "linear_attn."
        parts = [("in_proj_qkv", c.conv_width), ("in_proj_z", c.value_width)]
        gates = [self._float(name + f"in_proj_{x}.weight", (c.value_heads, c.hidden)) for x in "ab"]
        conv = self.source.take(name + "conv1d.weight", (c.conv_width, 1, c.conv_kernel))
        return Gdn(
            in_proj=self._fp8([(name + part, rows) for part, rows in parts], c.hidden),
            ab=self._f16(torch.cat(gates)),
            conv=conv[:, 0].float().contiguous(),
            a_log=self._vector(name + "A_log", c.value_heads),
            dt_bias=self._vector(name + "dt_bias", c.value_heads),
            norm=self._vector(name + "norm.weight", c.value_dim),
            out=self._fp8([(name + "out_proj", c.hidden)], c.value_width),
        )

    def _attention(self, name: str) -> Attention:
        c, name = self.config, name + "self_attn."
        kv = c.kv_heads * c.head_dim
        parts = [("q_proj", 2 * c.attention_width), ("k_proj", kv), ("v_proj", kv)]
        return Attention(
            qkv=self._fp8([(name + part, rows) for part, rows in parts], c.hidden),
            q_norm=self._vector(name + "q_norm.weight", c.head_dim),
            k_norm=self._vector(name + "k_norm.weight", c.head_dim),
            out=self._fp8([(name + "o_proj", c.hidden)], c.attention_width),
        )

    def _moe(self, name: str) -> Moe:
        c = self.config
        router = self._float(name + "gate.weight", (c.experts, c.hidden))
        gate = self._float(name + "shared_expert_gate.weight", (1, c.hidden))
        return Moe(
            router=self._f16(torch.cat((router, gate))),
            gate_up=self._experts_gate_up(name),
            down=self._experts_down(name),
            shared_gate_up=self._shared_gate_up(name),
            shared_down=self._nvfp4(name + "shared_expert.down_proj", c.hidden, c.shared_width),
        )

    def _vector(self, name: str, size: int) -> Tensor:
        return self.source.take(name, (size,)).float()

    def _float(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.source.take(name, shape).float()

    def _matrix(self, kind: str, values, scales, alpha: Tensor, rows: int, cols: int) -> Matrix:
        if self.packed:
            values, scales = formats.pack(kind, values, scales)
        return Matrix(kind, values, scales, alpha.contiguous(), rows, cols, self.packed)

    def _f16(self, weight: Tensor) -> Matrix:
        """16-bit floats under one power of two, rows padded to a tile (see README.md)."""
        weight = torch.cat((weight, weight.new_zeros(-len(weight) % 16, weight.shape[1])))
        rows, cols = weight.shape
        power = torch.exp2(14 - torch.ceil(torch.log2(weight.abs().amax().clamp_min(1e-30))))
        values = (weight * power).to(torch.float16 if self.packed else torch.float32)
        alpha = torch.full((rows // 8,), 1.0, device=weight.device) / power
        return self._matrix("f16", values, None, alpha, rows, cols)

    def _fp8(self, parts: list[tuple[str, int]], cols: int) -> Matrix:
        """Per-tensor FP8 projections stacked along the rows."""
        values, alpha = [], []
        for name, rows in parts:
            values.append(self.source.take(name + ".weight", (rows, cols), FP8).view(torch.uint8))
            scale = self._scalar(name + ".weight_scale")
            self.source.require(name + ".input_scale")
            alpha.append(scale.expand(rows // 8))
        stacked = torch.cat(values).view(torch.float8_e4m3fn)
        return self._matrix("fp8", stacked, None, torch.cat(alpha), len(stacked), cols)

    def _scalar(self, name: str) -> Tensor:
        return self.source.take(name, (), FLOATS).float().reshape(())

    def _codes(self, name: str, rows: int, cols: int) -> tuple[Tensor, Tensor, Tensor]:
        take = self.source.take
        self.source.require(name + ".input_scale")
        return (
            take(name + ".weight", (rows, cols // 2), (torch.uint8,)),
            take(name + ".weight_scale", (rows, cols // 16), FP8),
            self._scalar(name + ".weight_scale_2"),
        )

    def _nvfp4(self, name: str, rows: int, cols: int) -> Matrix:
        codes, scales, total = self._codes(name, rows, cols)
        return self._matrix("nvfp4", codes, scales, total.repeat(rows // 8), rows, cols)

    def _shared_gate_up(self, name: str) -> Matrix:
        c = self.config
        gate, up = (
            self._codes(name + f"shared_expert.{part}_proj", c.shared_width, c.hidden)
            for part in ("gate", "up")
        )
        codes = interleave(gate[0], up[0])
        scales = interleave(gate[1].view(torch.uint8), up[1].view(torch.uint8))
        alpha = torch.stack((gate[2], up[2])).repeat(c.shared_width // 8)
        scales = scales.view(torch.float8_e4m3fn)
        return self._matrix("nvfp4", codes, scales, alpha, 2 * c.shared_width, c.hidden)

    def _stack(self, name: str, part: str, rows: int, cols: int) -> tuple[Tensor, Tensor, Tensor]:
        names = [f"{name}experts.{e}.{part}_proj" for e in range(self.config.experts)]
        stack = self.source.take_stack
        for expert in names:
            self.source.require(expert + ".input_scale")
        return (
            stack([n + ".weight" for n in names], (rows, cols // 2), (torch.uint8,)),
            stack([n + ".weight_scale" for n in names], (rows, cols // 16), FP8),
            stack([n + ".weight_scale_2" for n in names], (), FLOATS).float(),
        )

    def _experts_gate_up(self, name: str) -> Matrix:
        c = self.config
        gate, up = (self._stack(name, p, c.expert_width, c.hidden) for p in ("gate", "up"))
        codes = interleave(gate[0], up[0])
        scales = interleave(gate[1].view(torch.uint8), up[1].view(torch.uint8))
        alpha = torch.stack((gate[2], up[2]), -1).repeat(1, c.expert_width // 8)
        scales = scales.view(torch.float8_e4m3fn)
        return self._matrix("nvfp4", codes, scales, alpha, 2 * c.expert_width, c.hidden)

    def _experts_down(self, name: str) -> Matrix:
        c = self.config
        codes, scales, total = self._stack(name, "down", c.hidden, c.expert_width)
        alpha = total[:, None].expand(-1, c.hidden // 8)
        return self._matrix("nvfp4", codes, scales, alpha, c.hidden, c.expert_width)
