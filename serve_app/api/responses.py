"""OpenAI's /v1/responses: creates responses, counts the tokens of their prompts, and shows and
deletes stored ones."""

import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from model_zoo.chat.messages import Message
from model_zoo.grammars.constraint import OutputForm
from runtime.errors import PromptTooLongError, RequestError
from serve_app.api.access import allowed_models
from serve_app.api.chat_task import with_budget
from serve_app.api.fields import MAX_ITEMS, BodyReader, query_integer
from serve_app.api.offered_tools import OfferedTools
from serve_app.api.openai import error_body, openai_task
from serve_app.api.reply import JSON, Reply, WholeEncoder, WholeReply
from serve_app.api.reply_reader import ReplyReader
from serve_app.api.request_images import ImageReader, UnreadMessage
from serve_app.api.responses_body import ResponsesBody
from serve_app.api.responses_history import ResponseHistory
from serve_app.api.responses_input import (
    PlacedItem,
    left_out,
    new_response_id,
    read_items,
    unread_messages_of,
    updated,
)
from serve_app.api.responses_parts import Item
from serve_app.api.responses_reply import ResponseEncoder
from serve_app.api.tenant import tenant_id
from serve_app.api.thinking_fields import thinking_for
from serve_app.config.options import Bounds
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.model_registry import ServedModel
from serve_app.messages.tasks import ChatDelta, Conversation, PromptTask, Truncation
from serve_app.responses.response_store import StoredResponse

LIST_LIMIT = Bounds(int, 1, 100)
DEFAULT_LIST_LIMIT = 20


