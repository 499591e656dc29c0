"""Limits of the sampling parameters of a request."""

from runtime.engine.request import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BARRED_TOKENS,
    MAX_LOGIT_BIASES,
    MAX_PROMPT_LOGPROBS,
    GenerationRequest,
    SamplingParams,
)
from runtime.errors import RequestError


def check_sampling(request: GenerationRequest, vocab_size: int) -> None:
    """Raises RequestError."""
    sampling = request.sampling
    _check_vocabulary(request, vocab_size)
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES or len(sampling.barred) > MAX_BARRED_TOKENS:
        raise RequestError(
            f"The request biases {len(sampling.logit_bias):,} tokens and bars "
            f"{len(sampling.barred):,}; at most {MAX_LOGIT_BIASES} and {MAX_BARRED_TOKENS} are "
            "accepted."
        )
    longest = max(map(len, sampling.bad_words), default=0)
    if len(sampling.bad_words) > MAX_BAD_WORDS or longest > MAX_BAD_WORD_TOKENS:
        raise RequestError(
            f'"bad_words" has {len(sampling.bad_words):,} words, with and without a leading space, '
            f"of up to {longest:,} tokens; {MAX_BAD_WORDS} of up to {MAX_BAD_WORD_TOKENS} tokens "
            "are accepted."
        )
    _check_allowed(sampling, len(request.prompt))
    scores = request.prompt_logprobs
    if scores is not None and len(request.prompt) * (1 + scores) > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"The prompt has {len(request.prompt):,} tokens, of each of which {1 + scores} "
            f"log-probabilities are requested; a request may have {MAX_PROMPT_LOGPROBS:,} in "
            "total. Request fewer alternatives or shorten the prompt."
        )


def _check_vocabulary(request: GenerationRequest, vocab_size: int) -> None:
    sampling = request.sampling
    largest = int.from_bytes(sampling.allowed, "little").bit_length() - 1
    for name, tokens in (
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("stop_token_ids", request.stop.reported),
        ("allowed_token_ids", [max(largest, 0)]),
        ("bad_words", [token for word in sampling.bad_words for token in word]),
    ):
        outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if outside is not None:
            raise RequestError(
                f'"{name}" has the token id {outside}, which is outside the vocabulary of '
                f"{vocab_size:,} tokens."
            )


def _check_allowed(sampling: SamplingParams, prompt_tokens: int) -> None:
    """RequestError if the other parameters exclude every allowed token at the first position."""
    if not sampling.allowed:
        return
    left = int.from_bytes(sampling.allowed, "little")
    excluded = {word[0] for word in sampling.bad_words if len(word) == 1}
    if sampling.barred_until > prompt_tokens:
        excluded.update(sampling.barred)
    for token in excluded:
        left &= ~(1 << token)
    if not left:
        raise RequestError(
            '"allowed_token_ids" has no token that "bad_words" and "min_tokens" leave.'
        )
