"""The demo from beginning to end: each function is one section of what it prints."""

import functools
import importlib.util
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import numba_flash

from .measure import REPEATS, Measured
from .memory import Memory
from .minilm import BATCH, MiniLM
from .passages import Passage, project_passages
from .picture_text import text_picture
from .plain import plain_attention
from .scene import make_scene
from .screen import Screen
from .search import QUESTIONS, Answer, search
from .weights import MODEL_PACKAGE, installed_model, load, missing_readers, random_model

# Every run measures again, and the plain formula and the oracle take most of its time: beside other programs, where
# NumPy's BLAS all but stands still, 7 s for 6 passages, and 69 s for 24 in one batch.
MEASURED_EACH = 96


def tell(model: str | None, picture: str, questions: Sequence[str], quiet: bool, row: bool) -> bool:
    screen = Screen(quiet)
    questions = questions or QUESTIONS
    screen.say(
        "A small language model reads a sentence, then this project's documentation, and answers questions about it. "
        "It is written in NumPy, and each of its attentions is one call of numba_flash.attention."
    )
    minilm = open_model(model, screen)
    pictures_passed = show_pictures(minilm, picture, screen)
    if row:
        return pictures_passed
    passages = open_documents(minilm, screen)
    prepare_kernel(minilm, screen)
    measured = Measured(
        numba_flash.attention,
        plain_attention,
        functools.partial(numba_flash.attention, kernel="reference"),
        minilm.layers,
        repeats=1 if quiet else REPEATS,  # nobody sees the times
    )
    points = read_passages(minilm, [passage.text for passage in passages], measured, screen)
    asked = minilm.encode(questions, numba_flash.attention)
    show_answers(search(questions, asked, passages, points), screen)
    passed = show_layers(measured, screen) and pictures_passed
    screen.line()
    screen.say("All checks held." if passed else "A CHECK FAILED: see what is marked FAIL above.")
    return passed


def open_model(model: str | None, screen: Screen) -> MiniLM:
    screen.title("The model")
    folder = Path(model) if model else installed_model()
    if folder is None or (model is None and missing_readers()):
        lacking = missing_readers() or [MODEL_PACKAGE]
        screen.say(
            f"The weights are missing (not installed: {', '.join(lacking)}), so random weights of MiniLM-L6's "
            "shapes stand in. The answers below are meaningless; the checks of attention still hold."
        )
        minilm = random_model()
    else:
        minilm = load(folder)
        screen.say(f"MiniLM from {folder}.")
    count = sum(x.size for x in minilm.weights.values()) / 1e6
    screen.say(
        f"{minilm.layers} layers, {minilm.heads} heads of {minilm.hidden // minilm.heads} numbers each, "
        f"{count:.1f} million weights."
    )
    return minilm


def open_documents(minilm: MiniLM, screen: Screen) -> list[Passage]:
    screen.title("The text")
    passages = project_passages()
    files = {passage.file for passage in passages}
    batches = minilm.batches([passage.text for passage in passages])
    tokens = sum(int(lengths.sum()) for _, _, lengths in batches)
    screen.say(f"{len(passages)} passages, {tokens} tokens, from {len(files)} files: the project's own words.")
    return passages


