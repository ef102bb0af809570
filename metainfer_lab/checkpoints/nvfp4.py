"""NVFP4 in ModelOpt's form: 4-bit codes, one E4M3 scale for 16 of them, one fp32 scale a tensor.

A code is sign << 3 | index of a magnitude in E2M1; two share a byte along K, the even one in the
low nibble. The value is e2m1 · block_scale · global_scale. The product of the first two has at most
six significand bits, so bf16 holds it exactly, and float64 holds the whole value exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 16  # weights along K that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbours
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9  # the least positive one, a subnormal


@dataclass(frozen=True)
class Nvfp4:
    """codes uint8 [..., K/2]; block_scale float8_e4m3fn [..., K/16]; global_scale float32 [], or
    [..., rows or 1, 1] where several matrices are stacked."""

    codes: Tensor
    block_scale: Tensor
    global_scale: Tensor

    def __getitem__(self, matrices: slice) -> Nvfp4:
        """Some of the stacked ones."""
        return Nvfp4(self.codes[matrices], self.block_scale[matrices], self.global_scale[matrices])

    def dequantise(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Values [..., K]: exact in float64, rounded once in float32."""
        scaled = self.scaled(torch.float32 if dtype == torch.float32 else torch.float64)
        return scaled.mul_(self.global_scale.to(scaled.dtype)).to(dtype)

    def scaled(self, dtype: torch.dtype) -> Tensor:
        """e2m1 · block_scale [..., K], exact in bfloat16 and wider."""
        values = decode_e2m1(unpack(self.codes)).to(dtype).unflatten(-1, (-1, BLOCK))
        return values.mul_(self.block_scale.to(dtype)[..., None]).flatten(-2)


def quantise(weight: Tensor, global_scale: Tensor | None = None) -> Nvfp4:
    """Quantise a weight [..., K], K a multiple of 16; amax / (6 · 448) is the global scale if none.

    Each block's scale is its amax / 6 in units of the global scale, rounded to E4M3 and never below
    2^-9; a block of zeros has scale 1. Codes are the nearest to weight / (scale · global scale).
    """
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"weight: K = {weight.shape[-1]} is no multiple of {BLOCK}")
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(dim=-1)
    if global_scale is None:
        global_scale = default_global_scale(weight)
    block_scale = torch.where(amax == 0, 1.0, amax / E2M1_MAX / global_scale)
    block_scale = block_scale.clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)
    # In float64 the divisor is exact and no quotient can cross a midpoint that the reals do not.
    unit = block_scale.double() * global_scale.double()
    codes = encode_e2m1(blocks.double() / unit[..., None]).flatten(-2)
    return Nvfp4(pack(codes), block_scale, global_scale)


def default_global_scale(weight: Tensor) -> Tensor:
    """float32 []: amax / (6 · 448), so that the largest block's scale is 448; 1 for all zeros."""
    amax = weight.float().abs().amax()
    return torch.where(amax == 0, 1.0, amax / (E2M1_MAX * E4M3_MAX))


def encode_e2m1(values: Tensor) -> Tensor:
    """uint8 codes of the nearest E2M1 values; ties go to the even mantissa, beyond 6 to 6."""
    midpoints = torch.tensor(MIDPOINTS, dtype=values.dtype, device=values.device)
    magnitude = values.abs().contiguous()
    below = torch.bucketize(magnitude, midpoints)  # a tie stays below its midpoint
    above = torch.bucketize(magnitude, midpoints, right=True)
    index = torch.where(below % 2 == 1, above, below)  # an even index is an even mantissa
    return (index + 8 * torch.signbit(values)).to(torch.uint8)


def decode_e2m1(codes: Tensor) -> Tensor:
    """float32 values of uint8 codes 0 .. 15; code 8 is minus zero."""
    magnitudes = torch.tensor(E2M1, device=codes.device)
    return torch.cat([magnitudes, -magnitudes])[codes.int()]


def pack(codes: Tensor) -> Tensor:
    """uint8 [..., K/2] of codes [..., K]: the even one of a pair in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """uint8 codes [..., K] of packed bytes [..., K/2]."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
