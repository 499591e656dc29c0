"""Sampling options of requests: names, types, ranges, and their translation for the engine."""

import dataclasses
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Self

from runtime.engine.request import MAX_TOP_LOGPROBS, SamplingParams
from runtime.errors import RequestError

SEED_LIMIT = 2**63
LONGEST = 2**63 - 1  # the largest integer in messages to replicas
LARGEST = 1_000_000
# Stop strings are searched for after every token.
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024


@dataclass(frozen=True, slots=True)
class Options:
    """Options of sampling and of the end of an answer; None: not given.

    `num_predict` below 1: limited by the context only. `num_keep`: number of tokens at the
    beginning that are kept when a prompt is truncated or the context shifts; below 0: as many as
    possible. `num_ctx` is at least 1. `seed` -1: random. `repeat_last_n` -1: the whole sequence.
    `top_k` 0 or -1: all tokens. `thinking_token_budget` -1: no limit.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repeat_last_n: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_predict: int | None = None
    num_keep: int | None = None
    num_ctx: int | None = None
    stop: tuple[str, ...] | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: tuple[str, ...] | None = None
    thinking_token_budget: int | None = None

    def over(self, base: Self) -> Self:
        """These options, with those of `base` where none is given."""
        return dataclasses.replace(base, **self.given())

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in self._items() if value is not None}

    def sampling(self, *, logprobs: int | None = None) -> SamplingParams:
        """`logprobs` as in SamplingParams. A random seed is chosen here, so that retries use it."""
        seed = secrets.randbelow(SEED_LIMIT) if self.seed in (None, -1) else self.seed
        assert seed is not None
        names = {field.name for field in dataclasses.fields(SamplingParams)}
        values = {name: value for name, value in self.given().items() if name in names}
        if values.get("repeat_last_n") == -1:
            values["repeat_last_n"] = None
        if values.get("top_k") == -1:
            values["top_k"] = 0
        return SamplingParams(**{**values, "seed": seed % SEED_LIMIT, "logprobs": logprobs})

    @property
    def max_tokens(self) -> int | None:
        return self.num_predict if self.num_predict is not None and self.num_predict > 0 else None

    def _items(self) -> list[tuple[str, Any]]:
        return [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]


OLLAMA_DEFAULTS = Options(temperature=0.8, top_k=40, top_p=0.9)
OPENAI_DEFAULTS = Options(temperature=1.0, top_k=0, top_p=1.0)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The type and range of an option. `unlimited`: also -1, which means that there is no limit."""

    type: type[int] | type[float]
    low: float = -math.inf
    high: float = math.inf
    unlimited: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high or (self.unlimited and value == -1)

    def __str__(self) -> str:
        low = f"at least {self.low:,}" * (self.low > -math.inf)
        high = f"at most {self.high:,}" * (self.high < LONGEST)
        return " and ".join(filter(None, (low, high))) + ", or -1 for no limit" * self.unlimited


# Options with the names of llama.cpp's server, in every protocol that has sampling options.
CHAIN_BOUNDS: Mapping[str, Bounds] = {
    "typical_p": Bounds(float, 0, 1),
    "top_n_sigma": Bounds(float, -1, LARGEST),
    "xtc_probability": Bounds(float, 0, 1),
    "xtc_threshold": Bounds(float, 0, 1),
    "dynatemp_range": Bounds(float, 0, LARGEST),
    "dynatemp_exponent": Bounds(float, 0, 100),
    "dry_multiplier": Bounds(float, 0, 100),
    "dry_base": Bounds(float, 1, 100),
    "dry_allowed_length": Bounds(int, 0, 128),
    "dry_penalty_last_n": Bounds(int, -1, LONGEST),
}
BOUNDS: Mapping[str, Bounds] = {
    "temperature": Bounds(float, 0, LARGEST),
    "top_k": Bounds(int, -1, LONGEST),
    "top_p": Bounds(float, 0, 1),
    "min_p": Bounds(float, 0, 1),
    "seed": Bounds(int, -SEED_LIMIT, LONGEST),
    "repeat_last_n": Bounds(int, -1, LONGEST),
    "repeat_penalty": Bounds(float, 0.01, 100),
    "presence_penalty": Bounds(float, -100, 100),
    "frequency_penalty": Bounds(float, -100, 100),
    "num_predict": Bounds(int, -2, LONGEST),
    "num_keep": Bounds(int, -SEED_LIMIT, LONGEST),
    "num_ctx": Bounds(int, -1, LONGEST),
    "thinking_token_budget": Bounds(int, 0, LONGEST, unlimited=True),
    **CHAIN_BOUNDS,
}
# The keys of `general.sampling` by the names of options.
_RECOMMENDED = {
    "temperature": "temp",
    "repeat_penalty": "penalty_repeat",
    "repeat_last_n": "penalty_last_n",
} | {name: name for name in "top_k top_p min_p xtc_probability xtc_threshold".split()}
OPENAI_BOUNDS: Mapping[str, Bounds] = {
    "temperature": Bounds(float, 0, 2),
    "top_p": BOUNDS["top_p"],
    "top_k": BOUNDS["top_k"],
    "min_p": BOUNDS["min_p"],
    "repetition_penalty": BOUNDS["repeat_penalty"],
    "repeat_penalty": BOUNDS["repeat_penalty"],
    "repeat_last_n": BOUNDS["repeat_last_n"],
    "seed": BOUNDS["seed"],
    "presence_penalty": Bounds(float, -2, 2),
    "frequency_penalty": Bounds(float, -2, 2),
    # -1 as in llama.cpp's server and Ollama.
    "max_tokens": Bounds(int, 1, LONGEST, unlimited=True),
    "max_completion_tokens": Bounds(int, 1, LONGEST, unlimited=True),
    "min_tokens": Bounds(int, 0, LONGEST),
    "thinking_token_budget": BOUNDS["thinking_token_budget"],
    "priority": Bounds(int, -1000, 1000),
    "top_logprobs": Bounds(int, 0, MAX_TOP_LOGPROBS),
    "logprobs": Bounds(int, 0, MAX_TOP_LOGPROBS),
    **CHAIN_BOUNDS,
}

