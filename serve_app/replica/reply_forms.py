"""Compiles grammars for the forms that requests demand, in worker threads of each model."""

import asyncio
import json
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from model_zoo.chat.formats.allowed_calls import AllowedCalls, UnwritableArguments
from model_zoo.chat.formats.reply_grammar import reply_grammar
from model_zoo.chat_model import Prompt
from model_zoo.grammars.constraint import CUSTOM_INPUT, CallRule, OutputForm, OutputKind
from model_zoo.grammars.equal_schemas import simplified
from model_zoo.grammars.json_schema import compilable, place_of_error
from model_zoo.grammars.lark_regex import regex_of
from model_zoo.grammars.token_grammar import (
    GrammarError,
    TokenGrammar,
    TokenGrammars,
    check,
    check_pattern,
)
from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.errors import RequestError
from serve_app.fair_gate import FairGate
from serve_app.messages.tasks import ChatTask, Conversation

THREADS = 2
# Stack size: llguidance recurses over rules, of which it accepts up to 65,000, with some 3 KB each.
# Only the used part of a stack takes memory.
STACK_BYTES = 256 * 2**20
MAX_WAITING = 64
COMPILE_S = 10.0


class ReplyForms:
    """Compiles grammars for one model. Tenants are served in turn.

    A compilation that takes longer than `limit_s` fails; the thread that it occupies is freed when
    the library's own limits end it.
    """

    def __init__(self, tokenizer: Tokenizer, *, limit_s: float = COMPILE_S) -> None:
        self._tokenizer = tokenizer
        self._grammars = TokenGrammars(tokenizer)
        self._limit_s = limit_s
        self._threads = _threads()
        self._gate = FairGate(THREADS, max_waiting=MAX_WAITING, things="forms of replies")

    async def grammar(self, task: ChatTask, prompt: Prompt) -> TokenGrammar | None:
        """The grammar of the reply to a task's prompt; None if it demands no form.

        Raises RequestError that names the field and the place that cannot be compiled.
        """
        if task.output is None and task.calls is None:
            return None
        await self._gate.enter(task.tenant)
        work: Future[Any] = self._threads.submit(self._prepare)
        try:
            await asyncio.shield(asyncio.wrap_future(work))
            work = compiling = self._threads.submit(self._compile, task, prompt)
            return await asyncio.wait_for(asyncio.wrap_future(compiling), self._limit_s)
        except TimeoutError:
            raise RequestError(
                f"{_field(task)}: the form takes longer than {self._limit_s:g} s to compile. "
                "Simplify it."
            ) from None
        finally:
            self._gate.leave_after(work, task.tenant)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _prepare(self) -> None:
        """Prepares the vocabulary, outside of the time limit because it happens once."""
        _ = self._grammars.vocabulary

    def _compile(self, task: ChatTask, prompt: Prompt) -> TokenGrammar:
        answer = None if task.output is None else _checked(task.output)
        try:
            return self._grammars.compile(self._reply(task, prompt, answer))
        except GrammarError as error:
            raise RequestError(f"{_field(task)} cannot be compiled: {error}") from None

    def _reply(self, task: ChatTask, prompt: Prompt, answer: dict[str, Any] | None) -> str:
        source, reply_format = task.prompt, prompt.reply_format
        if not isinstance(source, Conversation) or reply_format is None:
            return json.dumps({"grammars": [answer]})
        if prompt.continues and task.calls is not None:
            raise RequestError(
                f'field "{task.calls.field}" holds calls to a form, but the answer continues the '
                "text of the last message; end the conversation with a message of the user"
            )
        calls = None
        if task.calls is not None or source.tools:
            calls = _allowed(task.calls or _any_call(source, task.output), source)
        try:
            return reply_grammar(
                self._tokenizer.vocabulary.control,
                reply_format,
                may_think=source.thinking is not False,
                thinks=prompt.thinks,
                continues=prompt.continues,
                answer=answer,
                calls=calls,
                form=prompt.call_form,
            )
        except UnwritableArguments as error:
            field = "tools" if task.calls is None else task.calls.schema_field(error.tool)
            raise RequestError(
                f'tool "{error.tool}": field "{field}" cannot be enforced at "{error.pointer}" in '
                f'the form of this model\'s calls ("{reply_format.name}"): {error.reason}'
            ) from None


