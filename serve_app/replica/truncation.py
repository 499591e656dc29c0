"""Shortens prompts that exceed the context, as Ollama does: chats by turns, other texts by tokens.

The result depends on the task and the model only, so every replica makes the same prompt.
"""

import dataclasses
from collections.abc import Callable, Sequence

from model_zoo.chat.messages import Message
from model_zoo.chat.recent_turns import kept_from, turn_starts
from model_zoo.chat_model import Prompt
from runtime.errors import PromptTooLongError, TooManyImagesError
from serve_app.messages.tasks import ChatTask, PromptTask, Truncation

# A shortened prompt leaves this share of the context for the answer, or less if the answer is
# limited to less.
_ANSWER_SHARE = 4

Prepare = Callable[[Sequence[Message]], Prompt]
LeastTokens = Callable[[Sequence[Message]], int]


def limiting_setting(max_tokens: int, *, served_tokens: int) -> str:
    """The setting that must be raised for longer prompts: the request's own, or the model's."""
    return "num_ctx" if max_tokens < served_tokens else "context_tokens"


def shortened_tokens(task: ChatTask | PromptTask, max_tokens: int) -> int:
    """Maximum length of a shortened prompt. `max_tokens`: limit of prompt and answer."""
    room = max_tokens // _ANSWER_SHARE
    if task.max_tokens is not None:
        room = min(room, task.max_tokens)
    return max_tokens - max(1, room)


def with_recent_turns(
    messages: Sequence[Message],
    prepare: Prepare,
    *,
    limit: int,
    shortened: int,
    least: LeastTokens,
    model: str,
    setting: str,
) -> Prompt:
    """The prompt with as many of the last turns as fit, all system messages included.

    If the whole conversation has more than `limit` tokens, which leaves one of the context for the
    answer, or too many images, it is shortened to at most `shortened`, but never below its last
    turn. `prepare` is called about 2 log2(turns) times. `least`: a lower bound of the number of
    tokens of messages; messages for which it is too large are not prepared. PromptTooLongError with
    the names of the `model` and of the `setting` that limits it, or TooManyImagesError, if the last
    turn does not fit.
    """
    roles = [message.role for message in messages]
    starts = turn_starts(roles)

    def attempt(turns: int, most: int) -> Prompt | None:
        kept = [messages[at] for at in kept_from(starts[len(starts) - turns], roles)]
        if least(kept) > most:
            return None
        try:
            prompt = prepare(kept)
        except PromptTooLongError as error:  # because of its images
            if turns == 1 and isinstance(error, TooManyImagesError):
                raise
            return None
        return prompt if len(prompt.tokens) <= most else None

    found = attempt(len(starts), limit)
    if found is not None:
        return found
    fitting, excessive = 1, len(starts)
    found = attempt(1, limit) if excessive > 1 else None
    if found is None:
        raise _last_turn_too_long(limit + 1, model, setting)
    step = 2
    while excessive - fitting > 1:
        turns = min(step, (fitting + excessive) // 2)
        prompt = attempt(turns, shortened)
        if prompt is None:
            excessive = turns
        else:
            found, fitting, step = prompt, turns, 2 * turns
    return found


def _last_turn_too_long(max_tokens: int, model: str, setting: str) -> PromptTooLongError:
    return PromptTooLongError(
        "the input length exceeds the context length: the system prompt, the tools and the last "
        f"turn alone have more; this model's maximum context length is {max_tokens} tokens for "
        f"prompt and answer. Shorten them or raise `{setting}` of model '{model}'."
    )


def with_tokens_cut(prompt: Prompt, *, limit: int, shortened: int, keep: int) -> Prompt:
    """A prompt of more than `limit` tokens with `shortened` of them: the first `keep` and the last
    ones. `keep` below 0: as many as possible. Only for prompts without images."""
    if len(prompt.tokens) <= limit:
        return prompt
    assert not prompt.spans
    first = min(shortened if keep < 0 else keep, shortened - 1)
    last = len(prompt.tokens) - (shortened - first)
    return dataclasses.replace(prompt, tokens=prompt.tokens[:first] + prompt.tokens[last:])


def cut_text(text: str, truncation: Truncation, *, most_tokens: int, longest_token: int) -> str:
    """The text without characters whose tokens `with_tokens_cut` would remove in any case.

    It bounds the work of the tokenizer. `longest_token`: in characters.
    """
    keep = most_tokens if truncation.keep < 0 else min(truncation.keep, most_tokens)
    first, last = longest_token * (keep + 1), longest_token * (most_tokens + 1)
    return text if len(text) <= first + last else text[:first] + text[-last:]
