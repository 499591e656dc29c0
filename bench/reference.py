"""Reference log-probabilities: `transformers` in float32 with the weights of a GGUF file."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

ROWS_AT_ONCE = 128  # rows of logits, each of the whole vocabulary


class Reference:
    """The model in this process."""

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