def _threads() -> ThreadPoolExecutor:
    """A pool of threads with large stacks, all of which have been started."""
    threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammars")
    before, begun = threading.stack_size(STACK_BYTES), threading.Barrier(THREADS)
    try:
        for starting in [threads.submit(begun.wait) for _ in range(THREADS)]:
            starting.result()
    finally:
        threading.stack_size(before)
    return threads


def _checked(output: OutputForm) -> dict[str, Any]:
    """The form as one of llguidance's grammars; RequestError if it is not valid."""
    grammar = _translated(output)
    error = _error(grammar)
    if error is None:
        return grammar
    place = ""
    if output.kind is OutputKind.JSON_SCHEMA:
        place = place_of_error(
            grammar["json_schema"], lambda schema: _error({"json_schema": compilable(schema)})
        )
    at = f' at "{place}"' if place else ""
    raise RequestError(f'field "{output.field}" cannot be compiled{at}: {error}')


def _translated(output: OutputForm) -> dict[str, Any]:
    match output.kind:
        case OutputKind.JSON_SCHEMA:
            return {"json_schema": compilable(json.loads(output.source))}
        case OutputKind.REGEX:
            listed = json.loads(LLMatcher.grammar_from_regex(output.source))
            return {"lark_grammar": listed["grammars"][0]["lark_grammar"]}
        case OutputKind.GBNF:
            try:
                return {"lark_grammar": gbnf_to_lark(output.source)}
            except Exception as error:  # the library raises just that
                reason = f'field "{output.field}" cannot be compiled: {str(error)[:400]}'
                raise RequestError(reason) from None
        case OutputKind.LARK:
            return {"lark_grammar": output.source}


def _error(grammar: Mapping[str, Any]) -> str | None:
    try:
        check(json.dumps({"grammars": [grammar]}))
    except GrammarError as error:
        return str(error)
    return None


def _any_call(prompt: Conversation, output: OutputForm | None) -> CallRule:
    """A rule for declared tools that are not constrained themselves, for use with a form of the
    text."""
    assert output is not None
    names = tuple(tool["function"]["name"] for tool in prompt.tools)
    return CallRule(names, strict=(), required=False, parallel=True, field=output.field)


def _allowed(rule: CallRule, prompt: Conversation) -> AllowedCalls:
    """Raises RequestError for a schema that is not valid."""
    arguments: dict[str, Any] = {}
    inputs = dict(rule.inputs)
    for tool in prompt.tools:
        name = tool["function"]["name"]
        if name not in rule.tools:
            continue
        arguments[name] = {"type": "object"}
        if name in rule.strict:
            parameters, field = tool["function"]["parameters"], rule.schema_field(name)
            if name in inputs:
                parameters, field = _of_input(inputs[name]), inputs[name].field
            source = json.dumps({**parameters, "type": "object"})
            try:
                _checked(OutputForm(OutputKind.JSON_SCHEMA, source, field))
            except RequestError as error:
                raise RequestError(f'tool "{name}": {error}') from None
            arguments[name] = {**(simplified(parameters) or parameters), "type": "object"}
    return AllowedCalls(arguments, required=rule.required, parallel=rule.parallel)


def _of_input(form: OutputForm) -> dict[str, Any]:
    """The schema of the arguments of a custom tool whose input has a form."""
    try:
        if form.kind is OutputKind.LARK:
            regex = regex_of(form.source)
        else:
            check_pattern(form.source)
            regex = _unanchored(form.source)
    except GrammarError as error:
        raise RequestError(f'field "{form.field}" cannot be enforced: {error}') from None
    text = {"type": "string", "pattern": f"^(?:{regex})$"}
    closed = {"required": [CUSTOM_INPUT], "additionalProperties": False}
    return {"type": "object", "properties": {CUSTOM_INPUT: text}, **closed}


def _unanchored(regex: str) -> str:
    """A regular expression without the anchors at its ends, because it matches whole texts."""
    body = regex.removeprefix("^")
    before = body.removesuffix("$")
    escaped = (len(before) - len(before.rstrip("\\"))) % 2
    return body if escaped else before


def _field(task: ChatTask) -> str:
    """The field that demands the form."""
    form = task.output or task.calls
    assert form is not None
    return f'field "{form.field}"'
