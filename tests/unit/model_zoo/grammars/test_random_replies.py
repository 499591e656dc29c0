"""Random schemas and random logits: every complete reply validates.

CARAVAN_RANDOM_SCHEMAS sets the number of schemas; 1,000 take some minutes.
"""

import json
import os
import random
from collections import Counter

import jsonschema
from hypothesis import given, settings

from model_zoo.grammars.json_schema import compilable
from model_zoo.grammars.token_grammar import GrammarError
from tests.unit.model_zoo.grammars.random_model import RandomModel
from tests.unit.model_zoo.grammars.random_schemas import REPEATED, schemas, widened

SCHEMAS = int(os.environ.get("CARAVAN_RANDOM_SCHEMAS", "60"))


def test_every_reply_validates() -> None:
    model, counts, seeds = RandomModel(), Counter[str](), random.Random(1)

    @settings(REPEATED, max_examples=SCHEMAS)
    @given(schemas())
    def check(schema) -> None:
        try:
            grammar = model.grammars.compile(
                json.dumps({"grammars": [{"json_schema": compilable(schema)}]})
            )
        except GrammarError:
            counts["refused"] += 1
            return
        reply = model.reply(grammar, seeds.getrandbits(32))
        if reply is None:
            counts["unfinished"] += 1
            return
        counts["validated"] += 1
        jsonschema.validate(json.loads(reply), widened(schema), jsonschema.Draft202012Validator)

    check()
    print(dict(counts))
    assert counts["validated"] > SCHEMAS / 2
    assert counts["refused"] > 0 or SCHEMAS < 50
