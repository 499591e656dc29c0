"""The types in which keys and values are cached."""

from enum import Enum

import torch


class CacheType(Enum):
    """Floats, or GGUF blocks (Q8_0, Q4_0) of 32 elements of a head. FP8 is E4M3 without infinities
    and without a scale, as vLLM's `fp8_e4m3`; only CUDA devices have kernels for it."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    FP8 = "fp8"

    @property
    def quantized(self) -> bool:
        return self in _BLOCK_BYTES

    @property
    def dtype(self) -> torch.dtype:
        """The type of the tensors of pages."""
        if self is CacheType.FP8:
            return torch.float8_e4m3fn
        return torch.uint8 if self.quantized else getattr(torch, self.value)

    def width(self, dim: int) -> int:
        """Elements of `dtype` that a vector of `dim` elements takes; its last block is padded."""
        if not self.quantized:
            return dim
        return -(-dim // BLOCK_ELEMENTS) * _BLOCK_BYTES[self]

    def row_bytes(self, dim: int) -> int:
        return self.width(dim) * self.dtype.itemsize


BLOCK_ELEMENTS = 32
_BLOCK_BYTES = {CacheType.Q8_0: 34, CacheType.Q4_0: 18}
FLOAT_TYPES = {type.dtype: type for type in CacheType if not type.quantized}


def default_cache_type(device: torch.device, *, generates: bool) -> CacheType:
    """`generates`: whether the model generates text. An embedding model or reranker caches one text
    at a time, so on a CPU its cache is small and stays in float32."""
    if device.type == "cpu":
        return CacheType.FLOAT16 if generates else CacheType.FLOAT32
    return CacheType.BFLOAT16
