"""Prompts as tokens and tokens as text, for clients that count or inspect them."""

from model_zoo.chat_model import ChatModel, Prompt
from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.engine.request import Alternative, FinishReason, Sampled
from runtime.errors import RequestError
from serve_app.messages.tasks import (
    Candidate,
    ChatDelta,
    ChatTask,
    EchoedPrompt,
    PromptTask,
    PromptTokens,
    RawText,
    TokenIds,
    TokenLogprob,
)

# Represents minus infinity, which JSON does not have, as in OpenAI's replies.
MIN_LOGPROB = -9999.0


def tokenized(
    model: ChatModel, task: PromptTask, prompt: Prompt, *, context_tokens: int
) -> ChatDelta:
    """The answer to `task`, whose prompt is `prompt`. Raises RequestError for unknown token ids."""
    tokenizer = model.tokenizer
    vocabulary = tokenizer.vocabulary.tokens
    _check_known(tokenizer, prompt.tokens)
    found = PromptTokens(
        prompt.tokens,
        context_tokens,
        tuple(vocabulary[token] for token in prompt.tokens) if task.vocabulary_wanted else (),
        tokenizer.spell(prompt.tokens) if isinstance(task.prompt, TokenIds) else "",
    )
    return ChatDelta(finish=FinishReason.STOP, prompt_tokens=found)


def echoed(
    tokenizer: Tokenizer, task: ChatTask, prompt: Prompt, scores: tuple[Sampled, ...]
) -> EchoedPrompt:
    """The prompt of a task with `echo`. `scores`: scores of its tokens from the second one on.

    Raises RequestError for token ids that the model computes with but the file does not name.
    """
    _check_known(tokenizer, prompt.tokens)
    source = task.prompt
    text = source.text if isinstance(source, RawText) else tokenizer.spell(prompt.tokens)
    if task.sampling.logprobs is None:
        return EchoedPrompt(text)
    first = TokenLogprob(candidate(tokenizer, Alternative(prompt.tokens[0], 0.0)))
    return EchoedPrompt(text, (first, *(token_logprob(tokenizer, each) for each in scores)))


def token_logprob(tokenizer: Tokenizer, sampled: Sampled) -> TokenLogprob:
    drawn = candidate(tokenizer, Alternative(sampled.token, sampled.logprob or 0.0))
    return TokenLogprob(drawn, tuple(candidate(tokenizer, entry) for entry in sampled.top))


def candidate(tokenizer: Tokenizer, entry: Alternative) -> Candidate:
    text = tokenizer.token_text(entry.token)
    raw = tokenizer.token_bytes(entry.token) or text.encode()
    return Candidate(text, raw, max(entry.logprob, MIN_LOGPROB))


def _check_known(tokenizer: Tokenizer, tokens: tuple[int, ...]) -> None:
    outside = next((token for token in tokens if token >= tokenizer.vocab_size), None)
    if outside is not None:
        raise RequestError(
            f"the token id {outside} is outside the vocabulary of {tokenizer.vocab_size:,} tokens"
        )
