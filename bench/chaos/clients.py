"""Clients that send requests continuously, measure gaps, and compare every answer."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx

from bench.chaos.questions import Question, ServerError
from bench.chaos.tally import Tally

TIMEOUT = httpx.Timeout(120.0, connect=5.0)
RETURN_S = 150.0  # an answer that is not repeated this long after its last cut counts as broken
PAUSE_S = 0.25


class CutError(Exception):
    """The connection was closed before the end of the answer. `began`: after some output."""

    def __init__(self, reason: str, *, began: bool = False) -> None:
        super().__init__(reason)
        self.began = began


class Clients:
    """Sends `questions` with known answers to one address."""

    def __init__(self, url: str, questions: list[Question], tally: Tally) -> None:
        self._questions = questions
        self._tally = tally
        self._known: dict[int, str] = {}
        self._received: dict[object, float] = {}  # time of the last output of each stream
        self._closing = False
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits)

    @contextmanager
    def streaming(self, count: int, r: random.Random) -> Iterator[None]:
        """Runs `count` concurrent streams in a thread; waits for unfinished ones at the end.

        First, each question is sent once while nothing is killed, which gives the expected answers.
        """
        with asyncio.Runner() as runner:
            runner.run(self._learn())
            with ThreadPoolExecutor(1) as thread:
                chances = [random.Random(r.random()) for _ in range(count)]
                asking = thread.submit(runner.run, self._ask_all(chances))
                try:
                    yield
                finally:
                    self._closing = True
                asking.result()

    def all_received_since(self, since: float) -> bool:
        """Whether every stream has received output since this time on the monotonic clock."""
        return all(heard > since for heard in list(self._received.values()))

    async def _learn(self) -> None:
        for number, question in enumerate(self._questions):
            self._known[number] = await self._answer(question)

    async def _ask_all(self, chances: list[random.Random]) -> None:
        try:
            await asyncio.gather(*map(self._ask_on, chances))
        finally:
            await self._client.aclose()

    async def _ask_on(self, r: random.Random) -> None:
        while not self._closing:
            await self._ask(r.randrange(len(self._questions)))

    async def _ask(self, number: int) -> None:
        self._tally.started += 1
        try:
            answer = await self._answer(self._questions[number])
        except ServerError as error:
            self._tally.note_broken(f"the server returned an error: {error}")
            return
        except CutError as cut:
            await self._ask_again(number, cut)
            return
        if answer != self._known[number]:
            self._tally.note_broken(f"another answer: {answer!r}, not {self._known[number]!r}")
            return
        self._tally.finished += 1

    async def _ask_again(self, number: int, cut: CutError) -> None:
        """Retries, as a client must after a lost connection."""
        lost = time.monotonic()
        if lost > self._tally.cuts_until:
            self._tally.note_broken(f"cut, though nothing on its way was killed: {cut}")
            return
        while time.monotonic() - lost < RETURN_S:
            await asyncio.sleep(PAUSE_S)
            try:
                answer = await self._answer(self._questions[number], lost)
            except (CutError, ServerError) as again:
                cut = CutError(str(again))
                if isinstance(again, CutError) and again.began:
                    lost = time.monotonic()
            else:
                if answer == self._known[number]:
                    self._tally.cut += 1
                    return
                self._tally.note_broken(f"another answer to a second try: {answer!r}")
                return
        self._tally.note_broken(f"cut, and not answered within {RETURN_S:g} s: {cut}")

    async def _answer(self, question: Question, lost: float | None = None) -> str:
        """The whole answer; gaps are noted. `lost`: the time at which the previous attempt lost its
        connection."""
        parts: list[str] = []
        stream, heard = object(), time.monotonic()
        streamed = question.body["stream"]
        if streamed:
            self._received[stream] = heard
        try:
            async with self._client.stream("POST", question.path, json=question.body) as response:
                async for line in self._lines(response):
                    if not (piece := question.piece(line)):
                        continue  # no output, such as a comment that keeps the connection open
                    now = time.monotonic()
                    parts.append(piece)
                    if len(parts) > 1:
                        self._tally.note_gap(heard, now)
                    elif lost is not None:
                        self._tally.note_return(lost, now, streamed=streamed)
                    elif streamed:
                        self._tally.note_first(heard, now)
                    heard = now
                    if streamed:
                        self._received[stream] = now
        except httpx.TransportError as error:
            raise CutError(f"{type(error).__name__} {error}", began=bool(parts)) from error
        except ValueError as error:
            raise CutError(f"a line ends early: {error}", began=bool(parts)) from error
        finally:
            self._received.pop(stream, None)
        return "".join(parts)

    async def _lines(self, response: httpx.Response) -> AsyncIterator[str]:
        """The lines of a response. An error page of the proxy means that an ingress was lost."""
        if response.status_code >= 500 and "json" not in response.headers.get("content-type", ""):
            raise CutError(f"status {response.status_code} from the proxy")
        async for line in response.aiter_lines():
            yield line
