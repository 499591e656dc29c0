"""The rows of a step that score the next token of their prompt, and the results by chunk."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.engine.request import Alternative, Sampled
from runtime.engine.step_plan import Chunk
from runtime.worker.model import RowSpan


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """`count` scoring rows of the chunk `index`, with `alternatives` alternatives each; `tokens`:
    the scored tokens. `count` is 0 for the last chunk of a prompt after which nothing is
    sampled."""

    index: int
    tokens: tuple[int, ...]
    alternatives: int


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """The scoring rows of a step, in the order of `parts`, and the largest `alternatives`."""

    rows: tuple[int, ...]
    parts: tuple[ScoredChunk, ...]

    @property
    def alternatives(self) -> int:
        return max((part.alternatives for part in self.parts), default=0)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """logprobs [rows] float32 of tokens; top_tokens and top_logprobs [rows, alternatives]: the most
    likely ones."""

    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor

    @classmethod
    def joined(cls, blocks: Sequence["TokenScores"]) -> "TokenScores":
        return cls(
            torch.cat([block.logprobs for block in blocks]),
            torch.cat([block.top_tokens for block in blocks]),
            torch.cat([block.top_logprobs for block in blocks]),
        )


def plan_scores(chunks: Sequence[Chunk], spans: Sequence[RowSpan]) -> ScoredStep:
    """`spans`: the rows of each chunk."""
    rows: list[int] = []
    parts = []
    for index, (chunk, span) in enumerate(zip(chunks, spans, strict=True)):
        request = chunk.sequence.request
        if request.prompt_logprobs is None or not (chunk.scores or not request.draws):
            continue
        rows += [span.begin + position - chunk.start for position in chunk.scores]
        tokens = request.prompt[chunk.scores.start + 1 : chunk.scores.stop + 1]
        parts.append(ScoredChunk(index, tokens, request.prompt_logprobs))
    return ScoredStep(tuple(rows), tuple(parts))


def by_chunk(step: ScoredStep, scores: TokenScores | None) -> dict[int, tuple[Sampled, ...] | None]:
    """The scored tokens of each chunk by its index; None if its logits are not finite."""
    rows = score_rows(scores)
    found: dict[int, tuple[Sampled, ...] | None] = {}
    begin = 0
    for part in step.parts:
        end = begin + len(part.tokens)
        scored = list(zip(part.tokens, rows[begin:end], strict=True))
        finite = not any(isnan(row.logprob) for _, row in scored)
        sampled = (
            Sampled(token, row.logprob, row.alternatives(part.alternatives))
            for token, row in scored
        )
        found[part.index] = tuple(sampled) if finite else None
        begin = end
    return found


class ScoreRow(NamedTuple):
    """A row's log-probability, its most likely tokens, and their log-probabilities."""

    logprob: float
    top_tokens: list[int]
    top_logprobs: list[float]

    def alternatives(self, count: int) -> tuple[Alternative, ...]:
        """At most `count` of the most likely tokens."""
        return tuple(map(Alternative, self.top_tokens[:count], self.top_logprobs[:count]))


def score_rows(scores: TokenScores | None) -> list[ScoreRow]:
    if scores is None:
        return []
    columns = (scores.logprobs, scores.top_tokens, scores.top_logprobs)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [ScoreRow(*row) for row in rows]
