"""instructor's modes: the answer is a pydantic object, and requests demand its schema."""

from typing import Any

import anthropic
import instructor
import openai
import pytest
from instructor import Mode

from tests.unit.serve_app.test_client_libraries import ScriptedReplica, served
from tests.unit.serve_app.test_structured_libraries import (
    JSON,
    PARIS,
    QUESTION,
    City,
    calling,
    check_call,
    check_schema,
)

FENCED = ("Here it is:\n```json\n", *JSON, "\n```")


async def answered(replica: ScriptedReplica, *, mode: Mode, native: bool) -> dict[str, Any]:
    async with served(replica) as url:
        if native:
            client = instructor.from_anthropic(
                anthropic.AsyncAnthropic(base_url=url, api_key="any"), mode=mode
            )
        else:
            client = instructor.from_openai(
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any"), mode=mode
            )
        answer = await client.chat.completions.create(
            model="demo",
            max_tokens=64,
            max_retries=0,
            response_model=City,
            messages=[{"role": "user", "content": QUESTION}],
        )
    return answer.model_dump()


@pytest.mark.parametrize("native", [False, True])
async def test_a_call_is_forced(native: bool):
    replica = ScriptedReplica(calling("City"))
    mode = Mode.ANTHROPIC_TOOLS if native else Mode.TOOLS
    assert await answered(replica, mode=mode, native=native) == PARIS.model_dump()
    check_call(replica.tasks[0], "City")


async def test_a_schema_is_demanded():
    replica = ScriptedReplica(JSON)
    answer = await answered(replica, mode=Mode.JSON_SCHEMA, native=False)
    assert answer == PARIS.model_dump()
    check_schema(replica.tasks[0])


@pytest.mark.parametrize(
    ("mode", "native"), [(Mode.MD_JSON, False), (Mode.ANTHROPIC_JSON, True)], ids=str
)
async def test_json_within_text_is_found(mode: Mode, native: bool):
    replica = ScriptedReplica(FENCED)
    assert await answered(replica, mode=mode, native=native) == PARIS.model_dump()
