"""Integers that wrap around at 64 bits, as those of tensors do."""


def signed(value: int) -> int:
    """The low 64 bits as a signed integer."""
    low = value & 0xFFFFFFFFFFFFFFFF
    return low - (1 << 64) if low >> 63 else low
