"""Keys: integers in the order of logits, with NaN above all and minus zero equal to zero.

A rank has a key in its upper 32 bits and the token id in the lower ones, inverted, so that smaller
ids rank higher among equal logits.
"""

import triton
import triton.language as tl

LEAST_KEY = tl.constexpr(-(2**31))
LEAST_RANK = tl.constexpr(-(2**63))


@triton.jit
def key_of(value):
    """float32 -> int32."""
    value += 0.0
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value != value, 0x7FFFFFFF, key)


@triton.jit
def logit_of(key):
    """The least value with this key, or NaN."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def rank_of(key, token):
    return (key.to(tl.int64) << 32) + (0xFFFFFFFF - token.to(tl.int64))


@triton.jit
def key_in(rank):
    return (rank >> 32).to(tl.int32)


@triton.jit
def token_in(rank):
    return 0xFFFFFFFF - (rank & 0xFFFFFFFF)
