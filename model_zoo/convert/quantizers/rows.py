"""Quantises rows of weights to every block type that can be written."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from model_zoo.convert.quantizers import codebooks, k_quants, legacy
from runtime.errors import ModelFileError
from runtime.kernels.openmp import openmp, use_one_thread
from runtime.quant.block_types import block_type

# Number of weights that a thread quantises at once: few enough for temporaries to stay in cache.
_SLAB = 1 << 18
_HALF_LIMIT = 65504.0
_LIMITS = {
    "F32": torch.finfo(torch.float32).max,
    "BF16": torch.finfo(torch.bfloat16).max,
    "MXFP4": torch.finfo(torch.bfloat16).max,
}


def quantize(rows: Tensor, type_name: str, *, tensor: str) -> Tensor:
    """float32 [..., n] -> uint8 [..., n / block elements * block bytes]; n a multiple of a block.

    Deterministic. Raises ModelFileError, which names `tensor`, if a weight is not finite or exceeds
    the range of the type.
    """
    type = block_type(type_name)
    assert rows.dtype == torch.float32, rows.dtype
    out = rows.new_empty(*rows.shape[:-1], type.row_bytes(rows.shape[-1]), dtype=torch.uint8)
    blocks = rows.detach().contiguous().view(-1, type.block_elements)
    stored = out.view(-1, type.block_bytes)
    count = _SLAB // type.block_elements

    @torch.inference_mode()
    def fill(begin: int) -> None:
        slab = blocks[begin : begin + count]
        _check(slab, type_name, tensor)
        stored[begin : begin + count] = _QUANTIZERS[type_name](slab)

    with _threads(out.device) as run:
        for _ in run(fill, range(0, len(blocks), count)):
            pass
    return out


@contextmanager
def _threads(device: torch.device) -> Iterator[Callable[..., Iterator[None]]]:
    """Maps over slabs in as many threads as torch would use, each of which has one thread of torch.

    Torch would synchronise its threads after every step, and the steps on a slab are short.
    """
    count = torch.get_num_threads()
    if count == 1 or device.type != "cpu" or openmp() is None:
        yield map
        return
    with ThreadPoolExecutor(count, initializer=use_one_thread) as pool:
        yield pool.map


def row_groups(
    tensor: Tensor, *, most_elements: int, row_elements: int | None = None
) -> Iterator[Tensor]:
    """[..., n] as views [rows, n] of consecutive rows; none if the tensor is empty.

    Each group has at most `most_elements` weights, or one row. `row_elements`: weights of a row, if
    the tensor holds blocks of them.
    """
    if not tensor.numel():
        return
    rows = tensor.reshape(-1, tensor.shape[-1])
    yield from rows.split(max(most_elements // (row_elements or rows.shape[-1]), 1))


def _check(weights: Tensor, type_name: str, tensor: str) -> None:
    low, high = (bound.item() for bound in weights.aminmax())
    largest, limit = max(-low, high), _LIMITS.get(type_name, _HALF_LIMIT)
    if largest <= limit:
        return
    if not weights.isfinite().all():
        raise ModelFileError(
            f"Tensor `{tensor}` holds weights that are not finite; the source model is damaged "
            "or was saved after training had failed."
        )
    raise ModelFileError(
        f"Tensor `{tensor}` holds a weight of magnitude {largest:.4g}; {type_name} can hold "
        f"{limit:.6g} at most. Choose bf16 or f32 for this model."
    )


def _plain(dtype: torch.dtype, numbers: Tensor) -> Tensor:
    return numbers.to(dtype).view(torch.uint8)


_MODULES: Mapping[ModuleType, str] = {
    legacy: "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0",
    k_quants: "Q2_K Q3_K Q4_K Q5_K Q6_K",
    codebooks: "IQ4_NL MXFP4",
}
_QUANTIZERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "F32": partial(_plain, torch.float32),
    "F16": partial(_plain, torch.float16),
    "BF16": partial(_plain, torch.bfloat16),
    **{
        name: getattr(module, name.lower())
        for module, names in _MODULES.items()
        for name in names.split()
    },
}
QUANTIZABLE = frozenset(_QUANTIZERS)
