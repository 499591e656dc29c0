"""Anthropic's protocol: /v1/messages and its count of tokens."""

import uuid
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from model_zoo.chat.messages import Message, ReplyStart
from model_zoo.grammars.constraint import CallRule, OutputForm
from runtime.errors import RequestError
from serve_app.api import tool_choice
from serve_app.api.access import allowed_models
from serve_app.api.anthropic_blocks import SHOWN, image_bytes, one_of, system_text
from serve_app.api.anthropic_reply import MessageEncoder, error_body
from serve_app.api.anthropic_tools import (
    DeclaredTool,
    OfferedTool,
    functions_of,
    left_out,
    toolsets_of,
)
from serve_app.api.anthropic_turns import (
    EFFORTS,
    Turn,
    effort_of,
    offered_tools,
    unread_messages_of,
)
from serve_app.api.chat_task import chat_task, with_budget
from serve_app.api.fields import Body, BodyReader, Items, Objects, harmless, unserved
from serve_app.api.output_forms import schema_format
from serve_app.api.reply import Reply, WholeEncoder, WholeReply
from serve_app.api.reply_reader import ReplyReader
from serve_app.api.request_images import ImageReader, UnreadMessage
from serve_app.api.tenant import tenant_id
from serve_app.api.tools import described
from serve_app.config.options import (
    BOUNDS,
    LONGEST,
    OLLAMA_DEFAULTS,
    Bounds,
    Options,
    number,
    stop_strings,
)
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.model_registry import ServedModel
from serve_app.messages.tasks import ChatDelta, Conversation, PromptTask

# "between_tools": off, except for progress reports, which no supported model writes.
THINKING = {"enabled": True, "disabled": False, "adaptive": None, "between_tools": False}
# With this beta header, which agents send, a budget is that of several answers with calls between
# them, and may exceed the limit of one.
_INTERLEAVED = "interleaved-thinking"
# "updates", of the beta endpoint, shows the thinking as "summarized" does.
DISPLAYS = ("summarized", "omitted", "updates")


class RequestedChoice(Body):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingChoice(Body):
    type: str
    budget_tokens: Any = None
    display: str | None = None
    block_binding: Any = harmless()  # nothing is signed here


class OutputSettings(Body):
    effort: str | None = None
    format: Any = None
    task_budget: Any = harmless()


class MessagesBody(Body):
    holds_images: ClassVar[bool] = True
    model: str = ""
    max_tokens: Any = None
    messages: Items[Turn] = Field(default_factory=list)
    system: Annotated[str | Items[Any], Objects(SHOWN)] = ""
    stream: bool = False
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    stop_sequences: Any = None
    tools: Items[DeclaredTool] = Field(default_factory=list)
    tool_choice: RequestedChoice | None = None
    thinking: ThinkingChoice | None = None
    output_config: OutputSettings | None = None
    output_format: Any = None
    container: Any = unserved()
    mcp_servers: Any = unserved()
    metadata: Any = harmless()
    cache_control: Any = harmless()
    context_management: Any = harmless()  # removal of old tool results by Anthropic's servers
    service_tier: Any = harmless()
    inference_geo: Any = harmless()
    speed: Any = harmless()
    diagnostics: Any = harmless()
    user_profile_id: Any = harmless()
    workspace_id: Any = harmless()
    # Fields of the beta endpoint, which has the same path:
    thread: Any = unserved()
    fallbacks: Any = harmless()
    compaction: Any = harmless()
    billing_policy: Any = harmless()
    fallback_credit_token: Any = harmless()

    def image_bytes(self) -> int:
        return sum(image_bytes(block) for turn in self.messages for block in turn.blocks)


@dataclass(frozen=True, slots=True)
class AnthropicMessages:
    """Answers /v1/messages and /v1/messages/count_tokens."""

    backend: ChatBackend
    images: ImageReader
    bodies: BodyReader

    async def create(self, request: Request) -> Response:
        body = await self.bodies.read(MessagesBody, request)
        model = await self.backend.served(body.model, allowed_models(request))
        options = _configured(body, model)
        offered = await self._offered(request, body)
        output, (tools, calls) = _output(body), await self._tools(request, body, offered)
        prompt = await self._conversation(request, body, model, tools)
        if _INTERLEAVED not in ",".join(request.headers.getlist("anthropic-beta")):
            _check_budget(_budget(body), options)
        task = chat_task(request, model, options, prompt, output=output, calls=calls)
        own = options.stop if body.stop_sequences is not None else None
        shown = body.thinking is None or body.thinking.display != "omitted"
        encoder = MessageEncoder(
            body.model,
            ReplyReader(prompt.tools),
            own or (),
            max_tokens=options.max_tokens,
            shows_thinking=shown,
            toolsets=toolsets_of(offered),
        )
        return Reply(self.backend.generate(task), encoder, stream=body.stream)

    async def count(self, request: Request) -> Response:
        """The tokens of the prompt that the same request to /v1/messages would have."""
        body = await self.bodies.read(MessagesBody, request)
        model = await self.backend.served(body.model, allowed_models(request))
        tools, _ = await self._tools(request, body, await self._offered(request, body))
        prompt = await self._conversation(request, body, model, tools)
        options = Options(thinking_token_budget=_budget(body)).over(model.options)
        task = PromptTask(
            uuid.uuid4().hex,
            model.name,
            with_budget(prompt, options),
            context_tokens=model.options.num_ctx,
            tenant=tenant_id(request),
        )
        return WholeReply(self.backend.generate(task), _COUNT)

    async def _offered(self, request: Request, body: MessagesBody) -> list[OfferedTool]:
        offered = await self.bodies.convert(request, offered_tools, body.tools, body.messages)
        for kind in left_out(offered):
            self.bodies.leave_out(f"tools[].type: {kind}")
        return offered

    async def _tools(
        self, request: Request, body: MessagesBody, offered: list[OfferedTool]
    ) -> tuple[tuple[dict[str, Any], ...], CallRule | None]:
        return await self.bodies.convert(request, _tools, body, offered)

    async def _conversation(
        self,
        request: Request,
        body: MessagesBody,
        model: ServedModel,
        tools: tuple[dict[str, Any], ...],
    ) -> Conversation:
        thinking = await self.bodies.convert(request, _thinking, body)
        unread = await self.bodies.convert(request, _unread_messages, body)
        messages = await self.images.messages(model, unread, tenant=tenant_id(request))
        continued = messages[-1].role == "assistant"
        return Conversation(
            messages,
            thinking,
            tools=tools,
            thinking_optional=True,
            reply=ReplyStart.CONTINUED if continued else ReplyStart.NEW,
        )


