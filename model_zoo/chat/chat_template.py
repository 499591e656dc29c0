"""The chat template of a model, and the form of messages that it expects."""

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from model_zoo.chat.message_form import IMAGE_TYPES, MessageForm, assumed_form, found_form
from model_zoo.chat.messages import Message
from model_zoo.chat.sandbox.frames import RenderLimits
from model_zoo.chat.template import Template
from model_zoo.chat.thinking import Efforts, ThinkingWords, found_efforts, found_words
from model_zoo.chat.turn_rules import TurnRules, turn_rules
from runtime.errors import TemplateLimitError

_log = logging.getLogger(__name__)

# Limits of each of the forty renderings that find out the form of messages, the rules of turns and
# the efforts of thinking. Published templates take a millisecond.
_PROBE_LIMITS = RenderLimits(seconds=0.2, memory_bytes=64 << 20, reply_bytes=1 << 18)


class ChatTemplate:
    """A Jinja chat template with the texts of the model's BOS and EOS.

    `inspected`: constant texts that it searches for in messages. `names`: the variables, attributes
    and constant texts that it reads. `form`: the form of messages and tools that it reads. `turns`:
    which turns it renders. `efforts`: the efforts of thinking that it accepts. `thinking_words`:
    the words in messages that switch thinking, if no variables do. `most`: upper limits of each
    rendering, as for `Template`.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        most: RenderLimits | None = None,
    ) -> None:
        self.source = source
        self._template = Template(source, most=most)
        self.inspected = self._template.inspected
        self.names = self._template.names
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self.form, self.turns, self.efforts = assumed_form(self.reads), TurnRules(), Efforts()
        self.thinking_words: ThinkingWords | None = None
        try:
            self.form = found_form(self._probed, self.reads, self._template.variables)
            self.turns = turn_rules(partial(self._probed, self.form), self.form, self.reads)
            self.efforts = found_efforts(partial(self._probed, self.form), self)
            self.thinking_words = found_words(partial(self._probed, self.form), self)
        except TemplateLimitError:
            _log.warning(
                "The chat template exceeds its limits on short conversations, so it gets all "
                "turns as they are."
            )

    def reads(self, *names: str) -> bool:
        """Whether it reads one of `names` as a variable, an attribute, a key or a constant text."""
        return not self.names.isdisjoint(names)

    @property
    def supports_images(self) -> bool:
        """Whether it renders images in messages."""
        return self.reads(*IMAGE_TYPES)

    @property
    def supports_suffix(self) -> bool:
        """Whether it renders a text to insert between `prompt` and `suffix`."""
        return {"prompt", "suffix"} <= self._template.variables

    @property
    def supports_tools(self) -> bool:
        """Whether it renders tools."""
        return self.form.tools is not None

    def _probed(
        self,
        form: MessageForm,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        **variables: Any,
    ) -> str:
        given = variables | _template_arguments(tools, True)
        return self.render_values(messages, given, most=_PROBE_LIMITS, form=form)

    def values(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages as plain dicts, in the form that the template reads."""
        return [value for message in messages for value in self.form.values(message)]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text, identical to that of `transformers`.

        `tools` are function schemas: `{"type": "function", "function": {"name": …}}`; some
        templates distinguish None from an empty list. RequestError if the template refuses the
        conversation or fails. Only `render_unforged` refuses content that
        the template ignores.
        """
        return self.render_values(
            self.values(messages),
            {**variables, **_template_arguments(tools, add_generation_prompt)},
        )

    def render_values(
        self,
        messages: list[dict[str, Any]],
        variables: dict[str, Any],
        *,
        now: datetime | None = None,
        most: RenderLimits | None = None,
        form: MessageForm | None = None,
    ) -> str:
        """`render` with messages as dicts for the template.

        `now`: the time that the template sees, by default the local time. `most`: upper limits.
        `form`: another form of tools.
        """
        messages, further = (form or self.form).offered(messages, variables.get("tools"))
        if "datetime" in self._template.variables:  # as Firefunction documents it
            further["datetime"] = (now or datetime.now()).strftime("%Y-%m-%d %H:%M:%S")
        given = {"documents": None, **self._tokens, **variables, "messages": messages}
        return self._template.render(further | given, now=now, most=most)


def _template_arguments(
    tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool
) -> dict[str, Any]:
    offered = None if tools is None else list(tools)
    return {"tools": offered, "add_generation_prompt": add_generation_prompt}
