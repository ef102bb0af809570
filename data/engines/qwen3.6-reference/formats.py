"""NVFP4 and FP8 as ModelOpt stores them, into plain numbers: exact in float64, rounded once in
float32."""

import torch
from torch import Tensor

BLOCK = 16  # weights along K that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantise_nvfp4(
    packed: Tensor, block_scale: Tensor, global_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """[N, K] of codes [N, K/2] (uint8, the even one of a pair in the low nibble), scales [N, K/16]
    (E4M3) and one scale [] (float32): e2m1 · block_scale · global_scale."""
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(1)
    magnitudes = torch.tensor(E2M1, device=packed.device, dtype=dtype)
    values = torch.cat([magnitudes, -magnitudes])[codes.int()]
    scales = block_scale.to(dtype).repeat_interleave(BLOCK, dim=1)
    return values * scales * global_scale.to(dtype)


def dequantise_fp8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, K] of codes [N, K] (E4M3) and one scale [] (float32)."""
    return codes.to(dtype) * scale.to(dtype)
