"""How much to think, in requests of Anthropic's protocol."""

import anthropic
import pytest

from serve_app.messages.tasks import Conversation
from tests.unit.serve_app.api.test_anthropic import asked, task_of
from tests.unit.serve_app.fake_replicas import PretendReplica, anthropic_client


@pytest.mark.parametrize(
    ("body", "thinking", "budget"),
    [
        ({}, None, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 63}}, True, 63),
        ({"thinking": {"type": "disabled", "budget_tokens": 9}}, False, None),
        ({"thinking": {"type": "between_tools"}}, False, None),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "max", None),
        ({"output_config": {"effort": "xhigh"}}, "high", None),
        ({"output_config": {"effort": "low"}, "thinking": {"type": "enabled"}}, True, None),
    ],
)
async def test_thinking_reaches_the_template_and_is_optional(body, thinking, budget):
    prompt = (await task_of(**body)).prompt
    assert isinstance(prompt, Conversation)
    assert (prompt.thinking, prompt.thinking_optional) == (thinking, True)
    assert prompt.thinking_budget == budget


async def test_a_budget_with_interleaved_thinking_may_exceed_the_limit_of_the_answer():
    """It is that of several answers. The client sends the names in one header or in several."""
    replica = PretendReplica()
    async with anthropic_client(replica) as client:
        given = asked(thinking={"type": "enabled", "budget_tokens": 2000})
        with pytest.raises(anthropic.BadRequestError, match="must be greater than"):
            await client.beta.messages.create(**given)
        betas = ["context-1m-2025-08-07", "interleaved-thinking-2025-05-14"]
        await client.beta.messages.create(**given, betas=betas)
    assert replica.tasks[0].prompt.thinking_budget == 2000
