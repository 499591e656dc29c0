"""Sets the variables by which published templates switch thinking on or off."""

from typing import Any

from model_zoo.chat.messages import ChatTemplate
from runtime.errors import RequestError

EFFORTS = ("low", "medium", "high", "max")
# The names of no effort in templates.
_NO_EFFORT = ("none", "no_think", "minimal")


def thinking_variables(thinking: bool | str | None, template: ChatTemplate) -> dict[str, Any]:
    """The choice under each name that the template reads. None: the template's default.

    Raises RequestError for an effort that is not one of `EFFORTS`.
    """
    if thinking is None:
        return {}
    if isinstance(thinking, str) and thinking not in EFFORTS:
        raise RequestError(f'The thinking effort "{thinking}" is not one of {", ".join(EFFORTS)}.')
    chosen: dict[str, Any] = {
        "enable_thinking": bool(thinking),  # Qwen, GLM, Gemma, Granite 4 and most others
        "thinking": bool(thinking),  # Granite 3, DeepSeek, Kimi
        "thinking_mode": "enabled" if thinking else "disabled",  # MiniMax
    }
    if not thinking:
        chosen["thinking_budget"] = 0  # Seed
    effort = thinking if isinstance(thinking, str) else _effort(thinking, template)
    if effort is not None:
        chosen |= {"reasoning_effort": effort, "reasoning_strength": effort}
    return {name: value for name, value in chosen.items() if template.reads(name)}


def _effort(thinking: bool, template: ChatTemplate) -> str | None:
    """The effort that switches thinking on or off, in templates that use an effort for it."""
    none = next((effort for effort in _NO_EFFORT if effort in template.inspected), None)
    if not thinking:
        return none
    return "high" if none == "no_think" else None  # other templates think by default
