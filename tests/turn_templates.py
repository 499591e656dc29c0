"""Small templates that render turns, turns for them, and published templates."""

from collections.abc import Sequence
from typing import Any

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.formats.fallbacks import readable
from model_zoo.chat.formats.reply_format import format_of
from model_zoo.chat.messages import Message, ToolCall
from runtime.errors import RequestError
from tests.chat_templates import TOOLS, template_source

TURNS = (
    "{% for m in messages %}CHECK<{{ m.role }}>{{ m.thinking }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)


def refusing(condition: str) -> str:
    return TURNS.replace(
        "CHECK", f"{{% if {condition} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"
    )


def refusing_all(*conditions: str) -> str:
    return refusing(" or ".join(f"({condition})" for condition in conditions))


IN_A_ROW = "loop.previtem is defined and m.role == loop.previtem.role"
STRICT_IDS = refusing(
    "(m.tool_calls and m.tool_calls | map(attribute='id') | map('default', '') | map('length')"
    " | reject('eq', 9) | list) or (m.role == 'tool' and m.tool_call_id | length != 9)"
)


def system(text: str) -> Message:
    return Message("system", text)


def user(text: str) -> Message:
    return Message("user", text)


def said(text: str) -> Message:
    return Message("assistant", text)


def calling(*calls: ToolCall, text: str = "", thinking: str | None = None) -> Message:
    return Message("assistant", text, thinking=thinking, tool_calls=calls)


def adapted(source: str, messages: Sequence[Message]) -> list[Message]:
    return list(ChatTemplate(source).turns.adapted(messages))


class Published:
    """A published template, and what it renders without a generation prompt."""

    def __init__(self, name: str) -> None:
        self.template = ChatTemplate(template_source(name), bos_token="<s>", eos_token="</s>")
        self.tools: list[dict[str, Any]] | None = TOOLS if self.template.supports_tools else None

    def readable(self, messages: Sequence[Message]) -> Sequence[Message]:
        name = format_of(self.template.source, self.template.supports_tools).name
        return readable(self.template, messages, TOOLS, name)[0]

    def render(self, messages: Sequence[Message]) -> str:
        """Nothing if the template refuses."""
        try:
            return self.template.render(messages, tools=self.tools, add_generation_prompt=False)
        except RequestError:
            return ""

    def adapted(self, messages: Sequence[Message]) -> str:
        return self.render(self.template.turns.adapted(messages))
