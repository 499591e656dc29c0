"""Pauses between tries: how they grow and spread."""

import random
from itertools import pairwise

from serve_app.transport.pauses import Pauses


def test_pauses_double_up_to_the_longest_and_begin_again_after_a_success() -> None:
    random.seed(0)
    pauses, longest = Pauses(0.1, 0.5), [0.1, 0.2, 0.4, 0.5, 0.5]
    for _ in range(2):
        assert all(most / 2 <= pauses.take() <= most for most in longest)
        pauses.reset()


def test_clients_that_lost_a_process_together_do_not_try_again_together() -> None:
    random.seed(0)
    for client in (clients := [Pauses(0.05, 1.0) for _ in range(100)]):
        client.take()
    seconds = sorted(client.take() for client in clients)
    assert seconds[0] < 0.06 and seconds[-1] > 0.09
    assert max(b - a for a, b in pairwise(seconds)) < 0.01
