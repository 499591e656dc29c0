"""Shared by the OpenAI-compatible endpoints: common fields, frames, token usage."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from pydantic import Field

from model_zoo.grammars.constraint import OutputForm
from runtime.errors import RequestError
from serve_app.api.chat_task import chat_task
from serve_app.api.choices import BestOf, whole_choices
from serve_app.api.fields import Body, harmless, unserved
from serve_app.api.json_lines import EVENTS, encoded
from serve_app.api.output_forms import openai_form
from serve_app.api.refusals import Refusal
from serve_app.config.options import (
    CHAIN_BOUNDS,
    OPENAI_BOUNDS,
    OPENAI_DEFAULTS,
    Options,
    number,
    sequence_breakers,
    stop_strings,
)
from serve_app.gateway.model_registry import ServedModel
from serve_app.messages.tasks import Candidate, ChatDelta, TokenLogprob

FINGERPRINT = "fp_caravan"
COMMENT = b":\n\n"  # of server-sent events
# Other names of the roles of messages: OpenAI's newer name of the system.
ROLES_BY_NAME = {"developer": "system"}


# Sampling options of both completion endpoints with Ollama's names; from `top_k` on they are vLLM's
# and llama.cpp's.
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "repeat_penalty": "repeat_penalty",
    "repeat_last_n": "repeat_last_n",
    **{name: name for name in CHAIN_BOUNDS},
}
# The penalties of OpenAI and vLLM, which read all tokens, and their values without effect.
_PENALTIES = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
# The order of llama.cpp's samplers, the only one that is served, with both names of one of them.
_SAMPLERS = [
    ["penalties", "dry", "top_n_sigma", "top_k", typical, "top_p", "min_p", "xtc", "temperature"]
    for typical in ("typ_p", "typical_p")
]


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Any = harmless()
    continuous_usage_stats: bool = False


class VllmExtras(Body):
    """Fields that vLLM adds to both completion endpoints, with its neutral values."""

    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    use_beam_search: Any = unserved(False)
    stop_token_ids: Any = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = unserved()
    skip_special_tokens: Any = unserved(True)
    truncate_prompt_tokens: Any = unserved()
    prompt_logprobs: Any = unserved()
    return_token_ids: Any = unserved(False)
    return_tokens_as_token_ids: Any = unserved(False)
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    cache_salt: Any = unserved()
    spaces_between_special_tokens: Any = harmless()
    length_penalty: Any = harmless()  # beam search
    priority: Any = None
    request_id: str | None = Field(default=None, pattern=r"^[!-~]{1,256}$")


class LlamaExtras(Body):
    """Fields that llama.cpp's server adds to both completion endpoints."""

    typical_p: Any = None
    top_n_sigma: Any = None
    xtc_probability: Any = None
    xtc_threshold: Any = None
    dynatemp_range: Any = None
    dynatemp_exponent: Any = None
    dry_multiplier: Any = None
    dry_base: Any = None
    dry_allowed_length: Any = None
    dry_penalty_last_n: Any = None
    dry_sequence_breakers: Any = None
    repeat_penalty: Any = None
    repeat_last_n: Any = None
    grammar: Any = None
    json_schema: Any = None
    samplers: Any = unserved(*_SAMPLERS)
    min_keep: Any = unserved(0, 1)
    adaptive_target: Any = unserved(-1)
    n_predict: Any = unserved(-1)
    n_indent: Any = unserved(0)
    n_probs: Any = unserved(0)
    post_sampling_probs: Any = unserved(False)
    return_tokens: Any = unserved(False)
    return_progress: Any = unserved(False)
    t_max_predict_ms: Any = unserved(-1, 0)
    lora: Any = unserved()
    reasoning_format: Any = unserved("auto", "deepseek")
    n_keep: Any = harmless()  # the context never shifts in this protocol
    n_discard: Any = harmless()
    cache_prompt: Any = harmless()
    id_slot: Any = harmless()


class CompletionFields(VllmExtras, LlamaExtras):
    """Fields of both completion endpoints."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Any = None
    top_p: Any = None
    seed: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    max_tokens: Any = None
    stop: Any = None
    n: Any = None
    echo: Any = unserved(False)
    response_format: Any = None
    logit_bias: Any = None
    user: Any = harmless()
    metadata: Any = harmless()
    store: Any = harmless()
    service_tier: Any = harmless()
    safety_identifier: Any = harmless()
    prompt_cache_key: Any = harmless()
    prompt_cache_retention: Any = harmless()
    prompt_cache_options: Any = harmless()

    @property
    def usage_wanted(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream has the usage so far, as in vLLM."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    def output_form(self) -> OutputForm | None:
        """The form that the request demands of the reply's text."""
        guided = {
            "guided_json": self.guided_json,
            "guided_regex": self.guided_regex,
            "guided_choice": self.guided_choice,
            "guided_grammar": self.guided_grammar,
            "grammar": self.grammar or None,
            "json_schema": self.json_schema,
        }
        return openai_form(self.response_format, self.structured_outputs, guided)


