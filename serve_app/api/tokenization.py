"""vLLM's /tokenize and /detokenize: the tokens of a text or a conversation, and back."""

import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from runtime.errors import RequestError
from serve_app.api.access import allowed_models
from serve_app.api.chat_task import with_budget
from serve_app.api.custom_tools import ChatCompletionTool, declared_tools
from serve_app.api.fields import Body, BodyReader, Items, token_ids, unserved
from serve_app.api.openai import error_body
from serve_app.api.openai_chat import (
    ChatCompletionMessage,
    reply_start,
    template_variables,
    unread_messages_of,
)
from serve_app.api.reply import WholeEncoder, WholeReply
from serve_app.api.request_images import ImageReader
from serve_app.api.tenant import tenant_id
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.model_registry import ServedModel
from serve_app.messages.tasks import (
    ChatDelta,
    Conversation,
    PromptSource,
    PromptTask,
    RawText,
    TokenIds,
)


class TokenizeBody(Body):
    """A text, `prompt`, or a conversation, `messages`, and fields that apply to only one of
    them."""

    holds_images: ClassVar[bool] = True
    model: str = ""
    prompt: str | None = None
    add_special_tokens: bool = True  # for a text only; templates write special tokens themselves
    messages: Items[ChatCompletionMessage] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: Items[ChatCompletionTool] = Field(default_factory=list)
    continue_final_message: bool = False
    chat_template: Any = unserved()
    mm_processor_kwargs: Any = unserved()
    return_token_strs: bool = False

    def image_bytes(self) -> int:
        return sum(message.image_bytes() for message in self.messages or ())


class DetokenizeBody(Body):
    model: str = ""
    tokens: list[Any]


@dataclass(frozen=True, slots=True)
class Tokenization:
    """The two endpoints."""

    backend: ChatBackend
    images: ImageReader
    bodies: BodyReader

    async def tokenize(self, request: Request) -> Response:
        body = await self.bodies.read(TokenizeBody, request)
        model = await self.backend.served(body.model, allowed_models(request))
        prompt = await self._prompt(request, body, model)
        wanted = body.return_token_strs
        found = self._found(request, model, prompt, vocabulary_wanted=wanted)
        encoder = WholeEncoder(partial(_tokenized, strings=wanted), error_body)
        return WholeReply(found, encoder)

    async def detokenize(self, request: Request) -> Response:
        body = await self.bodies.read(DetokenizeBody, request)
        model = await self.backend.served(body.model, allowed_models(request))
        ids = await self.bodies.convert(request, token_ids, body.tokens)
        if body.tokens and ids is None:
            raise RequestError('field "tokens" must be a list of token ids')
        found = self._found(request, model, TokenIds(ids or ()))
        return WholeReply(found, WholeEncoder(_detokenized, error_body))

    async def _prompt(
        self, request: Request, body: TokenizeBody, model: ServedModel
    ) -> PromptSource:
        if (body.prompt is None) == (body.messages is None):
            raise RequestError('exactly one of the fields "prompt" and "messages" is required')
        if body.prompt is not None:
            return RawText(body.prompt, bos=body.add_special_tokens)
        unread = await self.bodies.convert(
            request, unread_messages_of, body.messages or [], self.images
        )
        return Conversation(
            await self.images.messages(model, unread, tenant=tenant_id(request)),
            variables=template_variables(body.chat_template_kwargs),
            tools=await self.bodies.convert(request, declared_tools, body.tools),
            reply=reply_start(body.add_generation_prompt, body.continue_final_message),
        )

    def _found(
        self,
        request: Request,
        model: ServedModel,
        prompt: PromptSource,
        *,
        vocabulary_wanted: bool = False,
    ) -> AsyncGenerator[ChatDelta, None]:
        task = PromptTask(
            uuid.uuid4().hex,
            model.name,
            with_budget(prompt, model.options),
            vocabulary_wanted,
            model.options.num_ctx,
            tenant=tenant_id(request),
        )
        return self.backend.generate(task)


def _tokenized(delta: ChatDelta, *, strings: bool) -> dict[str, Any]:
    found = delta.prompt_tokens
    assert found is not None
    return {
        "count": len(found.ids),
        "max_model_len": found.context_tokens,
        "tokens": found.ids,
        "token_strs": found.vocabulary if strings else None,
    }


def _detokenized(delta: ChatDelta) -> dict[str, Any]:
    assert delta.prompt_tokens is not None
    return {"prompt": delta.prompt_tokens.text}
