"""From the parts of a request to its task."""

import uuid

import msgspec
from starlette.requests import Request

from model_zoo.grammars.constraint import CallRule, OutputForm
from serve_app.api.access import is_traced
from serve_app.api.tenant import tenant_id
from serve_app.config.options import Options
from serve_app.gateway.model_registry import ServedModel
from serve_app.messages.tasks import ChatTask, Conversation, PromptSource


def chat_task(
    request: Request,
    model: ServedModel,
    options: Options,
    prompt: PromptSource,
    *,
    logprobs: int | None = None,
    output: OutputForm | None = None,
    calls: CallRule | None = None,
    penalise_prompt: bool = True,
) -> ChatTask:
    """A task with the fields that all protocols set alike; `logprobs` as in `SamplingParams`, the
    others as in `ChatTask`."""
    return ChatTask(
        id=uuid.uuid4().hex,
        model=model.name,
        prompt=with_budget(prompt, options),
        sampling=options.sampling(logprobs=logprobs),
        max_tokens=options.max_tokens,
        stop=options.stop or (),
        context_tokens=options.num_ctx,
        penalise_prompt=penalise_prompt,
        tenant=tenant_id(request),
        output=output,
        calls=calls,
        trace=is_traced(request),
    )


def with_budget(prompt: PromptSource, options: Options) -> PromptSource:
    """The prompt with the thinking budget of the options, if it is a conversation. With a budget of
    0, the template is to switch thinking off."""
    budget = options.thinking_token_budget
    if not isinstance(prompt, Conversation) or budget is None or budget < 0:
        return prompt
    thinking = prompt.thinking if budget else False
    return msgspec.structs.replace(prompt, thinking_budget=budget, thinking=thinking)
