"""Unmodified vLLM serves folders that llm-compressor has quantized: its logits are those of the rounded model."""

import json
from pathlib import Path

import pytest


vllm = pytest.importorskip("vllm")

from engines.test_engine import FOLDERS, GROUPED, engine  # noqa: E402


def error(found: list[list[float]], expected: list[list[float]]) -> float:
    """Return the mean difference of log-probabilities."""
    pairs = [(a, b) for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("recipe", ["W8A8", "W4A16"])
@pytest.mark.parametrize("name", GROUPED)
def test_log_probabilities_are_those_of_the_rounded_model(name: str, recipe: str) -> None:
    folder: Path = FOLDERS / f"{name}-{recipe}"
    if not folder.is_dir():
        pytest.skip("llm-compressor is not installed: make .venv-llmcompressor/.installed")
    truth, prompts = (json.loads(file.read_text()) for file in (folder / "truth.json", FOLDERS / "prompts.json"))
    settings = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with engine(folder.name, dtype="bfloat16") as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], settings, use_tqdm=False)
    found = [
        [entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        for ids, output in zip(prompts, outputs, strict=True)
    ]
    assert error(truth["rounded"], truth["plain"]) > 0.01
    assert error(found, truth["rounded"]) < 0.08  # bfloat16; another recipe is off by 0.25 or more
    if recipe == "W4A16":
        assert error(found, truth["rounded"]) < 0.3 * error(found, truth["plain"])
