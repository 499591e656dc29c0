"""The reply format of a model, chosen from the text of its chat template."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

from model_zoo.chat.formats import gemma4, harmony
from model_zoo.chat.formats.calls import Grammar, Tools, closed_by, json_calls
from model_zoo.chat.formats.family_calls import command_r, deepseek, mistral, tool_call_tag
from model_zoo.chat.formats.parser import ReplyParser
from model_zoo.chat.formats.tagged import BareCalls, BareJson, BareNames, TaggedReply, ThinkingTags

_THINKING = (
    ThinkingTags("<think>", "</think>"),
    ThinkingTags("[THINK]", "[/THINK]"),
    ThinkingTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkingTags("<|channel>thought", "<channel|>"),
)


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a family writes calls. A template that contains all of `signs` belongs to it.

    `markup`: texts of control tokens that the grammar needs to see.
    """

    name: str
    signs: tuple[str, ...]
    openers: Mapping[str, Grammar]
    bare: BareCalls | None = None
    markup: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


_LIST = "<|tool_call|>"
# The first one whose signs are all in the template.
_SYNTAXES = (
    CallSyntax("gemma4", (gemma4.OPEN,), {gemma4.OPEN: gemma4.read_call},
               markup=(gemma4.OPEN, gemma4.CLOSE, gemma4.QUOTE)),
    CallSyntax("mistral", ("[TOOL_CALLS]",), {"[TOOL_CALLS]": mistral},
               markup=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
    CallSyntax("deepseek", ("<｜tool▁calls▁begin｜>",), {"<｜tool▁calls▁begin｜>": deepseek}),
    CallSyntax("command-a", ("<|START_ACTION|>",),
               {"<|START_ACTION|>": closed_by("<|END_ACTION|>", json_calls)},
               dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    CallSyntax("list", (_LIST,), {_LIST: closed_by("<|/tool_call|>", json_calls)}),
    CallSyntax("tag", ("<tool_call>",), {"<tool_call>": tool_call_tag}),
    CallSyntax("command-r", ("Action:", "```json"), {"Action:": command_r}),
    CallSyntax("llama", ("<|python_tag|>",), {"<|python_tag|>": json_calls}, BareJson()),
    CallSyntax("llama", ('{"name": function name, "parameters"',), {}, BareJson()),
    CallSyntax("glm4", ("[gMASK]", "<|observation|>"), {}, BareNames()),
)  # fmt: skip
# For templates that render no tools: the form that `generic_instructions` asks for.
_GENERIC = CallSyntax("generic", (), {"<tool_call>": tool_call_tag}, BareJson())


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a model's replies are written. `name` identifies the syntax of its calls.

    `tools`: whether the template itself renders tools. `markup`: the texts of control tokens that
    are part of the text that parsers read.
    """

    name: str
    tools: bool
    thinking: ThinkingTags | None
    markup: frozenset[str]

    @property
    def thinks(self) -> bool:
        return self.thinking is not None or self.name == "harmony"

    def opens_thinking(self, prompt: str) -> bool:
        """Whether the prompt ends with the tag that opens thinking."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking.open)

    def parser(self, tools: Tools, *, thinks: bool = False) -> ReplyParser:
        """A parser for one reply. `tools`: the JSON schemas of the declared tools' parameters by
        name; without tools, calls are text. `thinks`: the prompt ends within thinking."""
        if self.name == "harmony":
            read = harmony.read_harmony
        else:
            syntax = next((each for each in _SYNTAXES if each.name == self.name), _GENERIC)
            read = TaggedReply(self.thinking, syntax.openers, syntax.bare, syntax.dropped).read
        return ReplyParser(partial(read, tools=tools, thinks=thinks))


@lru_cache(maxsize=64)
def format_of(template: str | None) -> ReplyFormat:
    """The format of a model with this chat template; the generic one without a template."""
    source = template or ""
    if harmony.CHANNEL in source and harmony.MESSAGE in source:
        return ReplyFormat("harmony", True, None, frozenset(harmony.MARKERS))
    thinking = next((t for t in _THINKING if t.open in source and t.close in source), None)
    syntax = _GENERIC
    if "tools" in source:
        found = (each for each in _SYNTAXES if all(sign in source for sign in each.signs))
        syntax = next(found, _GENERIC)
    markup = {*syntax.openers, *syntax.markup, *syntax.dropped}
    if thinking is not None:
        markup |= {thinking.open, thinking.close}
    return ReplyFormat(syntax.name, "tools" in source, thinking, frozenset(markup))
