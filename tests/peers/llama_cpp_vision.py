"""Features of an image as llama.cpp's `mtmd` computes them."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.peers.llama_cpp_library import llama_cpp

mtmd_cpp = import_module("llama_cpp.mtmd_cpp")


def their_features(
    text: Path, projector: Path, picture: NDArray[np.uint8], *, width: int
) -> list[Tensor]:
    """picture [height, width, 3] -> [rows, width] for each part that it is cut into."""
    with _opened(text, projector) as context:
        return [
            _features(context, chunk, width)
            for chunk in _chunks(context, picture)
            if mtmd_cpp.mtmd_input_chunk_get_type(chunk) == mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_IMAGE
        ]


@contextmanager
def _opened(text: Path, projector: Path) -> Iterator[int]:
    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(text).encode(), options)
    assert model, text
    params = mtmd_cpp.mtmd_context_params_default()
    params.use_gpu, params.n_threads, params.warmup, params.print_timings = False, 1, False, False
    context = mtmd_cpp.mtmd_init_from_file(str(projector).encode(), model, params)
    assert context, projector
    try:
        yield context
    finally:
        mtmd_cpp.mtmd_free(context)
        llama_cpp.llama_model_free(model)


def _chunks(context: int, picture: NDArray[np.uint8]) -> Iterator[int]:
    height, width, _ = picture.shape
    data = np.ascontiguousarray(picture)
    pixels = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    bitmap = mtmd_cpp.mtmd_bitmap_init(width, height, pixels)
    marker = mtmd_cpp.mtmd_default_marker()
    text = mtmd_cpp.mtmd_input_text(marker, len(marker), False, True)
    chunks = mtmd_cpp.mtmd_input_chunks_init()
    bitmaps = (mtmd_cpp.mtmd_bitmap_p_ctypes * 1)(bitmap)
    status = mtmd_cpp.mtmd_tokenize(context, chunks, ctypes.byref(text), bitmaps, 1)
    assert status == 0, status
    for index in range(mtmd_cpp.mtmd_input_chunks_size(chunks)):
        yield mtmd_cpp.mtmd_input_chunks_get(chunks, index)
    mtmd_cpp.mtmd_input_chunks_free(chunks)
    mtmd_cpp.mtmd_bitmap_free(bitmap)


def _features(context: int, chunk: int, width: int) -> Tensor:
    assert mtmd_cpp.mtmd_encode_chunk(context, chunk) == 0
    rows = mtmd_cpp.mtmd_input_chunk_get_n_tokens(chunk)
    found = mtmd_cpp.mtmd_get_output_embd(context)
    values = np.ctypeslib.as_array(found, shape=(rows * width,)).copy()
    return torch.from_numpy(values).view(rows, width)
