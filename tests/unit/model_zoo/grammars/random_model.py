"""The demo model's tokens with random logits, for replies that only a grammar determines."""

import torch

from model_zoo.gguf.reader import GGUFFile
from model_zoo.grammars.token_grammar import TokenGrammar, TokenGrammars
from model_zoo.tokenizers.tokenizer import load_tokenizer
from runtime.engine.request import SamplingParams
from runtime.worker.sampler import Sampler, TokenMasks
from tests.checkout import DEMO_MODEL
from tests.unit.runtime.worker.loaded_slots import load_slots
from tests.unit.runtime.worker.test_sampler import CPU, draws_of

CONTEXT = 300
SAMPLING = SamplingParams(temperature=1.0, top_k=0, top_p=0.98)


class RandomModel:
    """The demo model's tokens with random logits, which favour the end of long replies."""

    def __init__(self) -> None:
        metadata = GGUFFile.open(DEMO_MODEL).metadata
        self.tokenizer = load_tokenizer(metadata, architecture="llama")
        self.grammars = TokenGrammars(self.tokenizer)
        texts = [self.tokenizer.token_bytes(n) for n in range(self.tokenizer.vocab_size)]
        self._closing = torch.tensor([text in (b'"', b"}", b"]", b"") for text in texts])
        self._sampler = Sampler(slots=1, context_tokens=CONTEXT, vocab_size=len(texts), device=CPU)

    def reply(self, grammar: TokenGrammar, seed: int) -> str | None:
        """A reply sampled with the grammar's masks; None if it does not end."""
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
