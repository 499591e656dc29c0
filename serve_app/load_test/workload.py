"""The requests of a load test: their prompts, the lengths of their answers, and when they start."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from runtime.errors import ConfigurationError

_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work night point "
    "home water room mother area money story fact month lot right study book eye job word"
).split()
_LONGEST_LINE = 16 * 2**20  # of a file of prompts, in characters


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Lengths from `least` to `most`, uniformly distributed."""

    least: int
    most: int

    def draw(self, random: Random) -> int:
        return random.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A conversation, and the maximum number of tokens of its answer."""

    messages: list[dict[str, Any]]
    max_tokens: int


def random_requests(words: LengthRange, answers: LengthRange, seed: int) -> Iterator[LoadRequest]:
    """An endless iterator of prompts of random words. A server that got those of a seed before
    may have them in its prefix cache."""
    random = Random(seed)
    while True:
        text = " ".join(random.choices(_WORDS, k=words.draw(random)))
        yield LoadRequest([{"role": "user", "content": text}], answers.draw(random))


def requests_of_file(path: Path, answers: LengthRange, seed: int) -> Iterator[LoadRequest]:
    """An endless iterator over the conversations in a file of JSON lines. ConfigurationError for an
    invalid line: each has `prompt` or `messages`, and may have `max_tokens`."""
    random = Random(seed)
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = list(_numbered_lines(file, path))
    if not lines:
        raise ConfigurationError(f"{path} has no prompts.")
    documents = [_conversation(line, f"{path}, line {number}") for number, line in lines]
    for messages, most in itertools.cycle(documents):
        yield LoadRequest(messages, most or answers.draw(random))


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """An endless iterator of the starts of a Poisson process with `rate` starts per second, in
    seconds since its beginning."""
    random = Random(seed)
    return itertools.accumulate(random.expovariate(rate) for _ in itertools.count())


def _numbered_lines(file: Any, path: Path) -> Iterator[tuple[int, str]]:
    for number in itertools.count(1):
        line = file.readline(_LONGEST_LINE)
        if not line:
            return
        if len(line) == _LONGEST_LINE:
            raise ConfigurationError(f"{path}, line {number} is longer than 16 MiB.")
        if line.strip():
            yield number, line


def _conversation(line: str, place: str) -> tuple[list[dict[str, Any]], int | None]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigurationError(f"{place} is not JSON.") from None
    if not isinstance(document, dict) or ("prompt" in document) == ("messages" in document):
        raise ConfigurationError(f"{place} needs either `prompt` or `messages`.")
    most = document.get("max_tokens")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise ConfigurationError(f"{place}: `max_tokens` must be a positive integer.")
    if "prompt" in document:
        if not isinstance(document["prompt"], str):
            raise ConfigurationError(f"{place}: `prompt` must be a text.")
        return [{"role": "user", "content": document["prompt"]}], most
    messages = document["messages"]
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise ConfigurationError(f"{place}: `messages` must be a list of objects.")
    return messages, most