@dataclass(frozen=True, slots=True)
class OpenAIResponses:
    """Answers /v1/responses and the paths below it."""

    backend: ChatBackend
    images: ImageReader
    bodies: BodyReader
    history: ResponseHistory

    async def create(self, request: Request) -> Response:
        body = await self.bodies.read(ResponsesBody, request)
        await self._check(request, body)
        model = await self.backend.served(body.model, allowed_models(request))
        options, logprobs, form = body.options(model), body.logprobs(), body.output_form()
        store = body.store and self.history.stores
        facts = await self.bodies.convert(request, body.facts, new_response_id(), options)
        facts |= {"store": store}
        try:
            asked = await self._asked(request, body, model, form)
        except PromptTooLongError as error:
            if not body.stream:
                raise
            encoder = ResponseEncoder(facts, ReplyReader(()), {})
            return Reply(_begun_if_too_long(_failing(error)), encoder, stream=True)
        items, prompt = asked.items, asked.prompt
        calls = await self.bodies.convert(request, body.calls, asked.offered, prompt.tools)
        task = openai_task(
            request, model, options, prompt, logprobs=logprobs, output=asked.output, calls=calls
        )
        if body.truncation == "auto":
            task = replace(task, truncation=Truncation(turns=True))
        by_name = await self.bodies.convert(request, asked.offered.by_name)
        encoder = ResponseEncoder(facts, ReplyReader(prompt.tools), by_name)
        ending = self._storing(tenant_id(request), encoder, items) if store else None
        deltas = self.backend.generate(task)
        deltas = _begun_if_too_long(deltas) if body.stream else deltas
        return Reply(deltas, encoder, stream=body.stream, ending=ending)

    async def count(self, request: Request) -> Response:
        """The tokens of the prompt that the same request to /v1/responses would have."""
        body = await self.bodies.read(ResponsesBody, request)
        await self._check(request, body)
        model = await self.backend.served(body.model, allowed_models(request))
        asked = await self._asked(request, body, model, body.output_form())
        task = PromptTask(
            uuid.uuid4().hex,
            model.name,
            with_budget(asked.prompt, model.options),
            context_tokens=model.options.num_ctx,
            tenant=tenant_id(request),
        )
        return WholeReply(self.backend.generate(task), _COUNT)

    async def retrieve(self, request: Request) -> Response:
        """The stored response. It is complete, so `stream` is refused."""
        if request.query_params.get("stream", "false") != "false":
            raise RequestError('parameter "stream" of a stored response is not served')
        found = await self.history.response(tenant_id(request), request.path_params["id"])
        return Response(found, media_type=JSON)

    async def delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        await self.history.delete(tenant_id(request), id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Always refused: a response is stored when it has ended. Until then, closing its
        connection cancels it."""
        await self.history.response(tenant_id(request), request.path_params["id"])
        raise RequestError("Cannot cancel a synchronous response.")

    async def input_items(self, request: Request) -> Response:
        items = await self.history.inputs(tenant_id(request), request.path_params["id"])
        page, more = _page(items, dict(request.query_params))
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        listed = {"data": page, "first_id": first, "last_id": last, "has_more": more}
        return Response(msgspec.json.encode({"object": "list", **listed}), media_type=JSON)

    async def _check(self, request: Request, body: ResponsesBody) -> None:
        body.check()
        for kind in await self.bodies.convert(request, body.left_out):
            self.bodies.leave_out(f"tools[].type: {kind}")
        for kind in await self.bodies.convert(request, left_out, body.input):
            self.bodies.leave_out(f"input[].type: {kind}")

    async def _asked(
        self, request: Request, body: ResponsesBody, model: ServedModel, form: OutputForm | None
    ) -> "_Asked":
        """`form`: that of the text, unless items update it."""
        effort, tenant = body.reasoning.effort, tenant_id(request)
        thinking_for(effort)
        given = await self.bodies.convert(request, read_items, body.input)
        items, large = await self.history.resolved(tenant, given)
        earlier, long = await self.history.before(tenant, body.previous_response_id)
        self.bodies.add(request, large=large or long)
        placed = await self.bodies.convert(request, _placed, earlier, items)
        effort, form = await self.bodies.convert(request, updated, placed, effort, form)
        offered = await self.bodies.convert(request, body.offered, placed)
        tools = await self.bodies.convert(request, offered.functions)
        choice = await self.bodies.convert(request, body.choice)
        unread = await self.bodies.convert(request, _unread_messages, body.instructions, placed)
        if body.truncation == "auto":
            unread = self.images.recent(unread)
        messages = await self.images.messages(model, unread, tenant=tenant)
        tools = () if choice.names == () else tools
        prompt = Conversation(messages, thinking_for(effort), tools=tools)
        return _Asked(prompt, items, offered, form)

    def _storing(
        self, tenant: str, encoder: ResponseEncoder, items: list[Item]
    ) -> Callable[[], Awaitable[None]]:
        async def store() -> None:
            final = encoder.final
            assert final is not None
            encode = msgspec.json.encode
            response = StoredResponse(
                final["id"], encode(final), encode(items), final["previous_response_id"]
            )
            await self.history.put(tenant, response)

        return store


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request as read: the conversation to continue, the request's own items, the tools, and the
    form of the text."""

    prompt: Conversation
    items: list[Item]
    offered: OfferedTools
    output: OutputForm | None


async def _begun_if_too_long(
    deltas: AsyncGenerator[ChatDelta, None],
) -> AsyncGenerator[ChatDelta, None]:
    """The deltas, after an empty one if the prompt is too long: as with OpenAI, the stream begins
    and then fails. Codex shortens a conversation only after such a stream."""
    async with aclosing(deltas):
        try:
            async for delta in deltas:
                yield delta
        except PromptTooLongError:
            yield ChatDelta()
            raise


async def _failing(error: PromptTooLongError) -> AsyncGenerator[ChatDelta, None]:
    """The deltas of a request that fails before it reaches a replica."""
    raise error
    yield ChatDelta()


def _counted(delta: ChatDelta) -> dict[str, Any]:
    assert delta.prompt_tokens is not None
    return {"object": "response.input_tokens", "input_tokens": len(delta.prompt_tokens.ids)}


_COUNT = WholeEncoder(_counted, error_body)


def _placed(earlier: list[PlacedItem], items: list[Item]) -> list[PlacedItem]:
    """The items of the conversation: the `earlier` ones, then `items`, the request's own."""
    if not items:
        raise RequestError('field "input" has no items')
    if len(earlier) + len(items) > MAX_ITEMS:
        raise PromptTooLongError(
            f"the conversation has {len(earlier) + len(items):,} items; at most {MAX_ITEMS:,} are "
            "accepted. Begin a new conversation"
        )
    return [*earlier, *(PlacedItem(f"input[{index}]", item) for index, item in enumerate(items))]


def _unread_messages(instructions: str | None, items: list[PlacedItem]) -> list[UnreadMessage]:
    system = [UnreadMessage.of(Message("system"), instructions)] if instructions else []
    return [*system, *unread_messages_of(items)]


def _page(items: list[Item], query: dict[str, Any]) -> tuple[list[Item], bool]:
    """The items after the one that `after` names, newest first by default, and whether more
    follow."""
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise RequestError('parameter "order" must be asc or desc')
    limit = query_integer("limit", query.get("limit", str(DEFAULT_LIST_LIMIT)), LIST_LIMIT)
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise RequestError('parameter "after" is not the id of an item of this response')
        ordered = ordered[ids.index(after) + 1 :]
    return ordered[:limit], len(ordered) > limit
