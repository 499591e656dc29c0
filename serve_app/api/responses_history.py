"""Access of OpenAI's /v1/responses to stored responses: continuing, retrieving, listing."""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from runtime.errors import PromptTooLongError, RequestError
from serve_app.api.bodies import BodyLimits
from serve_app.api.fields import INLINE_BYTES, is_large
from serve_app.api.refusals import PreviousResponseError, ResponseNotFoundError
from serve_app.api.responses_input import PlacedItem, image_bytes, response_of
from serve_app.api.responses_parts import Item
from serve_app.fair_gate import FairGate
from serve_app.logs import get_logger
from serve_app.responses.response_store import Selection, StoredResponse
from serve_app.responses.stored_responses import StoredResponses

READS_AT_ONCE = 4
_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")

log = get_logger()


class ResponseHistory:
    """The stored responses of each tenant; none without `stored`.

    The stored items that a request reads are limited by `limits`, as its body is. Every method
    raises OverloadedError if the store does not answer.
    """

    def __init__(self, stored: StoredResponses | None, limits: BodyLimits) -> None:
        self._stored = stored
        self._limits = limits
        # Reading temporarily takes a multiple of the stored bytes, of which a short request may
        # read many.
        self._gate = FairGate(READS_AT_ONCE)

    @property
    def stores(self) -> bool:
        return self._stored is not None

    async def put(self, tenant: str, response: StoredResponse) -> None:
        """Stores a response; a failure is logged only."""
        assert self._stored is not None
        if not await self._stored.put(tenant, response):
            log.info("response not stored", bytes=response.size)

    async def response(self, tenant: str, id: str) -> bytes:
        """The response object. Raises ResponseNotFoundError if the tenant has none with that id."""
        async with self._gate.place(tenant):
            found = await self._select(tenant, [id])
        if not found.responses:
            raise _not_found(id)
        return found.responses[0].response

    async def delete(self, tenant: str, id: str) -> None:
        """Deletes a response. Raises ResponseNotFoundError if the tenant has none with that id."""
        if self._stored is None or not await self._stored.delete(tenant, id):
            raise _not_found(id)

    async def before(self, tenant: str, previous: str | None) -> tuple[list[PlacedItem], bool]:
        """The items of the response `previous` and of those that it continues, and whether they are
        large."""
        if previous is None:
            return [], False
        async with self._gate.place(tenant):
            found = await self._conversation(tenant, previous)
            if found.missing is not None:
                raise PreviousResponseError(
                    f"Previous response with id '{found.missing[:80]}' not found. Responses are "
                    "stored for a limited time, for the API key or client that created them"
                )
            items = await self._items(found.responses)
        placed = [
            PlacedItem(f"input of {previous}[{index}]", item) for index, item in enumerate(items)
        ]
        return placed, _large(found)

    async def inputs(self, tenant: str, id: str) -> list[Item]:
        """The items that the response `id` was generated from, as far as they are stored. Raises
        ResponseNotFoundError if the tenant has no response with that id."""
        async with self._gate.place(tenant):
            found = await self._conversation(tenant, id)
            if not found.responses:
                raise _not_found(id)
            return await self._items(found.responses, last_output=False)

    async def resolved(self, tenant: str, items: Sequence[Item]) -> tuple[list[Item], bool]:
        """The items of a request, with item references replaced by the stored items, and whether
        those are large. Raises RequestError for items that are not stored, and, as OpenAI does, for
        repeated ones, which would make a short request as long as it likes."""
        wanted = [item["id"] for item in items if item["type"] == "item_reference"]
        if not wanted:
            return list(items), False
        repeated, times = Counter(wanted).most_common(1)[0]
        if times > 1:
            raise RequestError(
                f"Duplicate item found with id {repeated[:80]}. Remove duplicate items from your "
                "input and try again."
            )
        ids = dict.fromkeys(filter(None, map(response_of, wanted)))
        async with self._gate.place(tenant):
            found = await self._select(tenant, list(ids))
            known = {item["id"]: item for item in await self._items(found.responses)}
        for index, item in enumerate(items):
            if item["type"] == "item_reference" and item["id"] not in known:
                raise RequestError(
                    f"field \"input[{index}].id\": Item with id '{item['id']}' not found. Items "
                    "are stored for a limited time and only with `store`"
                )
        found_items = [known[i["id"]] if i["type"] == "item_reference" else i for i in items]
        return found_items, _large(found)

    async def _select(self, tenant: str, ids: Sequence[str]) -> Selection:
        if self._stored is None or not all(map(_RESPONSE_ID.fullmatch, ids)):
            return Selection()
        max_bytes = self._limits.max_bytes
        return self._limited(await self._stored.select(tenant, ids, max_bytes=max_bytes))

    async def _conversation(self, tenant: str, id: str) -> Selection:
        if self._stored is None or not _RESPONSE_ID.fullmatch(id):
            return Selection(missing=id)
        max_bytes = self._limits.max_bytes
        return self._limited(await self._stored.conversation(tenant, id, max_bytes=max_bytes))

    def _limited(self, found: Selection) -> Selection:
        if found.size > self._limits.max_bytes:
            raise _too_large(found.size, self._limits.max_bytes, "`max_body_bytes`")
        return found

    async def _items(
        self, responses: Sequence[StoredResponse], *, last_output: bool = True
    ) -> list[Item]:
        """The items of the responses' inputs and outputs."""
        size = sum(each.size for each in responses)
        decoding = _decoded(responses, last_output)
        items = list(decoding) if size <= INLINE_BYTES else await asyncio.to_thread(list, decoding)
        text_bytes, limit = size - image_bytes(items), self._limits.max_text_bytes
        if text_bytes > limit:
            raise _too_large(text_bytes, limit, "`max_text_bytes`, without images")
        return items


def _large(found: Selection) -> bool:
    return is_large(*(text for each in found.responses for text in (each.items, each.response)))


def _not_found(id: str) -> ResponseNotFoundError:
    return ResponseNotFoundError(f"Response with id '{id[:80]}' not found.")


def _too_large(size: int, limit: int, name: str) -> PromptTooLongError:
    return PromptTooLongError(
        f"the stored responses of this conversation have {size:,} bytes; at most {limit:,} are "
        f"accepted ({name}). Begin a new conversation"
    )


def _decoded(responses: Sequence[StoredResponse], last_output: bool) -> Iterator[Item]:
    for number, each in enumerate(responses, start=1):
        yield from msgspec.json.decode(each.items)
        if last_output or number < len(responses):
            yield from msgspec.json.decode(each.response)["output"]
