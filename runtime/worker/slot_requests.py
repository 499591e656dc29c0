"""Properties of the request in each slot that preparing a step needs, as columns."""

from collections.abc import Callable
from collections.abc import Sequence as Several
from weakref import ref

import numpy as np

from runtime.engine.request import GenerationRequest
from runtime.engine.sequence import Sequence
from runtime.engine.step_plan import Chunk
from runtime.vision.image_rows import axes_shift
from runtime.worker.logit_biases import used_entries
from runtime.worker.repetition import longest_repeat
from runtime.worker.restrictions import longest_word
from runtime.worker.sampler import SamplingPath, path_of

NEVER = np.iinfo(np.int64).max


class SlotRequests:
    """Columns [slots], written when a request enters a slot or its context changes; `constrained`
    in each step. `by_image`: rows see image rows, which differ between sequences (`CacheKind`).

    draws: tokens are sampled; path: how; top_k: in path TOP, else 0; penalised: with penalties;
    alternatives: of log-probabilities, -1 for none; biases: number of biased tokens; repeats: the
    longest repetition that DRY reads, -1 without it; words, word_tokens: number of bad words, and
    tokens of the longest; limited: only some tokens are allowed; constrained: by masks of the
    grammar; plain_from: the first position whose row, like all later ones, has the inputs of a text
    without images, NEVER with pooling or log-probabilities of the prompt; axes_shift: what is added
    to such a position on each axis. version: number of writes so far.
    """

    def __init__(self, *, slots: int, vocab_size: int, by_image: bool, position_axes: int) -> None:
        self._vocab_size, self._by_image, self._axes = vocab_size, by_image, position_axes
        self.version = 0
        self._sequences: list[Callable[[], Sequence | None]] = [_nothing] * slots
        self._epochs = [0] * slots
        self._with_grammar: set[int] = set()  # slots whose requests have a grammar
        self.draws, self.penalised = np.zeros((2, slots), np.bool_)
        self.plain_from, self.axes_shift = np.zeros((2, slots), np.int64)
        self.limited, self.constrained = np.zeros((2, slots), np.bool_)
        self.words, self.word_tokens = np.zeros((2, slots), np.int64)
        self.path, self.top_k, self.alternatives, self.biases = np.zeros((4, slots), np.int64)
        self.repeats = np.full(slots, -1, np.int64)

    def update(self, chunks: Several[Chunk]) -> None:
        """Write the columns of slots whose request or context is new, and the column `constrained`.
        Call it before reading the columns for the slots of `chunks`."""
        known, epochs = self._sequences, self._epochs
        for chunk in chunks:
            slot = chunk.slot
            if known[slot]() is not chunk.sequence or epochs[slot] != chunk.epoch:
                known[slot], epochs[slot] = ref(chunk.sequence), chunk.epoch
                self.version += 1
                self._write(slot, chunk.sequence.request)
                self._write_images(slot, chunk.sequence)
        for slot in self._with_grammar:
            constrained = (found := known[slot]()) is not None and found.needs_masks
            if constrained != self.constrained[slot]:
                self.constrained[slot] = constrained
                self.version += 1

    def _write(self, slot: int, request: GenerationRequest) -> None:
        sampling = request.sampling
        path = path_of(sampling, self._vocab_size)
        self.draws[slot] = request.draws
        self.path[slot] = path
        self.top_k[slot] = sampling.top_k if path is SamplingPath.TOP else 0
        self.penalised[slot] = sampling.penalised
        self.alternatives[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        self.biases[slot] = used_entries(sampling) if sampling.biased else 0
        self.repeats[slot] = longest_repeat(sampling) if sampling.repetitive else -1
        self.words[slot], self.word_tokens[slot] = len(sampling.bad_words), longest_word(sampling)
        self.limited[slot] = bool(sampling.allowed)
        self.constrained[slot] = False
        if request.grammar is None:
            self._with_grammar.discard(slot)
        else:
            self._with_grammar.add(slot)

    def _write_images(self, slot: int, entered: Sequence) -> None:
        spans, request = entered.spans, entered.request
        never = request.pooling is not None or request.prompt_logprobs is not None
        never |= self._by_image and bool(spans)
        self.plain_from[slot] = NEVER if never else spans[-1].end if spans else 0
        self.axes_shift[slot] = axes_shift(spans, self._axes)


def _nothing() -> None:
    """A weak reference to no sequence."""
