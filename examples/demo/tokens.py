"""From text to token numbers: the model's own tokenizer, or a stand-in for when there is no model."""

import re
import zlib
from pathlib import Path
from typing import Protocol

Tokens = tuple[list[int], list[str]]  # the numbers, and the same tokens as text


class Tokenizer(Protocol):
    def encode(self, text: str, max_tokens: int) -> Tokens: ...


class FileTokenizer:
    """A tokenizer.json, read by the `tokenizers` package."""

    def __init__(self, path: Path):
        import tokenizers

        self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # The file may ask for padding to a fixed length. The model pads per batch, and only as far as needed.
        self.tokenizer.no_padding()

    def encode(self, text: str, max_tokens: int) -> Tokens:
        self.tokenizer.enable_truncation(max_tokens)
        encoding = self.tokenizer.encode(text)
        return encoding.ids, encoding.tokens


class WordTokenizer:
    """Every word and sign becomes a number by its checksum: no vocabulary file, and the same every time."""

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary

    def encode(self, text: str, max_tokens: int) -> Tokens:
        words = re.findall(r"\w+|[^\w\s]", text.lower())[: max_tokens - 2]
        words = ["[CLS]", *words, "[SEP]"]
        return [zlib.crc32(word.encode()) % self.vocabulary for word in words], words
