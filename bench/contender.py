"""The interface of a measured engine, and a wrapper that runs it in its own process."""

import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, Protocol, TypeVar, cast

TOP_K = 40
TOP_P = 0.9
TEMPERATURE = 0.8
P = ParamSpec("P")
Measured = TypeVar("Measured")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that are the same for all engines."""

    threads: int
    context_tokens: int
    sequences: int
    step_tokens: int


@dataclass(frozen=True, slots=True)
class Decoding:
    """Tokens that were sampled while all sequences were decoding, and the time for them."""

    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Scored:
    """A token of a text, its log-probability, and those of the most likely tokens at its place."""

    token: int
    logprob: float
    top: dict[int, float]

    @property
    def first_choice(self) -> int:
        return max(self.top, key=self.top.__getitem__)


class Contender(Protocol):
    """An engine with the model loaded. No prompt is used twice."""

    def prefill(self, prompt: Sequence[int]) -> float:
        """The seconds from the request to its first sampled token."""
        ...

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> Decoding:
        """Answers all prompts concurrently with `tokens` tokens each; the time excludes prefill."""
        ...

    def close(self) -> None: ...


class Inspectable(Contender, Protocol):
    """A contender that also returns log-probabilities."""

    def most_likely(self, prompt: Sequence[int], count: int) -> dict[int, float]:
        """The most likely next tokens and their log-probabilities."""
        ...

    def score(self, text: Sequence[int], count: int) -> list[Scored]:
        """Each token of the text except the first, with the `count` most likely ones at its
        place."""
        ...

    def answer(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """An answer of `tokens` tokens, each the most likely one."""
        ...


def isolated(build: Callable[P, Measured], *arguments: P.args, **options: P.kwargs) -> Measured:
    """What `build` makes, in its own process, so that contenders share neither threads nor memory.
    Only its public methods are there; their arguments and values are pickled."""
    return cast(Measured, _Isolated(partial(build, *arguments, **options)))


class _Isolated:
    """Passes calls of public methods to an object in another process."""

    def __init__(self, build: Callable[[], object]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_work, args=(theirs, build), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self._call, method)

    def close(self) -> None:
        self._connection.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()

    def _call(self, method: str, *arguments: object) -> Any:
        self._connection.send((method, arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            raise SystemExit("A measured engine has ended; its own message is above.") from None


def _work(connection: Connection, build: Callable[[], Any]) -> None:
    contender = build()
    connection.send(None)
    try:
        while True:
            method, given = connection.recv()
            connection.send(getattr(contender, method)(*given))
    except EOFError:
        contender.close()


class Clock:
    """Measures from the time at which all sequences are decoding, and counts the tokens after
    it."""

    def __init__(self, sequences: int) -> None:
        self._waiting = set(range(sequences))
        self._begun: float | None = None
        self._tokens = 0

    def saw(self, sequence: int, tokens: int) -> None:
        """A sequence has produced `tokens` more tokens."""
        if self._begun is not None:
            self._tokens += tokens
            return
        self._waiting.discard(sequence)
        if not self._waiting:
            self._begun = time.perf_counter()

    def stop(self) -> Decoding:
        assert self._begun is not None, "a sequence never began"
        return Decoding(self._tokens, time.perf_counter() - self._begun)


class Prompts:
    """Draws random prompts of tokens of a vocabulary, all different, so that prefix caches have no
    effect."""

    def __init__(self, vocab_size: int) -> None:
        self._random = random.Random(1)
        self._end = min(vocab_size, 100_000)

    def draw(self, tokens: int) -> list[int]:
        return [self._random.randrange(256, self._end) for _ in range(tokens)]


def in_turns(
    measure: Callable[[Measured], Value], first: Measured, second: Measured, rounds: int
) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """A value of each in every round. They take turns at being first."""
    values: tuple[list[Value], list[Value]] = [], []
    for number in range(rounds):
        for place in (0, 1) if number % 2 == 0 else (1, 0):
            values[place].append(measure((first, second)[place]))
    return tuple(values[0]), tuple(values[1])
