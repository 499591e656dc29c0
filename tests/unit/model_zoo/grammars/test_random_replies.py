"""Random schemas and random logits: every complete reply validates.

CARAVAN_RANDOM_SCHEMAS sets the number of schemas; 1,000 take some minutes.
"""

import json
import os
import random
from collections import Counter

import jsonschema
import torch
from hypothesis import given, settings

from model_zoo.gguf.reader import GGUFFile
from model_zoo.grammars.json_schema import compilable
from model_zoo.grammars.token_grammar import GrammarError, TokenGrammar, TokenGrammars
from model_zoo.tokenizers.tokenizer import load_tokenizer
from runtime.engine.request import SamplingParams
from runtime.worker.sampler import Sampler, TokenMasks
from tests.checkout import DEMO_MODEL
from tests.unit.model_zoo.grammars.random_schemas import REPEATED, schemas
from tests.unit.runtime.worker.loaded_slots import load_slots
from tests.unit.runtime.worker.test_sampler import CPU, draws_of

SCHEMAS = int(os.environ.get("CARAVAN_RANDOM_SCHEMAS", "60"))
CONTEXT = 300
SAMPLING = SamplingParams(temperature=1.0, top_k=0, top_p=0.98)


class RandomModel:
    """The demo model's tokens with random logits, which prefer short replies more and more."""

    def __init__(self) -> None:
        metadata = GGUFFile.open(DEMO_MODEL).metadata
        self.tokenizer = load_tokenizer(metadata, architecture="llama")
        self.grammars = TokenGrammars(self.tokenizer)
        texts = [self.tokenizer.token_bytes(n) for n in range(self.tokenizer.vocab_size)]
        self._closing = torch.tensor([text in (b'"', b"}", b"]", b"") for text in texts])
        self._sampler = Sampler(slots=1, context_tokens=CONTEXT, vocab_size=len(texts), device=CPU)

    def reply(self, grammar: TokenGrammar, seed: int) -> str | None:
        """Sampled under the grammar's masks; None if it does not end."""
        draw = torch.Generator().manual_seed(seed)
        vocab = self.tokenizer.vocab_size
        slots = torch.arange(1)
        load_slots(self._sampler, [SAMPLING])
        matcher, tokens = grammar.matcher(), []
        words = torch.zeros(1, -(-vocab // 32), dtype=torch.int32)
        for position in range(CONTEXT):
            matcher.allowed(words.numpy()[0].data)
            logits = torch.randn(1, vocab, generator=draw) * 4 + self._closing * position / 5
            draws = draws_of([SAMPLING], [position], [0], vocab)
            drawn = self._sampler.sample(logits, draws, TokenMasks(slots, words, 1))
            assert bool(drawn.finite)
            token = int(drawn.tokens)
            if token in self.tokenizer.end_tokens:
                return b"".join(map(self.tokenizer.token_bytes, tokens)).decode()
            tokens.append(token)
            matcher.accept(token)
        return None


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
        jsonschema.validate(json.loads(reply), schema, jsonschema.Draft202012Validator)

    check()
    print(dict(counts))
    assert counts["validated"] > SCHEMAS / 2
    assert counts["refused"] > 0 or SCHEMAS < 50
