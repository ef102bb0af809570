"""Int8 weights with one scale per row, and their products with int8-quantised rows."""

import torch
from torch import Tensor

CODE_MAX = 127


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric codes int8 [out, in] and scales float32 [out] of a float32 matrix [out, in].

    scale = max |row| / 127, 1 for a row of zeros; code = row / scale, rounded half to even.
    """
    peak = weight.abs().amax(1)
    scale = torch.where(peak == 0, 1.0, peak / CODE_MAX)
    codes = weight.div(scale[:, None]).round_().clamp_(-CODE_MAX, CODE_MAX)
    return codes.to(torch.int8), scale


class Int8Linear:
    """y = x W^T with W = scale * codes and every row of x quantised to 8 bits on the fly."""

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        """Pack codes int8 [out, in] with scales float32 [out]."""
        self._packed = torch.ops.onednn.qlinear_prepack(codes, None)
        # The 1/127 of the activation's scale is folded in here, which saves a call per product.
        self._scale = scale / CODE_MAX
        self._zeros = torch.zeros(codes.shape[0], dtype=torch.int32)
        self._shift = torch.tensor(128.5)

    @classmethod
    def from_rows(cls, *weights: Tensor) -> "Int8Linear":
        """Quantise float32 matrices [out_i, in] and stack their rows into one product."""
        parts = [quantize_rows(weight) for weight in weights]
        return cls(torch.cat([codes for codes, _ in parts]), torch.cat([s for _, s in parts]))

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [T, in] -> float32 [T, out]; a row's result is the same in any company.

        The unsigned code is 128 + round(127 x / peak): truncation of a sum with 128.5 rounds.
        A row of zeros divides 0 by 0 and gets arbitrary codes, which its peak of 0 wipes out.
        """
        peak = x.abs().amax(-1, True)
        codes = torch.addcdiv(self._shift, x, peak, value=CODE_MAX).byte()
        out = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, 128, self._packed, self._scale, self._zeros, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return out.mul_(peak)


class Int8Embedding:
    """Lookup of the rows of a quantised matrix."""

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        """Keep codes int8 [V, E] and scales float32 [V]."""
        self._codes = codes
        self._scale = scale[:, None]

    def __call__(self, tokens: Tensor) -> Tensor:
        """int64 [T] -> float32 [T, E]."""
        return self._codes[tokens] * self._scale[tokens]
