"""Assembly that kernels use on devices, against what it replaces."""

import random

import numpy as np
import torch

from runtime.kernels.triton.e4m3 import TO_BFLOAT16
from runtime.kernels.triton.words import _lookup, _to_floats
from runtime.quant.formats.codebooks import NONLINEAR
from tests.cuda.assembly import run


def test_e4m3_becomes_the_same_number_in_bfloat16() -> None:
    """All codes in each of the four places of a word; NaN stays NaN."""
    first = torch.arange(256)
    codes = torch.stack([first, first + 37, 255 - first, first + 91], dim=1).to(torch.uint8)
    words = codes.view(torch.int32).flatten().tolist()
    both = np.array([run(TO_BFLOAT16.value, word) for word in words], np.uint32)
    got = torch.from_numpy(both.view(np.int16)).view(torch.bfloat16)
    expected = codes.view(torch.float8_e4m3fn).bfloat16()
    nan = expected.isnan()
    assert torch.equal(got.isnan(), nan) and nan.sum() == 8
    assert torch.equal(got.view(torch.int16)[~nan], expected.view(torch.int16)[~nan])


def test_nibbles_become_the_bytes_of_a_table() -> None:
    table = [value & 255 for value in NONLINEAR]
    words = tuple(
        int.from_bytes(bytes(table[begin : begin + 4]), "little") for begin in range(0, 16, 4)
    )
    draw = random.Random(3)
    for _ in range(200):
        packed = draw.getrandbits(32)
        both = run(_lookup(words), packed)
        got = [word >> 8 * byte & 255 for word in both for byte in range(4)]
        assert got == [table[packed >> 4 * index & 15] for index in range(8)]


def test_bytes_become_floats_that_are_two_to_the_23_and_for_signed_ones_128_more() -> None:
    for signed, word in ((False, 0x7F013200), (True, 0x7F01FF80)):
        found = np.array(run(_to_floats(signed), word, results=4), np.uint32).view(np.float32)
        expected = np.array([word], np.uint32).view(np.int8)
        assert np.array_equal(found - np.float32(2**23 + 128 * signed), expected)
