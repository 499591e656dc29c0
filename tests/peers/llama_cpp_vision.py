"""Features of images, and what follows prompts with images, as llama.cpp's `mtmd` computes them."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.peers.llama_cpp_library import llama_cpp

mtmd_cpp = import_module("llama_cpp.mtmd_cpp")
Picture = NDArray[np.uint8]
IMAGE = mtmd_cpp.mtmd_default_marker().decode()


def their_features(text: Path, projector: Path, picture: Picture, *, width: int) -> list[Tensor]:
    """picture [height, width, 3] -> [rows, width] for each part that it is cut into."""
    with (
        _model(text) as model,
        _opened(model, projector) as context,
        _chunks(context, IMAGE, [picture]) as chunks,
    ):
        return [
            _features(context, chunk, width)
            for chunk in _listed(chunks)
            if mtmd_cpp.mtmd_input_chunk_get_type(chunk) == mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_IMAGE
        ]


def their_next_token(
    text: Path, projector: Path, prompt: str, pictures: Sequence[Picture]
) -> Tensor:
    """Log-probabilities [vocabulary] of the token after a prompt with IMAGE for each picture."""
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = 512
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
    with (
        _model(text) as model,
        _opened(model, projector) as context,
        _chunks(context, prompt, pictures) as chunks,
    ):
        decoder = llama_cpp.llama_init_from_model(model, options)
        end = llama_cpp.llama_pos()
        status = mtmd_cpp.mtmd_helper_eval_chunks(
            context, decoder, chunks, 0, 0, 512, True, ctypes.byref(end)
        )
        assert status == 0, status
        found = llama_cpp.llama_get_logits_ith(decoder, -1)
        size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        logits = torch.from_numpy(np.ctypeslib.as_array(found, shape=(size,)).copy())
        llama_cpp.llama_free(decoder)
    return logits.log_softmax(-1)


def their_layout(text: Path, projector: Path, picture: Picture) -> list[int | list[int]]:
    """What stands for a picture in a prompt: tokens, and in brackets numbers of rows."""
    layout: list[int | list[int]] = []
    with (
        _model(text) as model,
        _opened(model, projector) as context,
        _chunks(context, IMAGE, [picture]) as chunks,
    ):
        for chunk in _listed(chunks):
            if mtmd_cpp.mtmd_input_chunk_get_type(chunk) == mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_IMAGE:
                layout.append([mtmd_cpp.mtmd_input_chunk_get_n_tokens(chunk)])
                continue
            count = ctypes.c_size_t()
            tokens = mtmd_cpp.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
            layout += tokens[: count.value]
    return layout


@contextmanager
def _model(text: Path) -> Iterator[int]:
    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(text).encode(), options)
    assert model, text
    try:
        yield model
    finally:
        llama_cpp.llama_model_free(model)


@contextmanager
def _opened(model: int, projector: Path) -> Iterator[int]:
    params = mtmd_cpp.mtmd_context_params_default()
    params.use_gpu, params.n_threads, params.warmup, params.print_timings = False, 1, False, False
    context = mtmd_cpp.mtmd_init_from_file(str(projector).encode(), model, params)
    assert context, projector
    try:
        yield context
    finally:
        mtmd_cpp.mtmd_free(context)


@contextmanager
def _chunks(context: int, prompt: str, pictures: Sequence[Picture]) -> Iterator[int]:
    bitmaps = [_bitmap(picture) for picture in pictures]
    encoded = prompt.encode()
    text = mtmd_cpp.mtmd_input_text(encoded, len(encoded), False, True)
    chunks = mtmd_cpp.mtmd_input_chunks_init()
    listed = (mtmd_cpp.mtmd_bitmap_p_ctypes * len(bitmaps))(*bitmaps)
    status = mtmd_cpp.mtmd_tokenize(context, chunks, ctypes.byref(text), listed, len(bitmaps))
    assert status == 0, status
    try:
        yield chunks
    finally:
        mtmd_cpp.mtmd_input_chunks_free(chunks)
        for bitmap in bitmaps:
            mtmd_cpp.mtmd_bitmap_free(bitmap)


def _bitmap(picture: Picture) -> int:
    height, width, _ = picture.shape
    data = np.ascontiguousarray(picture)
    return mtmd_cpp.mtmd_bitmap_init(
        width, height, data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    )


def _listed(chunks: int) -> Iterator[int]:
    for index in range(mtmd_cpp.mtmd_input_chunks_size(chunks)):
        yield mtmd_cpp.mtmd_input_chunks_get(chunks, index)


def _features(context: int, chunk: int, width: int) -> Tensor:
    assert mtmd_cpp.mtmd_encode_chunk(context, chunk) == 0
    rows = mtmd_cpp.mtmd_input_chunk_get_n_tokens(chunk)
    found = mtmd_cpp.mtmd_get_output_embd(context)
    values = np.ctypeslib.as_array(found, shape=(rows * width,)).copy()
    return torch.from_numpy(values).view(rows, width)