def configured(body: Body, model: ServedModel, max_tokens: int | None) -> Options:
    """The options of a request: its own, as far as its type declares them, then the model's
    configured ones, then the protocol's defaults.

    Penalties of the request read the whole sequence, unless the model's options state a number of
    tokens; those of the model alone read as many as in Ollama's protocol.
    """
    declared = {name: getattr(body, name) for name in type(body).model_fields}
    if None not in (declared.get("repetition_penalty"), declared.get("repeat_penalty")):
        raise RequestError(
            'fields "repetition_penalty" and "repeat_penalty" mean the same; give one of them'
        )
    values = {
        option: number(name, value, OPENAI_BOUNDS[name])
        for name, option in _SAMPLING.items()
        if (value := declared.get(name)) is not None
    }
    stop, breakers = declared.get("stop"), declared.get("dry_sequence_breakers")
    stop = [stop] if isinstance(stop, str) else stop
    given = Options(
        **values,  # type: ignore[arg-type]
        num_predict=max_tokens,
        stop=None if stop is None else stop_strings(stop, noun="field"),
        dry_sequence_breakers=None
        if breakers is None
        else sequence_breakers(breakers, noun="field"),
    )
    penalised = any(declared.get(name) not in (None, off) for name, off in _PENALTIES.items())
    defaults = replace(OPENAI_DEFAULTS, repeat_last_n=-1) if penalised else OPENAI_DEFAULTS
    return given.over(model.options.over(defaults))


# As `chat_task`; OpenAI's penalties do not count the tokens of the prompt.
openai_task = partial(chat_task, penalise_prompt=False)


class StreamEncoder:
    """Server-sent events, and the error format of this protocol."""

    stream_type = EVENTS

    @property
    def heartbeat(self) -> bytes:
        return COMMENT

    def broken(self, refusal: Refusal) -> bytes:
        return event(error_body(refusal))

    def refused(self, refusal: Refusal) -> bytes:
        return encoded(error_body(refusal))


class ChoiceEncoder(Protocol):
    """Encodes the deltas of one choice."""

    def chunks(self, delta: ChatDelta) -> list[dict[str, Any]]:
        """The choice objects of the chunks for a delta."""

    def whole(self, delta: ChatDelta) -> dict[str, Any]:
        """The choice object of a single reply."""


@dataclass(frozen=True, slots=True)
class ReplyKind:
    """The names of an endpoint's objects, and the prefix of their ids."""

    whole: str
    chunk: str
    prefix: str


class ChoicesEncoder(StreamEncoder):
    """The choices of one response, streamed or whole, with its metadata and token usage.

    `id`: without the prefix. `choices`: one encoder for each choice. `continuous_usage`: each chunk
    has the usage so far. `best_of` selects the choices of a single reply.
    """

    def __init__(
        self,
        kind: ReplyKind,
        model: str,
        id: str,
        choices: Sequence[ChoiceEncoder],
        *,
        usage_wanted: bool,
        continuous_usage: bool = False,
        best_of: BestOf | None = None,
    ) -> None:
        self._kind = kind
        self._facts = {
            "id": f"{kind.prefix}-{id}",
            "created": int(time.time()),
            "model": model,
        }
        self._choices = choices
        self._usage_wanted = usage_wanted
        self._continuous_usage = continuous_usage
        self._best_of = best_of
        self._prompt_tokens = self._answer_tokens = 0  # of the stream so far

    def piece(self, delta: ChatDelta) -> bytes:
        so_far = self._usage_so_far(delta) if self._continuous_usage else {}
        events = [
            event(self._frame(self._kind.chunk, [chunk]) | so_far)
            for index, part in delta.choices or ((0, delta),)
            for chunk in self._choices[index].chunks(part)
        ]
        if delta.finish is not None:
            if self._usage_wanted:
                events.append(event(self._frame(self._kind.chunk, []) | _usage(delta)))
            events.append(b"data: [DONE]\n\n")
        return b"".join(events)

    def whole(self, delta: ChatDelta) -> bytes:
        answers = whole_choices(delta)
        if self._best_of is not None:
            answers = self._best_of.select(answers)
        choices = [
            choice.whole(answer) for choice, answer in zip(self._choices, answers, strict=True)
        ]
        return encoded(self._frame(self._kind.whole, choices) | _usage(delta))

    def _usage_so_far(self, delta: ChatDelta) -> dict[str, Any]:
        self._answer_tokens += len(delta.tokens)
        if delta.usage is not None:
            self._prompt_tokens = delta.usage.prompt_tokens
            if delta.finish is not None:
                self._answer_tokens = delta.usage.completion_tokens
        return {"usage": _counts(self._prompt_tokens, self._answer_tokens)}

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        names = {"object": kind, "system_fingerprint": FINGERPRINT}
        return {**self._facts, **names, "choices": choices}


def _usage(delta: ChatDelta) -> dict[str, Any]:
    usage = delta.usage
    if usage is None:
        return {}
    details = {
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
    }
    return {"usage": _counts(usage.prompt_tokens, usage.completion_tokens) | details}


def _counts(prompt: int, answer: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
    }


def error_body(refusal: Refusal) -> dict[str, Any]:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = "invalid_request_error" if refusal.status in (400, 405, 408, 413, 415) else "api_error"
    return {
        "error": {
            "message": refusal.compatible_message,
            "type": refusal.kind or kinds.get(refusal.status, kind),
            "param": refusal.field,
            "code": refusal.code,
        }
    }


def token_entry(candidate: Candidate) -> dict[str, Any]:
    return {"token": candidate.text, "logprob": candidate.logprob, "bytes": list(candidate.raw)}


def logprob_entry(logprob: TokenLogprob) -> dict[str, Any]:
    """The sampled token, and the most likely ones at its position."""
    return token_entry(logprob.drawn) | {"top_logprobs": [token_entry(e) for e in logprob.top]}


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + encoded(value) + b"\n\n"
