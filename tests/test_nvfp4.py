"""The quantisers, bit for bit: against fractions, over every pair of code and scale."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer_lab.checkpoints import fp8, nvfp4

MAGNITUDES = [Fraction(value) for value in nvfp4.E2M1]
ALL_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
FINITE_E4M3 = ALL_E4M3[~ALL_E4M3.float().isnan()]


def nearest(value: Fraction) -> int:
    """The code by the rule itself: least distance, then the even mantissa."""
    index = min(range(8), key=lambda i: (abs(MAGNITUDES[i] - abs(value)), i % 2))
    return index + 8 * (value < 0)


def test_every_product_of_code_and_scale_is_exact_in_bf16():
    scales = FINITE_E4M3[~torch.signbit(FINITE_E4M3.float())].double()
    products = torch.tensor(nvfp4.E2M1[1:]).double()[:, None] * scales
    assert products.numel() == 889
    assert torch.equal(products.bfloat16().double(), products)


@settings(max_examples=300, deadline=None)
@given(st.floats(-8, 8, width=32) | st.sampled_from(nvfp4.MIDPOINTS))
def test_codes_are_the_nearest_with_ties_to_even(value):
    for signed in (value, -value):
        code = int(nvfp4.encode_e2m1(torch.tensor([signed], dtype=torch.float64)))
        assert code % 8 == nearest(Fraction(abs(signed)))
        assert (code >= 8) == (math.copysign(1, signed) < 0)


@pytest.mark.parametrize(
    ("value", "magnitude"), [*zip(nvfp4.MIDPOINTS, (0, 1, 1, 2, 2, 4, 4), strict=True)]
)
def test_midpoints_round_to_the_even_mantissa(value, magnitude):
    both = torch.tensor([value, -value])
    assert nvfp4.decode_e2m1(nvfp4.encode_e2m1(both)).tolist() == [magnitude, -magnitude]


def test_the_low_nibble_is_the_even_index():
    codes = torch.randint(0, 16, (3, 32), dtype=torch.uint8)
    packed = nvfp4.pack(codes)
    assert packed.shape == (3, 16) and torch.equal(packed & 0xF, codes[:, 0::2])
    assert torch.equal(nvfp4.unpack(packed), codes)


def test_a_quantised_weight_quantises_to_itself():
    for scale in (1e-3, 1.0, 50.0):
        made = nvfp4.quantise(scale * torch.randn(6, 64))
        again = nvfp4.quantise(made.dequantise(torch.float32), made.global_scale)
        assert torch.equal(again.dequantise(), made.dequantise())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.floats(-20, 10))
def test_codes_and_values_follow_from_the_scales_in_exact_arithmetic(seed, log_scale):
    generator = torch.Generator().manual_seed(seed)
    weight = 2.0**log_scale * torch.randn(2, 32, generator=generator)
    made = nvfp4.quantise(weight)
    codes, values = nvfp4.unpack(made.codes), made.dequantise()
    global_scale = Fraction(made.global_scale.item())
    for row in range(2):
        for k in range(32):
            unit = Fraction(made.block_scale[row, k // 16].item()) * global_scale
            exact = Fraction(weight[row, k].item()) / unit
            magnitude = MAGNITUDES[int(codes[row, k]) % 8]
            assert int(codes[row, k]) % 8 == nearest(abs(exact))
            assert Fraction(abs(values[row, k].item())) == magnitude * unit


def test_block_scales_are_clamped_and_zero_blocks_have_scale_one():
    weight = torch.zeros(1, 48)
    weight[0, 0], weight[0, 16] = 6 * 448.0, 1e-6
    made = nvfp4.quantise(weight)
    assert made.global_scale == 1
    assert made.block_scale.float().tolist() == [[448.0, 2.0**-9, 1.0]]
    assert made.dequantise()[0, 0] == 6 * 448 and not made.dequantise()[0, 16:].any()


def test_the_error_is_at_most_half_a_step_of_the_block():
    weight = torch.randn(64, 128, dtype=torch.float64).float()
    made = nvfp4.quantise(weight)
    error = (made.dequantise() - weight.double()).abs().unflatten(-1, (-1, 16)).amax(-1)
    largest = weight.double().unflatten(-1, (-1, 16)).abs().amax(-1)
    assert bool((error <= largest / 6 * 1.07).all())  # a step of 2 at the top, E4M3 off by 1/16


def test_float32_values_are_the_exact_ones_rounded_once():
    made = nvfp4.quantise(torch.randn(32, 64))
    assert torch.equal(made.dequantise(torch.float32), made.dequantise().float())
    assert torch.equal(made.scaled(torch.bfloat16).double(), made.scaled(torch.float64))


def test_odd_widths_are_refused():
    with pytest.raises(ValueError, match="K = 24 is no multiple of 16"):
        nvfp4.quantise(torch.ones(2, 24))


def test_fp8_round_trips_and_is_nearest():
    weight = torch.randn(40, 24) * 3
    made = fp8.quantise(weight)
    assert made.scale == weight.abs().max() / 448 and made.codes.float().abs().max() == 448
    again = fp8.quantise(made.dequantise(torch.float32))
    assert torch.equal(again.dequantise(), made.dequantise())
    grid = FINITE_E4M3.double() * made.scale.double()
    closest = (weight.double()[..., None] - grid).abs().amin(-1)
    assert bool(((made.dequantise() - weight.double()).abs() <= closest * (1 + 1e-6)).all())
    assert torch.equal(made.dequantise(torch.float32), made.dequantise().float())


def test_zeros_quantise_to_zeros():
    assert not nvfp4.quantise(torch.zeros(2, 16)).dequantise().any()
    assert not fp8.quantise(torch.zeros(2, 16)).dequantise().any()
