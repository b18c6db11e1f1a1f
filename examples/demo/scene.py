"""What the pictures show: one sentence, one head of one layer, and one query of it."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .minilm import Attention, MiniLM
from .online_softmax import Step, online_softmax

# In MiniLM the last head of the last layer looks for who the sentence is about, and so "it" finds the cat.
# The cat comes late, so the largest score does too, and the running maximum has to move: the case to see.
SENTENCE = "Because it was too tired, the cat did not cross the street."
QUERY = "it"
TILE = 4


@dataclass(frozen=True)
class Scene:
    tokens: list[str]
    layer: int
    head: int
    row: int  # the query whose tiles are shown
    s: np.ndarray  # (tokens,): its scaled scores
    weights: np.ndarray  # (tokens, tokens): what each query takes from each key
    o: np.ndarray  # (head_dim,): its attention, as the library computed it
    lse: float
    steps: list[Step]

    @property
    def passed(self) -> bool:
        """The steps end at what the library computed, to the few digits that float32 scores leave."""
        last = self.steps[-1]
        ends = np.append(last.o / last.l, last.m + np.log(last.l))
        return np.allclose(ends, np.append(self.o, self.lse), rtol=1e-4, atol=1e-4)


def make_scene(model: MiniLM, attention: Attention) -> Scene:
    layer, head = model.layers - 1, model.heads - 1
    ids, tokens = model.tokenizer.encode(SENTENCE, model.max_tokens)
    seen = []

    def remember(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> np.ndarray:
        seen.append((q, k, v))
        return attention(q, k, v, **options)

    model.forward(np.array([ids]), np.array([len(ids)], np.int32), remember)
    q, k, v = seen[layer]
    o, lse = attention(q, k, v, layout="bshd", return_lse=True)
    s = q[0, :, head] @ k[0, :, head].T * q.shape[3] ** -0.5  # (tokens, tokens)
    row = tokens.index(QUERY) if QUERY in tokens else 0
    return Scene(
        tokens,
        layer,
        head,
        row,
        s[row],
        # The log-sum-exp is all that is needed to get the weights back, which were never stored.
        np.exp(s - lse[0, head][:, None]),
        o[0, row, head],
        float(lse[0, head, row]),
        online_softmax(s[row], v[0, :, head], TILE),
    )