def _counted(delta: ChatDelta) -> dict[str, Any]:
    assert delta.prompt_tokens is not None
    return {"input_tokens": len(delta.prompt_tokens.ids)}


_COUNT = WholeEncoder(_counted, error_body)


def _configured(body: MessagesBody, model: ServedModel) -> Options:
    """The options of a request: its own, then the model's configured ones, then Ollama's
    defaults.
    """
    most = body.max_tokens
    if most is None or (isinstance(most, int | float) and most < 1):
        raise RequestError("max_tokens is required and must be positive")
    values = {
        name: number(name, value, BOUNDS[name])
        for name in ("temperature", "top_p", "top_k")
        if (value := getattr(body, name)) is not None
    }
    stop = body.stop_sequences
    given = Options(
        **values,  # type: ignore[arg-type]
        num_predict=int(number("max_tokens", most, BOUNDS["num_predict"])),
        stop=None if stop is None else stop_strings(stop, noun="field", name="stop_sequences"),
        thinking_token_budget=_budget(body),
    )
    return given.over(model.options.over(OLLAMA_DEFAULTS))


def _thinking(body: MessagesBody) -> bool | str | None:
    """Whether and how much to think; the effort applies where `thinking` does not decide."""
    settled = None
    if body.thinking is not None:
        settled = THINKING[one_of("thinking.type", body.thinking.type, THINKING)]
        one_of("thinking.display", body.thinking.display or DISPLAYS[0], DISPLAYS)
    effort = None if body.output_config is None else body.output_config.effort
    if effort is not None:
        effort = EFFORTS[one_of("output_config.effort", effort, EFFORTS)]
    effort = effort_of(body.messages) or effort
    return effort if settled is None else settled


def _budget(body: MessagesBody) -> int | None:
    """The thinking budget, if thinking is `enabled` with one. Any positive number is accepted:
    models here are smaller than Anthropic's, which require at least 1,024."""
    given = body.thinking
    if given is None or given.type != "enabled" or given.budget_tokens is None:
        return None
    return int(number("thinking.budget_tokens", given.budget_tokens, Bounds(int, 1, LONGEST)))


def _check_budget(budget: int | None, options: Options) -> None:
    """Raises RequestError, as Anthropic does, if the budget leaves no token for the answer."""
    most = options.max_tokens
    if budget is not None and most is not None and most <= budget:
        raise RequestError(
            f'field "max_tokens" is {most:,}; it must be greater than "thinking.budget_tokens", '
            f"which is {budget:,}"
        )


def _output(body: MessagesBody) -> OutputForm | None:
    """The form of the text; `output_format` is the older field."""
    if body.output_config is not None and body.output_config.format is not None:
        return schema_format("output_config.format", body.output_config.format)
    return schema_format("output_format", body.output_format)


def _tools(
    body: MessagesBody, offered: list[OfferedTool]
) -> tuple[tuple[dict[str, Any], ...], CallRule | None]:
    """The offered tools, unless the request forbids their use, and how to call them."""
    tools = described(functions_of(offered))
    given = body.tool_choice or RequestedChoice(type="auto")
    kind = one_of("tool_choice.type", given.type, ("auto", "any", "tool", "none"))
    if kind == "none":
        return (), None
    if kind == "tool" and given.name is None:
        raise RequestError('field "tool_choice.name" is required')
    names = None if given.name is None or kind != "tool" else (given.name,)
    named = {each.tool.name: each for each in offered if each.tool.name is not None}
    if any(named[name].tool.type in left_out(offered) for name in names or () if name in named):
        raise RequestError('field "tool_choice.name" names a tool that is not served')
    choice = tool_choice.ToolChoice(names, required=kind != "auto")
    strict = [name for name, each in named.items() if each.tool.strict]
    schemas = {name: f"{each.place}.input_schema" for name, each in named.items()}
    parallel = not given.disable_parallel_tool_use
    return tools, tool_choice.call_rule(
        tools, choice, strict=strict, parallel=parallel, schemas=schemas
    )


def _unread_messages(body: MessagesBody) -> list[UnreadMessage]:
    """The conversation with the system prompt; each tool result is a message of its own."""
    if not body.messages:
        raise RequestError("messages is required")
    system = system_text(body.system)
    unread = [UnreadMessage.of(Message("system"), system)] if system else []
    turns = unread_messages_of(body.messages)
    if not turns:
        raise RequestError('field "messages" has no message that the model sees')
    return [*unread, *turns]
