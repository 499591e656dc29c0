"""Properties of the request in each slot that preparing a step needs, as columns."""

from collections.abc import Callable, Sequence
from weakref import ref

import numpy as np

from runtime.engine import sequence
from runtime.engine.request import GenerationRequest
from runtime.engine.step_plan import Chunk
from runtime.worker.logit_biases import used_entries
from runtime.worker.repetition import longest_repeat
from runtime.worker.restrictions import longest_word
from runtime.worker.sampler import Path, path_of


class SlotRequests:
    """Columns [slots], which are written when a request enters a slot, not in each step.

    draws: tokens are sampled; path: how; top_k: in path TOP, else 0; penalised: with penalties;
    alternatives: of log-probabilities, -1 for none; biases: number of biased tokens; repeats: the
    longest repetition that DRY reads, -1 without it; words, word_tokens: number of bad words, and
    tokens of the longest; limited: only some tokens are allowed; constrained: by a grammar; plain:
    no images, no pooling and no log-probabilities of the prompt. version: number of writes so far.
    """

    def __init__(self, *, slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.version = 0
        self._sequences: list[Callable[[], sequence.Sequence | None]] = [_nothing] * slots
        self.draws, self.penalised, self.plain = np.zeros((3, slots), np.bool_)
        self.limited, self.constrained = np.zeros((2, slots), np.bool_)
        self.words, self.word_tokens = np.zeros((2, slots), np.int64)
        self.path, self.top_k, self.alternatives, self.biases = np.zeros((4, slots), np.int64)
        self.repeats = np.full(slots, -1, np.int64)

    def update(self, chunks: Sequence[Chunk]) -> None:
        """Write the columns of slots whose request is new. Call it before reading the columns for
        the slots of `chunks`."""
        known = self._sequences
        for chunk in chunks:
            if known[chunk.slot]() is not chunk.sequence:
                known[chunk.slot] = ref(chunk.sequence)
                self._write(chunk.slot, chunk.sequence.request)

    def _write(self, slot: int, request: GenerationRequest) -> None:
        self.version += 1
        sampling = request.sampling
        path = path_of(sampling, self._vocab_size)
        self.draws[slot] = request.draws
        self.path[slot] = path
        self.top_k[slot] = sampling.top_k if path is Path.TOP else 0
        self.penalised[slot] = sampling.penalised
        self.alternatives[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        self.biases[slot] = used_entries(sampling) if sampling.biased else 0
        self.repeats[slot] = longest_repeat(sampling) if sampling.repetitive else -1
        self.words[slot], self.word_tokens[slot] = len(sampling.bad_words), longest_word(sampling)
        self.limited[slot] = bool(sampling.allowed)
        self.constrained[slot] = request.grammar is not None
        plain = request.pooling is None and request.prompt_logprobs is None
        self.plain[slot] = plain and not request.spans


def _nothing() -> None:
    """A weak reference to no sequence."""
