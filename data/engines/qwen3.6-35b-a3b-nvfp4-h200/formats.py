"""Number formats and packed layouts: E2M1 codes with E4M3 block scales, E4M3, 16-bit floats.

Packed layout, shared by the three kinds. A *tile* is 16 rows; along K it is cut into 16 x 16
blocks, one A operand of mma.m16n8k16 each. Lane (g, t) = (lane // 4, lane % 4) holds rows g and
g + 8, columns 4t .. 4t+3, so that the B operand is four neighbouring activations. Sixteen bytes of
a lane are 4 blocks of NVFP4, 2 of FP8, 1 of 16-bit floats; a warp reads 512 neighbouring bytes.
NVFP4 keeps its scales in the same stream: 1,024 bytes of codes, then 128 bytes of scales, are a
*group* of 16 rows x 128 columns; four bytes of a lane scale rows g, g + 8 of blocks 2t, 2t + 1.
"""

from dataclasses import dataclass

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 16
GROUP = 128  # K elements of a group
GROUP_CODES = 1024  # bytes of a group's codes; 128 bytes of scales follow

# Bits (sign, then magnitude from the top) of a byte that hold its two codes: masked, the first are
# an E4M3 number, the code times 2^-6; the second become one after two shifts. Converting four such
# bytes to fp16 takes two instructions. See unpack_fp4() in kernels/common.cuh.
FIRST_BITS, SECOND_BITS = (7, 4, 3, 2), (5, 6, 1, 0)


def _code_bits(register: int, column: int) -> tuple[int, ...]:
    """Bits of a word that hold the code of A register 0..3, element 0..1."""
    base = 16 * (register % 2) + 8 * column
    return tuple(base + bit for bit in (FIRST_BITS if register < 2 else SECOND_BITS))


@dataclass(frozen=True)
class Matrix:
    """A quantised [rows, cols] matrix, or a stack of equal ones ([experts] first)."""

    kind: str  # "nvfp4", "fp8", "f16"
    values: torch.Tensor
    scales: torch.Tensor | None
    alpha: torch.Tensor  # [..., rows / 8] float32: one multiplier for eight rows
    rows: int
    cols: int
    packed: bool = False

    def dense(self, dtype: torch.dtype, which: int | None = None) -> torch.Tensor:
        """Exact values [rows, cols] (of stack element `which`) in `dtype`."""
        pick = (lambda x: x) if which is None else (lambda x: x[which])
        values, alpha = pick(self.values), pick(self.alpha)
        scales = None if self.scales is None else pick(self.scales)
        if self.packed:
            values, scales = unpack(self.kind, values, scales, self.rows, self.cols)
        return (
            decode(self.kind, values, scales, dtype) * alpha.to(dtype).repeat_interleave(8)[:, None]
        )

    def bytes(self) -> int:
        scales = 0 if self.scales is None else self.scales.nbytes
        return self.values.nbytes + scales


def decode(kind: str, values: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype):
    """Values of the canonical layout without `alpha`: [rows, cols] in `dtype`."""
    if kind != "nvfp4":
        return values.to(dtype)
    table = torch.tensor(E2M1 + tuple(-v for v in E2M1), dtype=dtype, device=values.device)
    codes = torch.stack((values & 15, values >> 4), -1).flatten(-2)  # low nibble = even column
    return table[codes.long()] * scales.to(torch.float32).to(dtype).repeat_interleave(BLOCK, -1)


