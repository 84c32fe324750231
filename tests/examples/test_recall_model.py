import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import diffllama
from diffllama.hub_cards.checks import check
from diffllama.training import differential_stats
from examples.draw_maps import TEXT
from examples.study.recall import CLOSE, OPEN, RecallTask, accuracy, correct


FOLDER = Path(__file__).parents[2] / "examples/recall_model"

WORDS = " London money morning letter window brother house mother father water country night heart table world person"
NOISE = (
    "It was a bright day, and they had gone out to see whether the road was dry. Nobody had said that it would be, but "
    "he was not a man who waited to be told. She went before him, and did not look back until they came to the gate. "
) * 4


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def test_folder_is_complete_and_has_this_packages_code() -> None:
    assert [str(finding) for finding in check(FOLDER)] == []
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 4 << 20
    weights = diffllama.DiffLlamaForCausalLM.from_pretrained(FOLDER)
    assert weights.dtype == torch.bfloat16


def test_values_are_recalled(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    words = [tokenizer.encode(f" {word}")[0] for word in WORDS.split()]
    brackets = (tokenizer.convert_tokens_to_ids(OPEN), tokenizer.convert_tokens_to_ids(CLOSE))
    task = RecallTask(tokenizer(NOISE).input_ids, words, brackets)
    draw = random.Random(0)
    examples = [task.test(draw, 8, 8, 128) for _ in range(16)]
    assert accuracy(correct(model, examples)) > 0.8


def test_the_two_maps_differ(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    stats = differential_stats(model, tokenizer(TEXT, return_tensors="pt").input_ids)
    assert max(stats["cosine"]) < 0.9
