"""Replicas of a deployment that are called by name, without Ray."""

import asyncio
from collections.abc import Mapping
from typing import Any

from runtime.errors import CaravanError


class FakeCalls:
    """`answers`: what each replica answers, an error that it raises, or the event for which it
    waits before it answers with its name. Waiting for a replica while there is none starts those
    in `next_answers`. `called`: the name and the arguments of each call, in order."""

    def __init__(
        self, answers: Mapping[str, Any], *, next_answers: Mapping[str, Any] | None = None
    ) -> None:
        self.answers = dict(answers)
        self.next_answers = dict(next_answers or {})
        self.called: list[tuple[str, ...]] = []
        self.waits = 0

    @property
    def names(self) -> list[str]:
        return [*self.answers]

    async def call(self, replica: str, method: str, *arguments: Any) -> Any:
        self.called.append((replica, method, *arguments))
        answer = self.answers[replica]
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            return replica
        if isinstance(answer, CaravanError):
            raise answer
        return answer

    async def await_one(self) -> None:
        self.waits += 1
        self.answers = self.next_answers
