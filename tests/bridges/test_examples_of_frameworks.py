"""The node for ComfyUI, called as ComfyUI calls it, and the pipeline of diffusers, run as a script."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NODE, PIPELINE = EXAMPLES / "comfyui" / "numba_flash_node.py", EXAMPLES / "pipelines" / "flux.py"
BATCH, HEADS, TOKENS, KEYS, HEAD_DIM = 2, 4, 5, 7, 8


@pytest.fixture(scope="module")
def node():
    spec = importlib.util.spec_from_file_location("numba_flash_node", NODE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Model:
    """What the node needs of ComfyUI's ModelPatcher."""

    def __init__(self, options=()):
        self.model_options = dict(transformer_options=dict(options))

    def clone(self):
        return Model(self.model_options["transformer_options"])


def test_the_node_puts_its_function_into_a_clone(node):
    made = node.NODE_CLASS_MAPPINGS["NumbaFlashAttention"]()
    model = Model()
    (patched,) = getattr(made, made.FUNCTION)(**dict.fromkeys(made.INPUT_TYPES()["required"], model))
    assert patched.model_options["transformer_options"] == dict(optimized_attention_override=node.attend)
    assert model.model_options["transformer_options"] == {}
    assert made.RETURN_TYPES == ("MODEL",) and node.NODE_DISPLAY_NAME_MAPPINGS.keys() == node.NODE_CLASS_MAPPINGS.keys()


@pytest.mark.parametrize("masked", [None, 2, 3, 4])
@pytest.mark.parametrize("out_as_heads", [False, True])
@pytest.mark.parametrize("as_heads", [False, True])
def test_attention_as_comfyui_calls_it(node, as_heads, out_as_heads, masked):
    torch.manual_seed(0)
    grouped = masked is None
    q, k, v = (torch.randn(BATCH, n, TOKENS if n == HEADS else KEYS, HEAD_DIM) for n in (HEADS, 2, 2))
    if not grouped:
        k, v = (x.repeat(1, 2, 1, 1) for x in (k, v))
    mask = None if grouped else torch.randn(*(BATCH, HEADS)[: max(masked - 2, 0)], TOKENS, KEYS)
    seen = mask[:, None] if masked == 3 else mask
    options = dict(scale=0.3, enable_gqa=True) if grouped else {}
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, **options)
    given = (q, k, v) if as_heads else (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    more = dict(transformer_options={}, _inside_attn_wrapper=True, low_precision_attention=False)
    found = node.attend(
        None, *given, HEADS, mask=mask, skip_reshape=as_heads, skip_output_reshape=out_as_heads, **options, **more
    )
    torch.testing.assert_close(found, expected if out_as_heads else expected.transpose(1, 2).flatten(2))


def test_the_pipeline_runs():
    pytest.importorskip("diffusers", reason="needs diffusers")
    pytest.importorskip("transformers", reason="needs transformers, which a pipeline of diffusers imports")
    environment = os.environ | dict(PYTHONPATH=str(EXAMPLES.parent), HF_HUB_OFFLINE="1")
    done = subprocess.run([sys.executable, PIPELINE], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "largest difference" in done.stdout


@pytest.mark.parametrize("path", [NODE, PIPELINE], ids=lambda path: path.stem)
def test_an_example_has_at_most_40_lines(path):
    assert len(path.read_text().splitlines()) <= 40
