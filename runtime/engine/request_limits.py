"""Which requests an engine accepts, with their limits cut to those of the engine."""

from dataclasses import replace

from runtime.engine.engine import EngineLimits
from runtime.engine.fairness import may_enter
from runtime.engine.request import GenerationRequest
from runtime.engine.sampling_limits import check_sampling
from runtime.errors import OverloadedError, PromptTooLongError, RequestError


def admissible(
    request: GenerationRequest, limits: EngineLimits, *, live: int, own: int = 0
) -> GenerationRequest:
    """The request with `max_tokens`, or the context of its shift, cut to the context of the engine.
    Raises RequestError or OverloadedError.

    `live`: running and waiting requests; `own`: those of the request's tenant among them.
    """
    length = len(request.prompt)
    if length == 0:
        raise RequestError("The prompt has no tokens.")
    if not all(0 <= token < limits.vocab_size for token in request.known):
        raise RequestError(
            f"The prompt has a token id outside the vocabulary of {limits.vocab_size:,} tokens."
        )
    check_sampling(request, limits.vocab_size)
    shift, context_tokens = request.shift, limits.context_tokens
    if shift is not None:
        context_tokens = min(context_tokens, shift.context_tokens)
        request = replace(request, shift=replace(shift, context_tokens=context_tokens))
    room = context_tokens - length
    if room < request.draws:
        raise PromptTooLongError(
            f"The prompt has {length:,} tokens; the context holds {context_tokens:,}"
            f"{', one of them for the answer' if request.draws else ''}. Shorten the prompt or "
            "raise `context_tokens`."
        )
    if request.images and not limits.image_rows:
        raise RequestError("The model does not support images. Leave them out.")
    _check_spans(request, limits)
    images = sum(span.cross_rows > 0 for span in request.spans)
    if limits.most_images is not None and images > limits.most_images:
        raise RequestError(
            f"The conversation has {images:,} images; the model accepts {limits.most_images:,}. "
            "Leave some out."
        )
    if request.resume is None:  # resumed requests are never refused
        check_capacity(limits, live=live, own=own)
    if not request.draws:
        return request
    stop = request.stop
    if shift is None:
        stop = replace(stop, max_tokens=min(stop.max_tokens, room))
    sampled = len(request.known) - length
    if sampled >= stop.max_tokens:
        raise RequestError(
            f"The answer already has {sampled:,} tokens; it may have {stop.max_tokens:,}."
        )
    return replace(request, stop=stop)


def check_capacity(limits: EngineLimits, *, live: int, own: int) -> None:
    """OverloadedError: the engine has no room for another request of a tenant; see `admissible`."""
    if live >= limits.max_live:
        raise OverloadedError(
            f"{live:,} requests are running or waiting, the most that this replica accepts. "
            "Retry later."
        )
    if not may_enter(own, live, limits.max_live, reserved=limits.slots):
        raise OverloadedError(
            f"{own:,} requests of this client are running or waiting; the remaining "
            f"{limits.max_live - live:,} places are reserved for other clients. Retry later."
        )


def _check_spans(request: GenerationRequest, limits: EngineLimits) -> None:
    """Only a bug in the caller violates these conditions, which would fail all requests."""
    ends = [0, *(span.end for span in request.spans)]
    starts = [*(span.start for span in request.spans), len(request.prompt)]
    assert all(end <= start for end, start in zip(ends, starts, strict=True)), "spans overlap"
    longest = limits.step_tokens or len(request.prompt)
    assert all(span.length <= longest for span in request.spans if span.whole), "too long a span"
    rows = {image.digest: image.rows for image in request.images}
    assert all(count <= limits.image_rows for count in rows.values()), "too large an image"
    for span in request.spans:
        cross = span.cross_rows + span.cross_padding
        assert span.digest in rows or not cross, "an image is missing"
        used = cross or span.first_row + span.length
        assert used <= rows.get(span.digest, used), "an image with too few rows"
