"""MiniLM-L6, a small language model that turns a sentence into a point on a sphere, in plain NumPy.

It is BERT: embed the tokens, then per layer one attention and one two-layer network, each added to
its input and normalised. The sentence is the mean of its tokens, scaled to length 1, so the cosine of
two sentences is their dot product.

Sentences of different lengths share a batch: short ones are padded, and `seqlens_k` tells attention
where each ends. That one argument is all the masking there is. `attention` can be any function that
takes the arguments used here, so the plain formula or the oracle can run in its place.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

from .tokens import Tokenizer

Attention = Callable[..., np.ndarray]
Batch = tuple[list[int], np.ndarray, np.ndarray]  # which texts, their token ids, their lengths

BATCH = 32


@numba.vectorize(["float32(float32)"])
def gelu(x: Any) -> Any:
    """x times the chance that a standard normal number is below x. NumPy has no erf, so Numba gives it one."""
    return x * (0.5 + 0.5 * math.erf(x * math.sqrt(0.5)))


@dataclass(frozen=True)
class MiniLM:
    weights: dict[str, np.ndarray]  # under BERT's own names
    tokenizer: Tokenizer
    layers: int
    heads: int
    max_tokens: int
    eps: float

    @property
    def hidden(self) -> int:
        return len(self.weights["embeddings.LayerNorm.bias"])

    def encode(
        self,
        texts: Sequence[str],
        attention: Attention,
        progress: Callable[[Sequence[Batch]], Iterable[Batch]] = iter,
    ) -> np.ndarray:
        """One unit vector per text: (texts, hidden). `progress` may watch the batches go by."""
        points = np.empty((len(texts), self.hidden), np.float32)
        for chosen, ids, lengths in progress(self.batches(texts)):
            hidden = self.forward(ids, lengths, attention)  # (batch, tokens, hidden)
            # Sum only real tokens: the padding rows hold numbers too, and they mean nothing.
            real = np.arange(ids.shape[1]) < lengths[:, None]  # (batch, tokens)
            point = np.where(real[:, :, None], hidden, 0).sum(1)  # (batch, hidden)
            points[chosen] = point / np.linalg.norm(point, axis=1, keepdims=True)
        return points

    def batches(self, texts: Sequence[str]) -> list[Batch]:
        """Texts of similar length together, so that little is padded."""
        rows = [self.tokenizer.encode(text, self.max_tokens)[0] for text in texts]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        batches = []
        for begin in range(0, len(order), BATCH):
            chosen = order[begin : begin + BATCH]
            lengths = np.array([len(rows[i]) for i in chosen], np.int32)
            ids = np.zeros((len(chosen), lengths.max()), np.int64)
            for row, i in enumerate(chosen):
                ids[row, : len(rows[i])] = rows[i]
            batches.append((chosen, ids, lengths))
        return batches

    def forward(self, ids: np.ndarray, lengths: np.ndarray, attention: Attention) -> np.ndarray:
        """The last layer's hidden state: (batch, tokens, hidden)."""
        w = self.weights
        x = w["embeddings.word_embeddings.weight"][ids]
        x = x + w["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = x + w["embeddings.token_type_embeddings.weight"][0]
        x = self.normalise("embeddings.LayerNorm", x)
        for layer in range(self.layers):
            name = f"encoder.layer.{layer}"
            o = self.attend(f"{name}.attention.self", x, lengths, attention)
            o = self.linear(f"{name}.attention.output.dense", o)
            x = self.normalise(f"{name}.attention.output.LayerNorm", x + o)
            y = gelu(self.linear(f"{name}.intermediate.dense", x))
            y = self.linear(f"{name}.output.dense", y)
            x = self.normalise(f"{name}.output.LayerNorm", x + y)
        return x

    def attend(self, name: str, x: np.ndarray, lengths: np.ndarray, attention: Attention) -> np.ndarray:
        """Split the hidden state into heads, attend, and put the heads side by side again."""
        by_head = (*x.shape[:2], self.heads, -1)  # "bshd": where the product leaves the heads, no copy
        q = self.linear(f"{name}.query", x).reshape(by_head)
        k = self.linear(f"{name}.key", x).reshape(by_head)
        v = self.linear(f"{name}.value", x).reshape(by_head)
        return attention(q, k, v, seqlens_k=lengths, layout="bshd").reshape(x.shape)

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        # One tall product is far faster than NumPy's one product per sentence.
        y: np.ndarray = x.reshape(-1, x.shape[-1]) @ weight.T + bias
        return y.reshape(*x.shape[:-1], len(bias))

    def normalise(self, name: str, x: np.ndarray) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        x /= np.sqrt((x * x).mean(-1, keepdims=True) + self.eps)
        x *= self.weights[f"{name}.weight"]
        x += self.weights[f"{name}.bias"]
        return x
