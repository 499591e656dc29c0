"""The results of launched steps: their copy to the host, and the result of each chunk."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from runtime.engine.request import (
    MAX_TOP_LOGPROBS,
    Alternative,
    DrawFailure,
    GenerationRequest,
    Pooled,
    Result,
    Sampled,
    Scored,
)
from runtime.engine.step_plan import Chunk
from runtime.worker.input_preparer import StepLimits
from runtime.worker.mask_worker import Unmasked
from runtime.worker.prompt_scores import ScoredStep, TokenScores, by_chunk, score_rows
from runtime.worker.sampler import Drawn

NOT_FINITE = DrawFailure("The model returned numbers that are not finite.")
NO_TOKEN = DrawFailure(
    "No token may follow: `allowed_token_ids`, `bad_words`, `min_tokens` and the form of the "
    "answer exclude all of them, or the model returned numbers that are not finite.",
    by_request=True,
)


@dataclass(frozen=True, slots=True)
class HostCopy:
    """The pinned buffer of a step's results, which are valid when the event `done` has occurred."""

    buffer: Tensor
    done: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class Launched:
    """A launched step. `drawing`: the chunk of each sampling row; `unmasked`: the rows that sampled
    without their mask; `pooling`: the chunk of each row of `vectors`, None without any; `scored`
    and `scores`: scores of prompts. `copy`: None if the device's memory is the host's."""

    chunks: tuple[Chunk, ...]
    drawing: tuple[int, ...]
    drawn: Drawn | None
    unmasked: Unmasked
    pooling: tuple[int, ...]
    vectors: Tensor | None
    scored: ScoredStep
    scores: TokenScores | None
    copy: HostCopy | None = None


class ResultCopier:
    """Copies the results of each step from a CUDA device to pinned memory, in one piece."""

    def __init__(self, limits: StepLimits, *, hidden: int, device: torch.device) -> None:
        self._device = device
        self._nbytes = result_bytes(limits, hidden=hidden)
        self._free = [self._pinned() for _ in range(2)]  # for two steps in flight

    def begin(self, launched: Launched) -> Launched:
        """Start the copy; the returned step has its tensors on the host, valid after `finish`."""
        parts, buffer = _tensors(launched), self._free.pop() if self._free else self._pinned()
        filled = [index for index, part in enumerate(parts) if part.numel()]
        filled.sort(key=lambda index: -parts[index].element_size())  # so that all are aligned
        if filled:
            packed = torch.cat([parts[index].reshape(-1).view(torch.uint8) for index in filled])
            buffer[: len(packed)].copy_(packed, non_blocking=True)
        parts = [part if part.numel() else torch.empty_like(part, device="cpu") for part in parts]
        begin = 0
        for index in filled:
            part, end = parts[index], begin + parts[index].nbytes
            parts[index] = buffer[begin:end].view(part.dtype).view(part.shape)
            begin = end
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(self._device))
        return _with_tensors(launched, parts, HostCopy(buffer, done))

    def finish(self, launched: Launched) -> tuple[Result, ...]:
        """Wait for the copy and return `outcomes`. The buffer is then free for another step."""
        assert launched.copy is not None
        launched.copy.done.synchronize()
        found = outcomes(launched)
        self._free.append(launched.copy.buffer)
        return found

    def _pinned(self) -> Tensor:
        return torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=True)


def result_bytes(limits: StepLimits, *, hidden: int) -> int:
    """Upper bound in bytes of a step's results: a token with scores for each sampling row, a
    vector for each slot, and scores of prompts."""
    scored = 4 + (8 + 4) * MAX_TOP_LOGPROBS
    drawn = limits.draws * (8 + 1 + scored)
    return drawn + limits.slots * 4 * hidden + limits.step_tokens * scored


def outcomes(launched: Launched) -> tuple[Result, ...]:
    """The results on the host, aligned with the chunks."""
    results: list[Result] = [None] * len(launched.chunks)
    if launched.drawn is not None:
        _store_drawn(launched, launched.drawn, results)
    if launched.vectors is not None:
        finite = launched.vectors.isfinite().all(dim=1).tolist()
        for index, vector, sound in zip(launched.pooling, launched.vectors, finite, strict=True):
            results[index] = Pooled(vector.numpy().tobytes()) if sound else NOT_FINITE
    for index, logprobs in by_chunk(launched.scored, launched.scores).items():
        found = results[index]
        assert not isinstance(found, Pooled | Scored)
        results[index] = NOT_FINITE if logprobs is None else Scored(logprobs, found)
    return tuple(results)


def _store_drawn(launched: Launched, drawn: Drawn, results: list[Result]) -> None:
    scores = iter(score_rows(drawn.scores))
    rows = zip(launched.drawing, drawn.tokens.tolist(), drawn.finite.tolist(), strict=True)
    for index, token, finite in rows:
        request = launched.chunks[index].sequence.request
        wanted = request.sampling.logprobs
        logprob, top = None, tuple[Alternative, ...]()
        if wanted is not None:
            score = next(scores)
            logprob, top = score.logprob, score.alternatives(wanted)
        results[index] = Sampled(token, logprob, top) if finite else _failure(request)
    for row, reason in launched.unmasked.items():
        results[launched.drawing[row]] = reason


def _failure(request: GenerationRequest) -> DrawFailure:
    """The reason why no token of a row is finite. A grammar alone always leaves one."""
    return NO_TOKEN if request.sampling.restricted else NOT_FINITE


def _tensors(launched: Launched) -> list[Tensor]:
    found: list[Tensor] = []

    def add(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    for part in (launched.drawn, launched.scores, launched.vectors):
        _mapped(part, add)
    return found


def _with_tensors(launched: Launched, tensors: Sequence[Tensor], copy: HostCopy) -> Launched:
    """`launched` with `tensors` in place of those that `_tensors` returns."""
    others = iter(tensors)
    drawn, scores, vectors = (
        _mapped(part, lambda _: next(others))
        for part in (launched.drawn, launched.scores, launched.vectors)
    )
    return replace(launched, drawn=drawn, scores=scores, vectors=vectors, copy=copy)


def _mapped(part: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A tensor, or a dataclass of tensors, with each of them changed, in order; None stays None."""
    if part is None or isinstance(part, Tensor):
        return None if part is None else change(part)
    return type(part)(*(_mapped(getattr(part, field.name), change) for field in fields(part)))
