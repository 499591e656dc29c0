"""State of one task across the replicas that answer it: its output so far, losses and limits."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runtime.engine.request import ResumeState, Usage
from runtime.errors import OverloadedError, ReplicaLostError
from serve_app.messages.tasks import ChatDelta, ChatTask, Task
from serve_app.transport.client import SILENCE_S
from serve_app.transport.wire import Address

# A replica that dies at a fixed position of an answer may first repeat the tokens that it had
# computed but not delivered, at most two steps. More tokens than that are progress.
PROGRESS_TOKENS = 3
# Limit of all losses of a request, in multiples of `max_retries`, regardless of its progress.
TOTAL_FACTOR = 5
MAX_REFUSALS = 3
# Each move costs a queued task its position.
MAX_MOVES = 3


@dataclass(frozen=True, slots=True)
class FailoverRules:
    """`max_retries`: number of replicas that a task may lose in a row without progress.
    `silence_s`: a replica that sends nothing for this long counts as lost."""

    max_retries: int = 2
    silence_s: float = SILENCE_S


class FailoverState:
    """State of a task from its arrival to its last delta.

    A loss counts for every task that the replica was working on, because the cause is unknown. The
    count starts again when a replica delivers `PROGRESS_TOKENS` new tokens.
    """

    def __init__(
        self, task: Task, rules: FailoverRules, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.replica = ""  # replica of the current or latest attempt
        self.next_replica: Address | None = None  # already chosen for the next attempt
        self.refusal: OverloadedError | None = None  # the refusal of the latest replica
        self.answered = False  # whether the replica of the latest attempt sent a delta
        self._task = task
        self._rules = rules
        self._clock = clock
        self._handovers = 0
        self._losses = 0  # consecutive losses without progress
        self._total_losses = 0
        self._skipped: set[str] = set()
        self._full: set[str] = set()
        self._model = ""  # identity of the model that began the answer
        self._tokens: list[int] = []
        self._characters = 0
        self._scored = 0  # number of tokens whose log-probabilities the client has
        self._repeated = 0  # number of tokens that the current replica must sample again
        self._thinking = 0  # number of thinking tokens
        self._echoed = False
        self._new_tokens = 0  # number of new tokens in the current attempt
        self._arrived_ns = self._attempt_ns = self._first_ns = clock()
        self._attempts = 0
        self._usage: Usage | None = None  # usage in the first delta

    @property
    def model(self) -> str:
        return self._task.model

    @property
    def task(self) -> Task:
        """The task for the next replica, with the answer so far. The prompt is echoed once."""
        if not isinstance(self._task, ChatTask) or not self.begun:
            return self._task
        echo = self._task.echo and not self._echoed
        tokens = tuple(self._tokens[: len(self._tokens) - self._repeated])
        had_turn = bool(self._tokens or self._losses)
        resume = ResumeState(tokens, self._characters, had_turn)
        return dataclasses.replace(self._task, resume=resume, echo=echo)

    @property
    def begun(self) -> bool:
        """True once a replica has accepted the task. It is then never refused for lack of room."""
        return bool(self._tokens or self._losses or self._handovers)

    @property
    def movable(self) -> bool:
        """True for a queued chat request that has lost no replica and was not moved too often."""
        queued = not self._tokens and not self._losses and self._handovers < MAX_MOVES
        return queued and isinstance(self._task, ChatTask)

    @property
    def on_last_attempt(self) -> bool:
        """True if another loss without progress would end the task."""
        return 0 < self._losses == self._rules.max_retries

    @property
    def progressed(self) -> bool:
        return self._new_tokens >= PROGRESS_TOKENS

    @property
    def avoid(self) -> frozenset[str]:
        """Replicas that failed the task. They get it again if there is no other."""
        return frozenset(self._skipped | self._full)

    @property
    def identity(self) -> str | None:
        """`Address.model` of the replicas that can continue the answer; None before its first
        token: any may begin it."""
        return self._model if self._tokens else None

    @property
    def log_fields(self) -> dict[str, Any]:
        fields = {"task": self._task.id, "model": self.model, "replica": self.replica}
        return {**fields, "tokens": len(self._tokens)}

    def can_continue_on(self, address: Address) -> bool:
        """True if the replica serves the model that began the answer."""
        return self.identity is None or address.model == self.identity

    def begin_attempt(self, address: Address) -> None:
        if not self._tokens:
            self._model = address.model
        self.replica = address.replica
        self.answered = False
        self._attempts += 1
        self._attempt_ns = self._clock()
        self._new_tokens = 0
        scored = isinstance(self._task, ChatTask) and self._task.sampling.logprobs is not None
        self._repeated = len(self._tokens) - self._scored if scored else 0

    def accept(self, delta: ChatDelta) -> ChatDelta:
        """Records a replica's delta and returns it without tokens that the client already has."""
        self.answered = True
        if self._usage is None and delta.usage is not None:
            self._note_first(delta.usage)
        if self._repeated:
            repeated = min(self._repeated, len(delta.tokens))
            self._repeated -= repeated
            delta = dataclasses.replace(
                delta,
                tokens=delta.tokens[repeated:],
                thinking_tokens=max(0, delta.thinking_tokens - repeated),
            )
        self._new_tokens += len(delta.tokens)
        if self._losses and self.progressed:
            self._losses = 0
        self._tokens += delta.tokens
        self._thinking += delta.thinking_tokens
        self._echoed |= delta.echo is not None
        self._characters += len(delta.text)
        self._scored += len(delta.logprobs)
        if delta.finish is not None and delta.usage is not None:
            return dataclasses.replace(delta, usage=self._total_usage(delta.usage))
        return delta

    def lose_replica(self, reason: str, *, at_work: bool) -> None:
        """Records the loss of the current replica. Raises ReplicaLostError at the limit.

        `at_work`: it may have been working on the task.
        """
        self._skipped.add(self.replica)
        if not at_work:
            return
        self._losses += 1
        self._total_losses += 1
        limit = self._rules.max_retries
        if self._losses > limit or self._total_losses > TOTAL_FACTOR * limit:
            raise ReplicaLostError(
                f"The request has lost {self._total_losses} replicas of model '{self.model}', "
                f"{self._losses} of them in a row; `failover.max_retries` is {limit}. "
                f"The last one: {reason}"
            )

    def hand_over(self, address: Address) -> None:
        """The next attempt is on `address`, and the current one does not count as a loss."""
        self.next_replica = address
        self._handovers += 1

    def skip(self, replica: str) -> None:
        self._skipped.add(replica)

    def record_refusal(self, refusal: OverloadedError) -> None:
        """Records that the replica has no room; raises `refusal` after too many of them."""
        self._full.add(self.replica)
        self.refusal = refusal
        if not self.begun and len(self._full) > MAX_REFUSALS:
            raise refusal

    def retry_full_replicas(self) -> None:
        self._full.clear()
        self.refusal = None

    def _note_first(self, usage: Usage) -> None:
        """Record the first usage. The time before the attempt, such as that of starting a replica,
        counts as queueing."""
        self._first_ns = self._clock()
        queue_ns = usage.queue_ns + self._attempt_ns - self._arrived_ns
        self._usage = dataclasses.replace(usage, queue_ns=queue_ns)

    def _total_usage(self, last: Usage) -> Usage:
        """The usage over all attempts: one prompt, and durations as the client observed them."""
        assert self._usage is not None
        last = dataclasses.replace(last, thinking_tokens=self._thinking)
        if self._attempts == 1:
            return dataclasses.replace(last, queue_ns=self._usage.queue_ns)
        return dataclasses.replace(
            last,
            cached_tokens=self._usage.cached_tokens,
            queue_ns=self._usage.queue_ns,
            prompt_ns=self._usage.prompt_ns,
            decode_ns=self._clock() - self._first_ns,
        )