def _to_lanes(x: torch.Tensor) -> torch.Tensor:
    """[..., rows, cols] -> [..., tile, k block, lane, row half, 4 columns]."""
    *head, rows, cols = x.shape
    x = x.reshape(*head, rows // 16, 2, 8, cols // 16, 4, 4)  # tile, half, g, block, t, column
    n = len(head)
    order = [*range(n), n, n + 3, n + 2, n + 4, n + 1, n + 5]
    return x.permute(order).reshape(*head, rows // 16, cols // 16, 32, 2, 4)


def _from_lanes(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    x = x.reshape(rows // 16, cols // 16, 8, 4, 2, 4).permute(0, 4, 2, 1, 3, 5)
    return x.reshape(rows, cols)


def pack(kind: str, values: torch.Tensor, scales: torch.Tensor | None):
    """Canonical -> packed bytes [..., tiles, bytes of a tile] with the scales inside, and None."""
    if kind == "nvfp4":
        codes, scales = _pack_codes(values), _pack_scales(scales)
        return torch.cat((codes, scales), -1).flatten(-2), None
    lanes = _to_lanes(values.view(torch.uint8) if kind == "fp8" else values)
    # A operand order: first pair of rows g and g + 8, then the second pair of both.
    lanes = lanes.unflatten(-1, (2, 2)).transpose(-3, -2).contiguous()
    *head, tiles, blocks = lanes.shape[:-4]
    per_chunk = 2 if kind == "fp8" else 1
    lanes = lanes.reshape(*head, tiles, blocks // per_chunk, per_chunk, 32, 8)
    lanes = lanes.transpose(-3, -2).contiguous()
    return lanes.view(torch.uint8).reshape(*head, tiles, blocks // per_chunk * 512), None


def _pack_codes(values: torch.Tensor) -> torch.Tensor:
    codes = torch.stack((values & 15, values >> 4), -1).flatten(-2)
    lanes = _to_lanes(codes).int()  # [..., tile, block, lane, half, 4]
    pairs = lanes.unflatten(-1, (2, 2)).transpose(-3, -2).flatten(-3, -2)  # 4 A registers, 2 codes
    word = torch.zeros(pairs.shape[:-2], dtype=torch.int64, device=values.device)
    for register in range(4):
        for column in range(2):
            code = pairs[..., register, column].long()
            for source, target in zip((3, 2, 1, 0), _code_bits(register, column), strict=True):
                word |= ((code >> source) & 1) << target
    word = torch.where(word >= 2**31, word - 2**32, word).int()
    *head, tiles, blocks, _ = word.shape
    word = word.reshape(*head, tiles, blocks // 4, 4, 32).transpose(-1, -2).contiguous()
    return word.view(torch.uint8).reshape(*head, tiles, blocks // 8, GROUP_CODES)


def _pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """[..., rows, K/16] -> [..., tile, group, 128]: a lane's rows g, g+8 by blocks 2t, 2t+1."""
    raw = scales.view(torch.uint8)
    *head, rows, blocks = raw.shape
    n = len(head)
    raw = raw.reshape(*head, rows // 16, 2, 8, blocks // 8, 4, 2)  # tile, half, g, group, t, block
    raw = raw.permute(*range(n), n, n + 3, n + 2, n + 4, n + 1, n + 5)
    return raw.reshape(*head, rows // 16, blocks // 8, 128)


def unpack(kind: str, values: torch.Tensor, scales: torch.Tensor | None, rows: int, cols: int):
    """Inverse of pack() for one matrix."""
    if kind == "nvfp4":
        groups = values.reshape(rows // 16, cols // GROUP, GROUP_CODES + GROUP)
        codes, scales = groups[..., :GROUP_CODES], groups[..., GROUP_CODES:]
        return _unpack_codes(codes, rows, cols), _unpack_scales(scales, rows, cols)
    dtype = torch.float8_e4m3fn if kind == "fp8" else torch.float16
    per_chunk = 2 if kind == "fp8" else 1
    lanes = values.contiguous().view(torch.uint8 if kind == "fp8" else torch.float16)
    lanes = lanes.reshape(rows // 16, cols // 16 // per_chunk, 32, per_chunk, 8).transpose(2, 3)
    lanes = lanes.reshape(rows // 16, cols // 16, 32, 2, 2, 2).transpose(-3, -2).contiguous()
    canonical = _from_lanes(lanes, rows, cols).contiguous()
    return canonical.view(dtype), None


def _unpack_codes(values: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    word = (
        values.contiguous()
        .view(torch.int32)
        .reshape(rows // 16, cols // 64, 32, 4)
        .transpose(-1, -2)
    )
    word = word.reshape(rows // 16, cols // 16, 32)
    pairs = torch.zeros(*word.shape, 4, 2, dtype=torch.uint8, device=values.device)
    for register in range(4):
        for column in range(2):
            for source, target in zip((3, 2, 1, 0), _code_bits(register, column), strict=True):
                pairs[..., register, column] |= (((word >> target) & 1) << source).byte()
    codes = pairs.reshape(*word.shape, 2, 2, 2).transpose(-3, -2).reshape(*word.shape, 2, 4)
    codes = _from_lanes(codes, rows, cols)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _unpack_scales(scales: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    raw = scales.reshape(rows // 16, cols // GROUP, 8, 4, 2, 2).permute(0, 4, 2, 1, 3, 5)
    return raw.reshape(rows, cols // BLOCK).contiguous().view(torch.float8_e4m3fn)
