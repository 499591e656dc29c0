"""What an engine reports: its state, its speed and its totals."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Current state, recent speed, and totals since the start.

    `queued_tokens`: prompt tokens that can be computed now, and tokens of answers to recompute.
    Speed and waits come from `Throughput`; None before the first measurement.
    """

    waiting: int = 0
    running: int = 0
    slots: int = 0
    queued_tokens: int = 0
    pages_total: int = 0
    pages_owned: int = 0
    checkpoints_held: int = 0  # of recurrent states
    kv_occupancy: float = 0.0
    cacheable_tokens: int = 0  # capacity of the prefix cache
    images_waiting: int = 0  # being encoded, or queued for it
    tokens_per_s: float | None = None
    computed_tokens_total: int = 0  # of prompts
    first_tokens_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    completion_tokens_total: int = 0
    preemptions_total: int = 0
    shifts_total: int = 0
    steps_total: int = 0
    images_encoded_total: int = 0
    checkpoints_taken_total: int = 0
    checkpoint_hits_total: int = 0
    host_pages_stored_total: int = 0
    host_pages_restored_total: int = 0
    proposed_tokens_total: int = 0  # by speculation
    accepted_tokens_total: int = 0
    drafted_tokens_total: int = 0  # those of the proposed tokens that are of a draft model
    accepted_drafts_total: int = 0
