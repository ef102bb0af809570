"""Per-tensor FP8 (E4M3) in ModelOpt's form: value = code · scale, scale = amax / 448 in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .nvfp4 import E4M3_MAX


@dataclass(frozen=True)
class Fp8:
    """codes float8_e4m3fn [...]; scale float32 []."""

    codes: Tensor
    scale: Tensor

    def dequantise(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Values [...]: exact in float64, rounded once in float32."""
        wide = torch.float32 if dtype == torch.float32 else torch.float64
        return (self.codes.to(wide) * self.scale.to(wide)).to(dtype)


def quantise(weight: Tensor) -> Fp8:
    """Quantise a weight [...] of any float dtype: nearest E4M3 of weight / scale, ties to even."""
    weight = weight.float()
    amax = weight.abs().amax()
    scale = torch.where(amax == 0, 1.0, amax / E4M3_MAX)
    codes = (weight / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return Fp8(codes, scale)
