"""A chat longer than many contexts in llama.cpp, which shifts keys too, gives the tokens we
sample."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from model_zoo.registry import load
from runtime.engine.request import ContextShift, GenerationRequest, SamplingParams, StopRules
from runtime.kv.cache_types import CacheType
from tests.families.agreement import random_tokens
from tests.families.engine_runs import CPU, answers, running
from tests.families.text_families import TEXT_MODELS
from tests.peers.llama_cpp_library import llama_cpp
from tests.tiny_models import tiny_tokenizer

CONTEXT, KEEP, DROPPED, PROMPT, ANSWER = 60, 4, 28, 9, 300
VOCABULARY = tiny_tokenizer().get_vocab_size()
# In log-probabilities, by which the most likely token may differ. They keep rotated keys in float32
# and rotate them again at each shift; so do we.
TOLERANCE = 0.01


class TheirSequence:
    """One sequence in a context of llama.cpp with a float32 cache."""

    def __init__(self, model: ctypes.c_void_p) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_threads = 2 * CONTEXT, CONTEXT, 1
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(CONTEXT, 0, 1)
        self.length = 0

    def feed(self, tokens: Sequence[int]) -> np.ndarray:
        """The log-probabilities after the last token [vocabulary]."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row] = token, self.length + row
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
            batch.logits[row] = row == len(tokens) - 1
        assert llama_cpp.llama_decode(self._context, batch) == 0
        self.length += len(tokens)
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        found = torch.from_numpy(np.ctypeslib.as_array(logits, shape=(VOCABULARY,)).copy())
        return found.log_softmax(-1).numpy()

    def shift(self) -> None:
        """Drop `DROPPED` tokens after the first `KEEP`, as its server does."""
        assert llama_cpp.llama_memory_can_shift(self._memory)
        assert llama_cpp.llama_memory_seq_rm(self._memory, 0, KEEP, KEEP + DROPPED)
        llama_cpp.llama_memory_seq_add(self._memory, 0, KEEP + DROPPED, self.length, -DROPPED)
        self.length -= DROPPED

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)


@contextmanager
def their_sequence(path: Path) -> Iterator[TheirSequence]:
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert model, "llama.cpp cannot load the file"
    sequence = TheirSequence(model)
    try:
        yield sequence
    finally:
        sequence.close()
        llama_cpp.llama_model_free(model)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma2"])
def test_each_token_is_the_most_likely_one_in_llama_cpp(tmp_path: Path, family: str) -> None:
    path, prompt = tmp_path / "tiny.gguf", random_tokens(PROMPT, seed=2)
    TEXT_MODELS[family].write(path)
    model = load(path, device=CPU, dtype=torch.float32)
    shift = ContextShift(CONTEXT, KEEP)
    greedy = SamplingParams(temperature=0)
    request = GenerationRequest("a", tuple(prompt), StopRules(ANSWER), greedy, shift=shift)
    options = {"max_sequences": 1, "page_tokens": 4, "kv_dtype": CacheType.FLOAT32}
    with running(model, context_tokens=CONTEXT, **options) as engine:
        [delta] = answers(engine, [request], together=False)
    assert len(delta.tokens) == ANSWER
    shifts = 0
    with their_sequence(path) as theirs:
        found = theirs.feed(prompt)
        for number, token in enumerate(delta.tokens):
            assert found.max() - found[token] <= TOLERANCE, f"token {number}, {shifts} shifts"
            if theirs.length == CONTEXT - 1:  # the context is full with this token
                theirs.shift()
                shifts += 1
            found = theirs.feed([token])
    assert shifts == engine.statistics().shifts_total > 6
