"""What an earlier run read is remembered, so that the next one reads only what is new."""

import hashlib
import inspect
import io
import os
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import numba_flash
from numba_flash.machine.cache_folder import cache_folder

from . import minilm as model
from .minilm import MiniLM


class Memory:
    """One file for each model: the points that it made of texts. Without a file that can be read it knows nothing.

    A text goes by its tokens, the file by all else that a point depends on: weights, sizes and the model's source.
    """

    def __init__(self, minilm: MiniLM):
        self.minilm = minilm
        self.path = cache_folder() / "demo" / f"{fingerprint(minilm)}.npz"
        self.points = read(self.path)

    def recall(self, texts: Sequence[str]) -> list[np.ndarray | None]:
        """Each text's point, (hidden,), or None."""
        return [self.points.get(self.name(text)) for text in texts]

    def keep(self, texts: Sequence[str], points: np.ndarray) -> None:
        """Remember these and forget the others. Where that is not possible, the next run reads again."""
        self.points = dict(zip(map(self.name, texts), points, strict=True))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # A reader sees the file before or the file after, also when two demos run at once.
            with tempfile.NamedTemporaryFile(dir=self.path.parent, delete=False) as file:
                np.savez(file, names=list(self.points), points=list(self.points.values()))
            os.replace(file.name, self.path)
        except OSError:
            pass

    def name(self, text: str) -> str:
        ids = self.minilm.tokenizer.encode(text, self.minilm.max_tokens)[0]
        return hashlib.sha256(np.array(ids, np.int64).tobytes()).hexdigest()


def fingerprint(minilm: MiniLM) -> str:
    made = hashlib.sha256()
    for name, weight in sorted(minilm.weights.items()):
        made.update(name.encode())
        made.update(np.ascontiguousarray(weight).data)
    sizes = minilm.layers, minilm.heads, minilm.max_tokens, minilm.eps
    made.update(repr((sizes, numba_flash.__version__)).encode())
    made.update(inspect.getsource(model).encode())
    return made.hexdigest()[:32]


def read(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(io.BytesIO(path.read_bytes())) as file:
            return dict(zip(file["names"].tolist(), file["points"], strict=True))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return {}
