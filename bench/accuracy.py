"""The differences between log-probabilities of a real text and those of `transformers` in
float32."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench.contender import Scored

ROWS_AT_ONCE = 128  # rows of logits, each of the whole vocabulary


@dataclass(frozen=True, slots=True)
class Accuracy:
    """`worst`, `mean`: differences of log-probabilities in nats, over the text's tokens and the
    most likely tokens at their places. `same_choices`: the share of places with the same most
    likely token. `perplexity`: that of the text; `expected`: the reference's perplexity."""

    worst: float
    mean: float
    same_choices: float
    perplexity: float
    expected: float


class Reference:
    """`transformers` in float32 with the weights of a GGUF file, in this process."""

    def __init__(self, path: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def logprobs(self, text: Sequence[int], wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The log-probabilities of the tokens `wanted` [len(text) - 1, n] at the places of
        text[1:], float64 [len(text) - 1, n], and the most likely tokens there [len(text) - 1]."""
        states = self._model.model(torch.tensor([text[:-1]])).last_hidden_state[0]
        found, best = [], []
        for rows, tokens in zip(
            states.split(ROWS_AT_ONCE),
            torch.from_numpy(wanted).split(ROWS_AT_ONCE),
            strict=True,
        ):
            logprobs = self._capped(self._model.lm_head(rows)).double().log_softmax(-1)
            found.append(logprobs.gather(1, tokens))
            best.append(logprobs.argmax(-1))
        return torch.cat(found).numpy(), torch.cat(best).numpy()

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = getattr(self._model.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * (logits / cap).tanh()


def accuracy(scored: Sequence[Scored], text: Sequence[int], reference: Reference) -> Accuracy:
    """Compares with the reference. `scored`: the tokens of the text except the first."""
    assert [place.token for place in scored] == list(text[1:])
    tokens = np.array([[place.token, *place.top] for place in scored])
    found = np.array([[place.logprob, *place.top.values()] for place in scored])
    expected, best = reference.logprobs(text, tokens)
    distance = np.abs(found - expected)
    same = [place.first_choice == choice for place, choice in zip(scored, best, strict=True)]
    return Accuracy(
        float(distance.max()),
        float(distance.mean()),
        float(np.mean(same)),
        math.exp(-found[:, 0].mean()),
        math.exp(-expected[:, 0].mean()),
    )
