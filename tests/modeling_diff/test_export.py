"""transformers' exporters write the model as ONNX and as a program of `torch.export`, which generate the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, StaticCache

from diffllama import DiffLlamaForCausalLM
from support.tiny_models import EVERY_FEATURE, GROUPED, VARIANTS, tiny_model, tokens


exporters = pytest.importorskip("transformers.exporters", reason="this transformers has no exporters")
if not hasattr(exporters, "ExportedModel"):
    pytest.skip("the exporters of this transformers return no ExportedModel", allow_module_level=True)

import onnxruntime  # noqa: E402
from transformers.exporters import DynamoConfig, DynamoExporter, OnnxConfig, OnnxExporter  # noqa: E402
from transformers.exporters.utils import decompose_for_generation  # noqa: E402


KINDS: dict[str, dict[str, Any]] = {"plain": {}, "every feature": EVERY_FEATURE}
NEW = 12


def prompts(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and their mask, with padding on the left of the second row."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1:2, : length // 2] = 0
    return tokens(batch, length, seed=length), mask


def positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


def greedy(model: DiffLlamaForCausalLM, ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return model.generate(ids, attention_mask=mask, generation_config=settings)[:, ids.shape[1] :].tolist()


@pytest.fixture(params=[(variant, kind) for variant in VARIANTS for kind in KINDS], ids=" ".join, scope="module")
def model(request: pytest.FixtureRequest) -> DiffLlamaForCausalLM:
    variant, kind = request.param
    return tiny_model(variant, attn_implementation="sdpa", **KINDS[kind])


@pytest.fixture(scope="module")
def session(model: DiffLlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Export a step of two rows after a KV cache, and open the file in ONNX Runtime."""
    folder: Path = tmp_path_factory.mktemp("onnx")
    ids, mask = prompts(2, 9)
    inputs = {"input_ids": ids, "attention_mask": mask}
    step = decompose_for_generation(model, inputs, multi_token_decode=True)["decode"][1]
    OnnxExporter().export(model, step, OnnxConfig(dynamic=True)).save_pretrained(folder)
    assert {path.suffix for path in folder.iterdir()} == {".onnx", ".data", ".json", ".py"}
    return onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 20), (2, 9)])
def test_onnx_generates_what_the_model_generates(
    model: DiffLlamaForCausalLM, session: Any, batch: int, length: int
) -> None:
    ids, mask = prompts(batch, length)
    expected, logits_of_model = greedy(model, ids, mask), model(ids, attention_mask=mask).logits
    names = [value.name for value in session.get_outputs()]
    config = model.config
    empty = np.zeros((batch, config.num_key_value_heads, 0, config.head_dim), np.float32)
    feed = {value.name: empty for value in session.get_inputs()}
    feed |= {name: np.array(config.sliding_window) for name in feed if "window" in name}
    feed |= {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), "position_ids": positions(mask).numpy()}
    found = []
    for step in range(NEW):
        outputs = dict(zip(names, session.run(None, feed), strict=True))
        if not step:
            np.testing.assert_allclose(outputs["logits"][:, -1], logits_of_model[:, -1].detach(), rtol=0, atol=1e-4)
        token = outputs.pop("logits")[:, -1:].argmax(-1)
        found.append(token)
        feed = {
            "input_ids": token,
            "attention_mask": np.pad(feed["attention_mask"], ((0, 0), (0, 1)), constant_values=1),
            "position_ids": feed["position_ids"][:, -1:] + 1,
            **{name.replace("output.", "input."): value for name, value in outputs.items()},
        }
    assert np.concatenate(found, 1).tolist() == expected


@pytest.mark.parametrize("fields", [{}, GROUPED], ids=["plain", "groups"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_exported_step_with_a_static_cache_generates_what_the_model_generates(
    variant: str, fields: dict[str, Any]
) -> None:
    model = tiny_model(variant, attn_implementation="sdpa", **fields)
    (ids, mask), length = prompts(2, 9), 32
    expected = greedy(model, ids, mask)
    mask = torch.nn.functional.pad(mask, (0, length - mask.shape[1]), value=1)  # later tokens are masked by causality
    places = positions(mask)

    def inputs(cache: StaticCache, step: int, token: torch.Tensor) -> dict[str, Any]:
        here = {"input_ids": token, "position_ids": places[:, step : step + 1]}
        return here | {"attention_mask": mask, "past_key_values": cache}

    def cache() -> StaticCache:
        cache = StaticCache(model.config, max_cache_len=length)
        cache.early_initialization(2, model.config.num_key_value_heads, model.config.head_dim, torch.float32, "cpu")
        return cache

    step = DynamoExporter().export(model, inputs(cache(), 0, ids[:, :1]), DynamoConfig())
    used, found = cache(), ids
    for i in range(ids.shape[1] + NEW - 1):
        token = step(**inputs(used, i, found[:, i : i + 1])).logits.argmax(-1)
        found = torch.cat((found, token), 1) if i + 1 == found.shape[1] else found
    assert found[:, ids.shape[1] :].tolist() == expected
