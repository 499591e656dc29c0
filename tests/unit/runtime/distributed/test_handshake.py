"""The proof of a token: bound to both nonces, the purpose and the role; the token is never sent."""

from dataclasses import replace

import pytest

from runtime.distributed.handshake import DIGEST_BYTES, NONCE_BYTES, Handshake, new_nonce

TOKEN = "a token of some length"
HANDSHAKE = Handshake(TOKEN, "rank 1 of 2", bytes(NONCE_BYTES), b"\1" * NONCE_BYTES)


def test_each_end_recognises_the_proof_of_the_other() -> None:
    for role in ("caller", "listener"):
        assert HANDSHAKE.proved(role, HANDSHAKE.proof(role))
        assert len(HANDSHAKE.proof(role)) == DIGEST_BYTES


def test_a_proof_sent_back_does_not_prove_the_other_role() -> None:
    assert not HANDSHAKE.proved("listener", HANDSHAKE.proof("caller"))
    assert not HANDSHAKE.proved("caller", HANDSHAKE.proof("listener"))


@pytest.mark.parametrize(
    "change",
    [
        {"token": "another token"},
        {"purpose": "rank 2 of 2"},
        {"listener_nonce": b"\2" * NONCE_BYTES},
        {"caller_nonce": b"\2" * NONCE_BYTES},
        {"listener_nonce": b"\1" * NONCE_BYTES, "caller_nonce": bytes(NONCE_BYTES)},
    ],
)
def test_a_proof_is_invalid_in_another_handshake(change) -> None:
    other = replace(HANDSHAKE, **change)
    for role in ("caller", "listener"):
        assert not other.proved(role, HANDSHAKE.proof(role))


@pytest.mark.parametrize("digest", [b"", b"\0", bytes(DIGEST_BYTES), bytes(1000)])
def test_digests_of_any_length_that_are_wrong_are_refused(digest) -> None:
    assert not HANDSHAKE.proved("caller", digest)


@pytest.mark.parametrize("length", [0, NONCE_BYTES - 1, NONCE_BYTES + 1])
def test_a_nonce_of_another_length_is_refused(length) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        replace(HANDSHAKE, caller_nonce=bytes(length))


def test_the_token_is_not_in_a_representation() -> None:
    assert TOKEN not in repr(HANDSHAKE)


def test_nonces_are_fresh() -> None:
    assert len({new_nonce() for _ in range(100)}) == 100
