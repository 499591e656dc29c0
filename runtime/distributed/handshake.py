"""Mutual proof that both ends of a connection know a token, without sending it.

The listener sends a nonce; the caller answers with its own nonce and its proof; the listener
answers with its proof. Each proof is an HMAC over both nonces, the purpose of the connection and
the role of the end, so it cannot be replayed on another connection, used for another purpose or
reflected. Challenge and response as in ISO/IEC 9798-4, with HMAC (RFC 2104).
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Literal

NONCE_BYTES = 32
DIGEST_BYTES = 32
# Part of each proof, so ends with different versions refuse each other.
_VERSION = b"caravan handshake 2"

Role = Literal["caller", "listener"]


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class Handshake:
    """The proofs of both ends of one connection. `purpose`: what the connection is used for."""

    token: str = field(repr=False)
    purpose: str
    listener_nonce: bytes
    caller_nonce: bytes

    def __post_init__(self) -> None:
        """ValueError for a nonce of the wrong length, which would make the proof ambiguous."""
        for nonce in (self.listener_nonce, self.caller_nonce):
            if len(nonce) != NONCE_BYTES:
                raise ValueError(f"A nonce has {NONCE_BYTES} bytes, not {len(nonce)}.")

    def proof(self, role: Role) -> bytes:
        purpose = self.purpose.encode()
        head = _VERSION + role.encode().ljust(16, b"\0") + len(purpose).to_bytes(4, "big")
        proved = head + purpose + self.listener_nonce + self.caller_nonce
        return hmac.digest(self.token.encode(), proved, hashlib.sha256)

    def proved(self, role: Role, digest: bytes) -> bool:
        """Whether `digest` is the proof of the end with this role; compared in constant time."""
        return hmac.compare_digest(digest, self.proof(role))
