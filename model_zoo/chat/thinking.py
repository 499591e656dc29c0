"""Sets the variables by which published templates switch thinking on or off."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from model_zoo.chat.message_form import Values, rendered
from runtime.errors import RequestError

if TYPE_CHECKING:
    from model_zoo.chat.chat_template import ChatTemplate
    from model_zoo.chat.messages import ImagePart, Message

EFFORTS = ("low", "medium", "high", "max")
# The names of no effort in templates.
_NO_EFFORT = ("none", "no_think", "minimal")
_NAMES = ("reasoning_effort", "reasoning_strength")
_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class ThinkingWords:
    """Words that switch thinking in the last message of the user, or in a first system message."""

    on: str
    off: str
    role: Literal["user", "system"] = "user"


# For which some templates look in messages instead: those of Nemotron Nano 2 and of Nemotron-H.
_WORDS = (
    ThinkingWords("/think", "/no_think"),
    ThinkingWords("{'reasoning': True}", "{'reasoning': False}", "system"),
)


@dataclass(frozen=True, slots=True)
class Efforts:
    """The efforts of thinking that a template accepts.

    `accepted`: those of `EFFORTS`, in their order. `off`: the effort without thinking, None if the
    template knows none. `on`: the effort that switches thinking on, None if it needs none.
    """

    accepted: Sequence[str] = EFFORTS
    off: str | None = None
    on: str | None = None

    def chosen(self, thinking: bool | str) -> str | None:
        """The effort for the choice; None: without one. An effort that the template refuses becomes
        the nearest, of two the higher."""
        if not thinking:
            return self.off
        if thinking is True:
            return self.on
        place = EFFORTS.index(thinking)
        distances = {each: EFFORTS.index(each) - place for each in reversed(self.accepted)}
        return min(distances, key=lambda each: abs(distances[each]), default=None)


def found_efforts(render: Callable[..., str], template: "ChatTemplate") -> Efforts:
    """The efforts of a template. `render`: renders messages with tools and variables. Raises
    TemplateLimitError if a probe exceeds its limits."""
    if not template.reads(*_NAMES):
        return Efforts()
    asked: list[Values] = [{"role": "user", "content": template.form.content("Probe.")}]

    def shown(effort: str | None) -> str:
        variables = {} if effort is None else dict.fromkeys(_NAMES, effort)
        return rendered(lambda *given: render(*given, **variables), asked, None)

    plain = shown(None)
    if not plain:  # such as a template that needs a system message
        return Efforts(off=next(filter(template.inspected.__contains__, _NO_EFFORT), None))
    texts = {effort: shown(effort) for effort in EFFORTS}
    accepted = [effort for effort, text in texts.items() if text]
    off = next((e for e in _NO_EFFORT if e in template.inspected and shown(e)), None)
    thinks_by_default = off is None or shown(off) != plain
    differing = [effort for effort in accepted if texts[effort] != plain]
    on = None if thinks_by_default else next(reversed(differing), None)
    return Efforts(accepted, off, on)


def found_words(render: Callable[..., str], template: "ChatTemplate") -> ThinkingWords | None:
    """The words that switch thinking, if no variables do. `render`: as above. Raises
    TemplateLimitError if a probe exceeds its limits."""
    found = (words for words in _WORDS if {words.on, words.off} <= template.inspected)
    words = next(found, None)
    if words is None:
        return None
    asked: list[Values] = [{"role": "user", "content": template.form.content("Probe.")}]
    on, off = (
        rendered(partial(render, **dict.fromkeys(_SWITCHES, choice)), asked, None)
        for choice in (True, False)
    )
    return words if on == off else None


def with_thinking_word(
    messages: Sequence["Message"], thinking: bool | str | None, template: "ChatTemplate"
) -> Sequence["Message"]:
    """The messages, with the word for the choice if the template needs one. None: the template's
    default."""
    asked = [at for at, message in enumerate(messages) if message.role == "user"]
    words = template.thinking_words
    if thinking is None or not asked or words is None:
        return messages
    word, other = (words.on, words.off) if thinking else (words.off, words.on)
    at = asked[-1] if words.role == "user" else 0
    if messages[at].role != words.role:
        return [replace(messages[asked[-1]], role="system", content=word, name=None), *messages]
    switched = replace(messages[at], content=_switched(messages[at].content, word, other))
    return [*messages[:at], switched, *messages[at + 1 :]]


def _switched(
    content: "str | tuple[str | ImagePart, ...]", word: str, other: str
) -> "str | tuple[str | ImagePart, ...]":
    """The content of a message with `word` in place of `other`, or behind it."""
    if not isinstance(content, str):
        parts = (each.replace(other, word) if isinstance(each, str) else each for each in content)
        return (*parts, f" {word}")
    text = content.replace(other, word)
    return text if word in text else f"{text} {word}"


def thinking_variables(
    thinking: bool | str | None, template: "ChatTemplate", *, budget: int | None = None
) -> dict[str, Any]:
    """The choice under each name that the template reads. None: the template's default. `budget`:
    tokens of thinking.

    Raises RequestError for an effort that is not one of `EFFORTS`.
    """
    if isinstance(thinking, str) and thinking not in EFFORTS:
        raise RequestError(f'The thinking effort "{thinking}" is not one of {", ".join(EFFORTS)}.')
    chosen: dict[str, Any] = {} if budget is None else {"thinking_budget": budget}  # Seed
    if thinking is not None:
        chosen |= {
            "enable_thinking": bool(thinking),  # Qwen, GLM, Gemma, Granite 4 and most others
            "thinking": bool(thinking),  # Granite 3, DeepSeek, Kimi
            "thinking_mode": "enabled" if thinking else "disabled",  # MiniMax
        }
        if not thinking:
            chosen["thinking_budget"] = 0
        effort = template.efforts.chosen(thinking)
        if effort is not None:
            chosen |= dict.fromkeys(_NAMES, effort)
    return {name: value for name, value in chosen.items() if template.reads(name)}