def prepare_kernel(minilm: MiniLM, screen: Screen) -> None:
    """Say what will run, and compile it: once for small problems and once for large ones."""
    screen.title("The kernel")
    begin = time.perf_counter()
    for batch, tokens in screen.progress([(1, 8), (BATCH, 64)], "Compiling"):
        q = np.zeros((batch, tokens, minilm.heads, minilm.hidden // minilm.heads), np.float32)
        options: dict[str, Any] = {"seqlens_k": np.full(batch, tokens, np.int32), "layout": "bshd"}
        explanation = numba_flash.explain(q, q, q, **options)
        if explanation.target.simulated:
            raise ValueError("NUMBA_ENABLE_CUDASIM is set, and simulated the demo would take hours; unset it")
        numba_flash.attention(q, q, q, **options)
    seconds = time.perf_counter() - begin
    screen.say(
        f"Compiled, or found compiled by an earlier run, in {seconds:.1f} s. numba_flash.explain says of a batch:"
    )
    for line in str(explanation).splitlines():
        if not line.startswith("  not "):  # why no other kernel runs
            screen.line(f"  {line}")


def read_passages(minilm: MiniLM, texts: Sequence[str], measured: Measured, screen: Screen) -> np.ndarray:
    """A point for each text, (texts, hidden). Some are measured in every run, the others read once and remembered."""
    memory = Memory(minilm)
    known = dict(enumerate(memory.recall(texts)))
    sample = range(0, len(texts), MEASURED_EACH)
    new = [i for i, point in known.items() if point is None and i not in sample]
    screen.say(f"{len(texts) - len(sample) - len(new)} passages are remembered from an earlier run.")
    for chosen, attention, what in ((new, numba_flash.attention, "Reading"), (sample, measured, "Measuring")):
        progress = functools.partial(screen.progress, what=what)
        known |= zip(chosen, minilm.encode([texts[i] for i in chosen], attention, progress), strict=True)
    points = np.array([known[i] for i in range(len(texts))])
    memory.keep(texts, points)
    return points


def show_answers(answers: Sequence[Answer], screen: Screen) -> None:
    screen.title("Questions, and the passage nearest in meaning")
    for answer in answers:
        screen.line()
        screen.line(answer.question)
        screen.line(f"  {answer.passage.file}:{answer.passage.line}, cosine {answer.score:.2f}")
        words = answer.passage.text.split()
        screen.say(" ".join(words[:70]) + (" ..." if len(words) > 70 else ""), indent="  | ")


def show_layers(measured: Measured, screen: Screen) -> bool:
    """The table of checks and times; True when every layer is within its tolerance."""
    screen.title(f"Each layer, over every {MEASURED_EACH}th passage: exactness and time")
    screen.say(
        "Error: the largest difference from the oracle, the formula in float64. Plain NumPy, the formula in "
        "float32, has one too: allowed is twice that, and what rounding the scores once can do."
    )
    screen.line()
    screen.line(f"{'':5}  {'numba_flash.attention':^34}  {'plain NumPy':^23}")
    screen.line("layer     error   allowed             time     error            time")
    for number, layer in enumerate(measured.layers, 1):
        verdict = "ok" if layer.passed else "FAIL"
        screen.line(
            f"{number:>5}   {layer.difference:.1e}   {layer.tolerance:.1e}  {verdict:<4}"
            f"  {layer.seconds * 1e3:>7.1f} ms"
            f"   {layer.plain_difference:.1e}  {layer.plain_seconds * 1e3:>9.1f} ms"
        )
    ours = sum(layer.seconds for layer in measured.layers)
    plain = sum(layer.plain_seconds for layer in measured.layers)
    screen.line(f"total  {ours * 1e3:>35.1f} ms  {plain * 1e3:>19.1f} ms")
    screen.line()
    screen.say(
        f"Times: the median of {REPEATS} runs of each call, added up. {comparison(ours, plain)} The plain "
        f"formula held a score matrix of up to {measured.score_bytes / 1e6:.0f} MB; ours holds none."
    )
    return all(layer.passed for layer in measured.layers)


def comparison(ours: float, plain: float) -> str:
    """Who was faster, if that can be told: with other programs on its cores, NumPy's BLAS all but stands still."""
    load, cores = (os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0), os.cpu_count() or 1
    if load > 1.5 * cores:  # the demo alone keeps every core busy, and no more
        return f"Do not trust them: other programs run here, too (load {load:.1f} on {cores} cores)."
    if ours < plain:
        return f"Ours is {plain / ours:.1f} times as fast here."
    return f"Ours is {ours / plain:.1f} times slower here."


def show_pictures(minilm: MiniLM, picture: str, screen: Screen) -> bool:
    """One head's weights and one query's tiles; True when these tiles end at the library's result."""
    scene = make_scene(minilm, numba_flash.attention)
    screen.title("One head at work")
    for line in text_picture(scene):
        screen.line(line)
    screen.line()
    if importlib.util.find_spec("matplotlib") is None:
        screen.say("With matplotlib installed, the demo would draw this as a picture, too.")
    else:
        from .picture import save_picture

        save_picture(scene, picture)
        screen.say(f"The same as a picture: {Path(picture).resolve()}")
    return scene.passed
