"""Find the passage nearest in meaning to a question."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .passages import Passage

QUESTIONS = (
    "How do I stop inside a kernel with a debugger?",
    "What is returned for a query that sees no key?",
    "How can attention over parts of the keys be put together?",
    "Where are compiled kernels kept?",
)


@dataclass(frozen=True)
class Answer:
    question: str
    passage: Passage
    score: float  # cosine: 1 is the same meaning, 0 nothing in common


def search(
    questions: Sequence[str],
    question_points: np.ndarray,  # (questions, hidden), of length 1
    passages: Sequence[Passage],
    passage_points: np.ndarray,  # (passages, hidden), of length 1
) -> list[Answer]:
    """The best passage for each question."""
    scores = question_points @ passage_points.T  # (questions, passages)
    best = scores.argmax(1)
    found = zip(questions, scores, best, strict=True)
    return [Answer(question, passages[i], float(row[i])) for question, row, i in found]
