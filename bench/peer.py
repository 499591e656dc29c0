"""Runs the same model in llama.cpp, through the low-level interface of llama-cpp-python."""

import ctypes
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np

from bench.contender import TEMPERATURE, TOP_K, TOP_P, Clock, Decoding, Scored, Setting

LOG_LEVEL_ERROR = 4
SCORED_AT_ONCE = 128  # rows of logits, each of the whole vocabulary


def system_info() -> str:
    """What llama.cpp says of its build, for example "AVX2 = 1 | AVX512 = 1 |"."""
    return llama_cpp.llama_print_system_info().decode()


class LlamaCpp:
    """One context; each sequence has its own sequence id and cache."""

    def __init__(self, path: Path, setting: Setting) -> None:
        llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        assert self._model, f"llama.cpp cannot load {path}"
        self._context = llama_cpp.llama_init_from_model(self._model, _context_params(setting))
        assert self._context, "llama.cpp cannot make a context"
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._step_tokens = setting.step_tokens
        self._batch = llama_cpp.llama_batch_init(setting.step_tokens, 0, 1)
        self._sampler = _sampler()
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def prefill(self, prompt: Sequence[int]) -> float:
        self._forget()
        begin = time.perf_counter()
        self._prompt(0, prompt)
        self._sample(-1)
        return time.perf_counter() - begin

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> Decoding:
        self._forget()
        clock = Clock(len(prompts))
        last = []
        for sequence, prompt in enumerate(prompts):
            self._prompt(sequence, prompt)
            last.append(self._sample(-1))
            clock.saw(sequence, 1)
        for step in range(tokens - 1):
            rows = [(token, len(prompts[s]) + step, s, True) for s, token in enumerate(last)]
            self._run(rows)
            last = [self._sample(row) for row in range(len(rows))]
            for sequence in range(len(last)):
                clock.saw(sequence, 1)
        return clock.stop()

    def most_likely(self, prompt: Sequence[int], count: int) -> dict[int, float]:
        self._forget()
        self._prompt(0, prompt)
        logprobs = self._logprobs(-1)
        best = np.argsort(-logprobs)[:count]
        return {int(token): float(logprobs[token]) for token in best}

    def score(self, text: Sequence[int], count: int) -> list[Scored]:
        self._forget()
        scored = []
        for begin in range(0, len(text) - 1, SCORED_AT_ONCE):
            rows = range(begin, min(begin + SCORED_AT_ONCE, len(text) - 1))
            self._run([(text[row], row, 0, True) for row in rows])
            for index, row in enumerate(rows):
                logprobs = self._logprobs(index)
                best = np.argpartition(-logprobs, count)[:count]
                top = {int(token): float(logprobs[token]) for token in best}
                scored.append(Scored(text[row + 1], float(logprobs[text[row + 1]]), top))
        return scored

    def answer(self, prompt: Sequence[int], tokens: int) -> list[int]:
        self._forget()
        self._prompt(0, prompt)
        answer: list[int] = []
        while len(answer) < tokens:
            answer.append(int(self._logprobs(-1).argmax()))
            self._run([(answer[-1], len(prompt) + len(answer) - 1, 0, True)])
        return answer

    def turns(
        self, prompt: Sequence[int], answer_tokens: int, more: Sequence[int]
    ) -> tuple[float, float]:
        """Like `Caravan.turns`; the second turn continues the sequence of the first, as in
        llama.cpp's server."""
        first = self.prefill(prompt)
        answer = self.answer(prompt, answer_tokens)
        end = len(prompt) + len(answer)
        begin = time.perf_counter()
        last = len(more) - 1
        self._run([(token, end + i, 0, i == last) for i, token in enumerate(more)])
        self._sample(-1)
        return first, time.perf_counter() - begin

    def close(self) -> None:
        llama_cpp.llama_sampler_free(self._sampler)
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def _forget(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)

    def _prompt(self, sequence: int, prompt: Sequence[int]) -> None:
        last = len(prompt) - 1
        rows = [(token, i, sequence, i == last) for i, token in enumerate(prompt)]
        for begin in range(0, len(rows), self._step_tokens):
            self._run(rows[begin : begin + self._step_tokens])

    def _run(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Runs one step. rows: (token, position, sequence, whether logits are needed)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = wanted
        failed = llama_cpp.llama_decode(self._context, batch)
        assert not failed, f"llama_decode returned {failed}"

    def _logprobs(self, row: int) -> np.ndarray:
        """[vocabulary] float64"""
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        logits = np.ctypeslib.as_array(pointer, (self._vocab_size,)).astype(np.float64)
        logits -= logits.max()
        return logits - np.log(np.exp(logits).sum())

    def _sample(self, row: int) -> int:
        return llama_cpp.llama_sampler_sample(self._sampler, self._context, row)


def _context_params(setting: Setting) -> llama_cpp.llama_context_params:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = setting.context_tokens * setting.sequences
    params.n_batch = setting.step_tokens
    params.n_ubatch = setting.step_tokens
    params.n_seq_max = setting.sequences
    params.n_threads = setting.threads
    params.n_threads_batch = setting.threads
    return params


def _sampler() -> int:
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for step in (
        llama_cpp.llama_sampler_init_top_k(TOP_K),
        llama_cpp.llama_sampler_init_top_p(TOP_P, 1),
        llama_cpp.llama_sampler_init_temp(TEMPERATURE),
        llama_cpp.llama_sampler_init_dist(1),
    ):
        llama_cpp.llama_sampler_chain_add(chain, step)
    return chain


@llama_cpp.llama_log_callback
def _log(level: int, text: bytes, _user_data: object) -> None:
    if level == LOG_LEVEL_ERROR:
        sys.stderr.write(text.decode(errors="replace"))
