"""What replicas report for the choice among them: their load, and prefixes of recent prompts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica's reported load. Totals count from its start; None and 0 mean unknown.

    `queued_tokens`: prompt tokens that are not computed yet. `slots`: maximum number of running
    sequences. `memory`: occupied share of the KV cache. `tokens_per_s`: measured prefill speed.
    `started`: number of requests that have produced their first token. `computed_tokens`: number of
    tokens that have entered the cache; `cache_tokens`: its capacity for later prompts.
    """

    queued_tokens: int = 0
    running: int = 0
    waiting: int = 0
    slots: int = 0
    memory: float = 0.0
    tokens_per_s: float | None = None
    started: int = 0
    computed_tokens: int = 0
    cache_tokens: int = 0

    @property
    def full(self) -> bool:
        """Whether queued requests wait for a slot or for memory instead of for prefill."""
        return self.waiting > 0 and (self.running >= self.slots or self.memory > 0.95)


@dataclass(frozen=True, slots=True)
class PrefixHashes:
    """Hashes of a prompt's prefixes, shortest first, with their lengths in tokens.

    Two prompts share a key exactly if they are equal up to that length. `tokens`: estimated length
    of the whole prompt.
    """

    keys: tuple[int, ...]
    ends: tuple[int, ...]
    tokens: int
