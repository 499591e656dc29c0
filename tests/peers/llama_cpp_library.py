"""llama.cpp as `llama-cpp-python` builds it: its quantisers and its logits.

Importing this skips a test module where the package is absent; `make test-peers` installs it.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.quant.block_types import block_type

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
_LIBRARIES = Path(llama_cpp.__file__).parent / "lib"


def their_blocks(rows: Tensor, type_name: str) -> Tensor:
    """float32 [rows, n] -> uint8 [rows, row bytes], without a matrix of importance."""
    type = block_type(type_name)
    count, row = rows.shape
    out = torch.empty(count, type.row_bytes(row), dtype=torch.uint8)
    quantize_chunk = ctypes.CDLL(str(_LIBRARIES / "libggml-base.so")).ggml_quantize_chunk
    quantize_chunk.restype = ctypes.c_size_t
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    rows = rows.contiguous()
    written = quantize_chunk(type.id, rows.data_ptr(), out.data_ptr(), 0, count, row, None)
    assert written == out.numel()
    return out


def their_file(source: Path, out: Path, file_type: int) -> Path:
    """The file quantised by llama.cpp itself."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = file_type, 1
    status = llama_cpp.llama_model_quantize(
        str(source).encode(), str(out).encode(), ctypes.byref(params)
    )
    assert status == 0, status
    return out


def their_log_probabilities(path: Path, tokens: Sequence[int]) -> Tensor:
    """[tokens, vocabulary] float32, with a float32 cache. Rounded keys would choose other experts
    where two are close. Limits of YaRN's range are those of the file."""
    model = llama_cpp.Llama(
        str(path),
        n_ctx=len(tokens),
        logits_all=True,
        n_threads=1,
        n_gpu_layers=0,
        verbose=False,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        yarn_beta_fast=-1.0,
        yarn_beta_slow=-1.0,
    )
    model.eval(list(tokens))
    logits = torch.from_numpy(np.array(model.scores[: len(tokens)], dtype=np.float32))
    model.close()
    return logits.log_softmax(-1)


def their_vectors(path: Path, prompts: Sequence[Sequence[int]], *, ranks: bool) -> np.ndarray:
    """float32 [prompts, n]: pooled states as the file states, or if it `ranks` what the head makes
    of them, in one batch for each prompt."""
    rank, stated = llama_cpp.LLAMA_POOLING_TYPE_RANK, llama_cpp.LLAMA_POOLING_TYPE_UNSPECIFIED
    longest = max(map(len, prompts))
    model = llama_cpp.Llama(
        str(path),
        embedding=True,
        pooling_type=rank if ranks else stated,
        n_ctx=longest,
        n_batch=longest,
        n_ubatch=longest,
        n_threads=1,
        n_gpu_layers=0,
        verbose=False,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
    )
    count = llama_cpp.llama_model_n_cls_out if ranks else llama_cpp.llama_model_n_embd
    vectors = []
    for tokens in prompts:
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        batch = llama_cpp.llama_batch_get_one(
            ctypes.cast(array, ctypes.POINTER(llama_cpp.llama_token)), len(tokens)
        )
        memory = llama_cpp.llama_get_memory(model.ctx)
        if memory is None:
            assert llama_cpp.llama_encode(model.ctx, batch) == 0
        else:
            llama_cpp.llama_memory_clear(memory, True)
            assert llama_cpp.llama_decode(model.ctx, batch) == 0
        found = llama_cpp.llama_get_embeddings_seq(model.ctx, 0)
        vectors.append([found[i] for i in range(count(model.model))])
    model.close()
    return np.array(vectors, dtype=np.float32)
