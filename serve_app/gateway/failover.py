"""One task on its way over replicas: what its reader has, what was lost, when to give up."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runtime.engine.request import ResumeState, Usage
from runtime.errors import OverloadedError, ReplicaLostError
from serve_app.gateway.tasks import ChatDelta, ChatTask, Task
from serve_app.transport.client import SILENCE_S
from serve_app.transport.wire import Address

# A task that was at work on so many replicas when they died is taken for the reason.
MOST_DEATHS = 2
# With so many more tokens drawn, it has passed whatever was being computed when a replica died:
# what its reader had not got yet, with two steps in flight.
CLEARING_TOKENS = 3
MOST_REFUSALS = 3
# A task that waits is moved no more often: each time it gives up its place.
MOST_MOVES = 3


@dataclass(frozen=True, slots=True)
class FailoverRules:
    """`max_retries`: how many replicas may be lost at work on one task. `silence_s`: a replica that
    says nothing for so long is lost."""

    max_retries: int = 2
    silence_s: float = SILENCE_S


class FailoverState:
    """What is known of one task between its arrival and its last delta.

    A replica's death is charged to every task that it was at work on. Charged tasks are on trial
    where they go on: one at a time, so that a second death has one cause. Whoever draws
    `CLEARING_TOKENS` more is acquitted. `refusal`: the last replica had no room for it.
    """

    def __init__(
        self, task: Task, rules: FailoverRules, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.replica = ""  # the one at work, or the last one
        self.next: Address | None = None  # found already
        self.refusal: OverloadedError | None = None
        self.fruitful = False  # whether that one has told anything
        self._task = task
        self._rules = rules
        self._clock = clock
        self._handed_over = 0  # how often, by replicas that had taken it
        self._retries = 0
        self._deaths: set[str] = set()  # replicas, since it was last acquitted
        self._gone: set[str] = set()
        self._full: set[str] = set()
        self._model: str | None = None  # what has begun the answer
        self._tokens: list[int] = []
        self._characters = 0
        self._scored = 0  # tokens whose log-probabilities the reader has
        self._again = 0  # tokens that are drawn here a second time
        self._drawn = 0  # by the replica at work
        self._asked_ns = self._attempt_ns = self._first_ns = clock()
        self._attempts = 0
        self._usage: Usage | None = None  # of the first delta

    @property
    def model(self) -> str:
        return self._task.model

    @property
    def task(self) -> Task:
        """What the next replica is asked."""
        if not isinstance(self._task, ChatTask) or not self.begun:
            return self._task
        tokens = tuple(self._tokens[: len(self._tokens) - self._again])
        had_turn = bool(self._tokens or self._retries)
        begun = ResumeState(tokens, self._characters, had_turn)
        return dataclasses.replace(self._task, begun=begun)

    @property
    def begun(self) -> bool:
        """Whether a replica has been at work on it, or was to be: then it has a claim to be
        answered."""
        return bool(self._tokens or self._retries or self._handed_over)

    @property
    def movable(self) -> bool:
        """True until the first token arrives, unless the request is quarantined."""
        waits = not self._tokens and not self._deaths and self._handed_over < MOST_MOVES
        return waits and isinstance(self._task, ChatTask)

    @property
    def trial_tokens(self) -> int:
        return CLEARING_TOKENS + self._again if self._deaths else 0

    @property
    def avoid(self) -> frozenset[str]:
        return frozenset(self._gone | self._full)

    @property
    def facts(self) -> dict[str, Any]:
        """For the log."""
        facts = {"request": self._task.id, "model": self.model, "replica": self.replica}
        return {**facts, "tokens": len(self._tokens)}

    def suits(self, address: Address) -> bool:
        """Whether the replica can go on with what has been answered."""
        return not self._tokens or address.model == self._model

    def begin(self, address: Address) -> None:
        """The next replica is asked."""
        if not self._tokens:
            self._model = address.model
        self.replica = address.replica
        self.fruitful = False
        self._attempts += 1
        self._attempt_ns = self._clock()
        self._drawn = 0
        scored = isinstance(self._task, ChatTask) and self._task.sampling.logprobs is not None
        self._again = len(self._tokens) - self._scored if scored else 0

    def taken(self, delta: ChatDelta) -> ChatDelta:
        """What the reader gets of a replica's delta."""
        self.fruitful = True
        if self._usage is None and delta.usage is not None:
            self._note_first(delta.usage)
        if self._again:
            repeated = min(self._again, len(delta.tokens))
            self._again -= repeated
            delta = dataclasses.replace(delta, tokens=delta.tokens[repeated:])
        self._drawn += len(delta.tokens)
        if self._drawn >= CLEARING_TOKENS:
            self._deaths.clear()
        self._tokens += delta.tokens
        self._characters += len(delta.text)
        self._scored += len(delta.logprobs)
        if delta.finish is not None and delta.usage is not None:
            return dataclasses.replace(delta, usage=self._whole(delta.usage))
        return delta

    def lost(self, reason: str, *, at_work: bool) -> None:
        """The replica is gone. ReplicaLostError: that was one too many."""
        self._gone.add(self.replica)
        if not at_work:
            return
        self._retries += 1
        self._deaths.add(self.replica)
        if len(self._deaths) >= MOST_DEATHS:
            raise ReplicaLostError(
                f"{MOST_DEATHS} replicas of model '{self.model}' died while they were at work on "
                "this request; it is given to no other one."
            )
        if self._retries > self._rules.max_retries:
            raise ReplicaLostError(
                f"The request has lost {self._retries} replicas of model '{self.model}'; "
                f"`failover.max_retries` is {self._rules.max_retries}. The last one: {reason}"
            )

    def hand_over(self, address: Address) -> None:
        """Another one than the replica that has the task goes on with it, at no charge."""
        self.next = address
        self._handed_over += 1

    def pass_over(self, replica: str) -> None:
        """The replica has done nothing wrong, but the task is not for it."""
        self._gone.add(replica)

    def refused(self, refusal: OverloadedError) -> None:
        """The replica has no room. Raised again where that is to be told."""
        self._full.add(self.replica)
        self.refusal = refusal
        if not self.begun and len(self._full) > MOST_REFUSALS:
            raise refusal

    def ask_full_ones_again(self) -> None:
        self._full.clear()
        self.refusal = None

    def _note_first(self, usage: Usage) -> None:
        """Until a replica was asked the task waited too, such as for one that had to start."""
        self._first_ns = self._clock()
        queue_ns = usage.queue_ns + self._attempt_ns - self._asked_ns
        self._usage = dataclasses.replace(usage, queue_ns=queue_ns)

    def _whole(self, last: Usage) -> Usage:
        """The cost as the reader sees it: going on elsewhere takes time and is no second prompt."""
        assert self._usage is not None
        if self._attempts == 1:
            return dataclasses.replace(last, queue_ns=self._usage.queue_ns)
        return dataclasses.replace(
            last,
            cached_tokens=self._usage.cached_tokens,
            queue_ns=self._usage.queue_ns,
            prompt_ns=self._usage.prompt_ns,
            decode_ns=self._clock() - self._first_ns,
        )
