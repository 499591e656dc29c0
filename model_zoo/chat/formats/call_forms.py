"""How families write tool calls: the reverse of their parsers, for grammars of calls.

Sources: the families' published chat templates.
"""

from dataclasses import dataclass
from typing import Any

ID = "[a-zA-Z0-9]{9}"
_ID = {"type": "string", "pattern": f"^{ID}$"}
_DIGITS = {"type": "string", "pattern": "^[0-9]{1,3}$"}


@dataclass(frozen=True, slots=True)
class JsonCall:
    """A call as a JSON object with these members; `first`: schemas of members before them; `last`:
    those of members that may follow."""

    name: str = "name"
    arguments: str = "arguments"
    first: tuple[tuple[str, dict[str, Any]], ...] = ()
    last: tuple[tuple[str, dict[str, Any]], ...] = ()


@dataclass(frozen=True, slots=True)
class NamedCall:
    """A call as the name, then the JSON object of the arguments. `identity`: what precedes an
    id after the name, which may be missing."""

    before: str = ""
    between: str = ""
    after: str = ""
    identity: str = ""


@dataclass(frozen=True, slots=True)
class CallForm:
    """`begin`, the calls with `separator` between them, and `end`.

    `separator` None: a reply has one call. `listed`: the calls are items of one JSON list. `begin`
    also tells calls from text; without it, only a whole reply may be a call.
    """

    call: JsonCall | NamedCall
    begin: str = ""
    end: str = ""
    separator: str | None = None
    listed: bool = False


_TAG = CallForm(JsonCall(), "<tool_call>\n", "\n</tool_call>", "\n</tool_call>\n<tool_call>\n")
_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_FORMS = {
    "mistral": CallForm(JsonCall(last=(("id", _ID),)), "[TOOL_CALLS]", listed=True),
    "command-a": CallForm(
        JsonCall("tool_name", "parameters", (("tool_call_id", _DIGITS),)),
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        listed=True,
    ),
    "nemotron": CallForm(JsonCall(), "<TOOLCALL>", "</TOOLCALL>", listed=True),
    "gigachat": CallForm(JsonCall(), "<|function_call|>"),
    "list": CallForm(JsonCall(), "<|tool_call|>", "<|/tool_call|>", listed=True),
    "command-r": CallForm(
        JsonCall("tool_name", "parameters"), "Action: ```json\n", "\n```", listed=True
    ),
    "llama": CallForm(JsonCall(arguments="parameters")),
    "glm4": CallForm(NamedCall(between="\n")),
    "tag": _TAG,
    "generic": _TAG,
}


def call_form(name: str, template: str) -> CallForm | None:
    """The form of calls in the format `name` of this template; None if none is known here."""
    if name == "mistral" and "[ARGS]" in template:
        call = NamedCall(between="[ARGS]", identity="[CALL_ID]")
        return CallForm(call, "[TOOL_CALLS]", separator="[TOOL_CALLS]")
    if name == "deepseek":
        begin, between, after = _DEEPSEEK
        in_markdown = "```json" in template
        call = (
            NamedCall(f"{begin}function{between}", "\n```json\n", f"\n```{after}")
            if in_markdown
            else NamedCall(begin, between, after)
        )
        separator = "\n" if in_markdown else ""
        return CallForm(call, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", separator)
    if name == "tag" and "<function=" in template:
        return None
    return _FORMS.get(name)