# Options whose values Ollama's sampler replaces by the nearest one in this range.
_CLAMPED: Mapping[str, tuple[float, float]] = {
    "temperature": (0, math.inf),
    "top_k": (-1, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
}
# Accepted without effect: loading and performance are configured on the server.
_HARMLESS = frozenset(
    {"num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread", "numa"}
    | {"low_vram", "f16_kv", "logits_all", "vocab_only", "use_mlock", "penalize_newline"}
    | {"embedding_only", "draft_num_predict", "mirostat_tau", "mirostat_eta"}
)
# Options that Ollama has removed and ignores, with the value that turns them off.
_REMOVED: Mapping[str, Any] = {"tfs_z": 1, "mirostat": 0}


def unknown_option(name: str, known: Iterable[str]) -> RequestError:
    near = get_close_matches(name[:80], sorted(known), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return RequestError(f'option "{name[:80]}" is not known{hint}')


def _refuse(name: str) -> None:
    raise unknown_option(name, [*BOUNDS, "stop", "dry_sequence_breakers"])


def read_options(raw: Mapping[str, Any], *, unknown: Callable[[str], None] = _refuse) -> Options:
    """Ollama's options by name. RequestError names the option, its value and its range.

    `unknown`: called with the name of each unknown or removed option.
    """
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if value is None or name in _HARMLESS:
            continue
        if name == "stop":
            values["stop"] = stop_strings(value)
        elif name == "dry_sequence_breakers":
            values[name] = sequence_breakers(value, noun="option")
        elif name in BOUNDS:
            values[name] = number(name, value, BOUNDS[name], noun="option")
        elif name not in _REMOVED or value != _REMOVED[name]:
            unknown(name)
    if values.get("num_ctx", 1) < 1:  # clients send 0 and -1 for the server's default
        del values["num_ctx"]
    return Options(**values)


def clamped(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Ollama's options by name, with the values that Ollama itself clamps in their range."""
    return {name: _clamped(name, value) for name, value in raw.items()}


def _clamped(name: str, value: Any) -> Any:
    if name not in _CLAMPED or type(value) not in (int, float):
        return value
    low, high = _CLAMPED[name]
    return min(max(value, low), high)


def served_options(raw: Mapping[str, Any]) -> tuple[Options, tuple[str, ...]]:
    """The supported options among a model's own parameters, and the errors of the others."""
    options, refused = Options(), []
    for name, value in clamped(raw).items():
        try:
            options = read_options({name: value}).over(options)
        except RequestError as error:
            refused.append(str(error))
    return options, tuple(refused)


def recommended_options(metadata: Mapping[str, Any]) -> Options:
    """The options that a GGUF file's metadata recommend, `general.sampling.*`, as llama.cpp and
    Ollama use them; without those that are out of range."""
    stated = {name: metadata.get(f"general.sampling.{key}") for name, key in _RECOMMENDED.items()}
    options, _ = served_options(stated)
    return options


def number(name: str, value: Any, bounds: Bounds, *, noun: str = "field") -> int | float:
    """A JSON number within the bounds. An integer option may be written as 40.0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        wanted = "integer" if bounds.type is int else "float32"
        raise RequestError(f'{noun} "{name}" must be of type {wanted}')
    if bounds.type is int and value % 1:
        raise RequestError(f'{noun} "{name}" is {str(value)[:40]}; it must be an integer')
    if value != value or value not in bounds:
        wanted = f"at most {LONGEST:,}" if value > bounds.high == LONGEST else str(bounds)
        raise RequestError(f'{noun} "{name}" is {str(value)[:40]}; it must be {wanted}')
    return bounds.type(value)


def sequence_breakers(value: Any, *, noun: str) -> tuple[str, ...]:
    """The sequence breakers: ASCII characters, each of which is part of a single token in every
    vocabulary."""
    given = value if isinstance(value, list) else [None]
    if len(given) > 128 or not all(
        isinstance(each, str) and len(each) == 1 and each.isascii() for each in given
    ):
        raise RequestError(
            f'{noun} "dry_sequence_breakers" must be a list of at most 128 single ASCII characters'
        )
    return tuple(sorted(set(given)))


def stop_strings(value: Any, *, noun: str = "option", name: str = "stop") -> tuple[str, ...]:
    if not isinstance(value, list):
        raise RequestError(f'{noun} "{name}" must be of type array')
    if not all(isinstance(item, str) for item in value):
        raise RequestError(f'{noun} "{name}" must be of an array of strings')
    if not all(value):
        raise RequestError(f'{noun} "{name}" has an empty string, which would end every answer')
    if len(value) > MAX_STOP_STRINGS or max(map(len, value), default=0) > MAX_STOP_CHARACTERS:
        raise RequestError(
            f'{noun} "{name}" may hold at most {MAX_STOP_STRINGS} strings of '
            f"{MAX_STOP_CHARACTERS:,} characters each"
        )
    return tuple(value)
