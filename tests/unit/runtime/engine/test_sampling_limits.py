"""The limits of sampling parameters of requests."""

import pytest

from runtime.engine.request import GenerationRequest, SamplingParams, StopRules
from runtime.engine.sampling_limits import check_sampling
from runtime.errors import RequestError

VOCAB = 64
ONLY_5_AND_9 = b"\x20\x02\0\0"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logit_bias": ((64, 1.0),)}, '"logit_bias" has the token id 64'),
        ({"logit_bias": tuple((n, 1.0) for n in range(301))}, "token id 64|at most 300"),
        ({"barred": (1,) * 213}, "at most 300 and 212"),
        ({"allowed": b"\0" * 8 + b"\x01\0\0\0"}, '"allowed_token_ids" has the token id 64'),
        ({"bad_words": ((1, 64),)}, '"bad_words" has the token id 64'),
        ({"bad_words": ((1,),) * 257}, "257 words, with and without a leading space"),
        ({"bad_words": ((1,) * 33,)}, "up to 33 tokens; 256 of up to 32 tokens"),
        ({"allowed": ONLY_5_AND_9, "bad_words": ((5,), (9,))}, "no token that"),
        ({"allowed": ONLY_5_AND_9, "barred": (5, 9), "barred_until": 4}, "no token that"),
    ],
)
def test_what_the_sampler_cannot_do_is_refused(changes, reason: str) -> None:
    request = GenerationRequest("a", (1, 2, 3), StopRules(5), SamplingParams(**changes))
    with pytest.raises(RequestError, match=reason):
        check_sampling(request, VOCAB)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"allowed": b"\0" * 4 + b"\0\0\0\x80"},
        {"allowed": ONLY_5_AND_9, "bad_words": ((5,), (9, 9))},
        {"allowed": ONLY_5_AND_9, "barred": (5, 9), "barred_until": 3},
        {"bad_words": ((1,) * 32,) * 256},
    ],
)
def test_the_largest_of_all_is_accepted(changes) -> None:
    check_sampling(
        GenerationRequest("a", (1, 2, 3), StopRules(5), SamplingParams(**changes)), VOCAB
    )
