"""Unmodified vLLM generates the same from our folders as transformers, by its Transformers backend.

`make test-vllm` runs this in an environment that has vLLM and not this package.
"""

import dataclasses
import importlib.util
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch


vllm = pytest.importorskip("vllm")

from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402

from support.folder_generation import another_process, greedy, scored  # noqa: E402


FOLDERS = Path(__file__).parents[2] / "build/vllm"
"""What folders.py wrote."""

GROUPED = ["v1-gqa", "v2-gqa", "v1-groups", "v2-groups"]
EVERY = ["v1-mha", "v2-mha", *GROUPED]
NEW = 12
TOP = 5

CHUNK = 64
"""Tokens that the engine reads at a time; the longest prompt has more."""


def prompts() -> list[list[int]]:
    """Return prompts of mixed lengths."""
    random = torch.Generator().manual_seed(0)
    return [torch.randint(6, 97, (length,), generator=random).tolist() for length in (3, 200, 17, 1, 90)]


def test_options_that_model_cards_print_are_its_own() -> None:
    options = {field.name for field in dataclasses.fields(EngineArgs)}
    assert {"trust_remote_code", "revision", "code_revision"} <= options


def test_package_is_not_installed() -> None:
    assert importlib.util.find_spec("diffllama") is None


@contextmanager
def engine(name: str, **options: Any) -> Iterator[Any]:
    """Run an engine of a folder while the context lasts."""
    settings = {
        "distributed_executor_backend": "uni",
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_batched_tokens": CHUNK,
    }
    llm = vllm.LLM(
        model=str(FOLDERS / name), trust_remote_code=True, max_num_seqs=8, disable_log_stats=False, **settings | options
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def generate(llm: Any, asked: list[list[int]], **request: Any) -> list[Any]:
    """Generate greedily. Returns tokens with their most likely alternatives."""
    settings = vllm.SamplingParams(temperature=0, max_tokens=NEW, logprobs=TOP, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": ids} for ids in asked], settings, use_tqdm=False, **request)


@pytest.fixture(scope="module")
def plain() -> Iterator[ProcessPoolExecutor]:
    """A process with transformers that has not imported vLLM."""
    with another_process() as process:
        yield process


def assert_same(
    outputs: list[Any], plain: ProcessPoolExecutor, name: str, asked: list[list[int]], tolerance: float = 1e-4
) -> None:
    """Check that tokens, the five most likely ones and their log-probabilities equal those of transformers."""
    expected = plain.submit(greedy, FOLDERS / name, asked, NEW).result()
    for output, (tokens, logprobs) in zip(outputs, expected, strict=True):
        assert list(output.outputs[0].token_ids) == tokens
        for entries, truth in zip(output.outputs[0].logprobs, torch.tensor(logprobs), strict=True):
            assert set(truth.topk(TOP).indices.tolist()) <= set(entries)
            for token, entry in entries.items():
                assert abs(entry.logprob - truth[token]) < tolerance


@pytest.mark.parametrize("name", EVERY)
def test_engine_generates_what_transformers_generates(name: str, plain: ProcessPoolExecutor) -> None:
    with engine(name) as llm:
        asked = prompts()
        assert max(map(len, asked)) > 3 * CHUNK
        first = generate(llm, asked)
        again = generate(llm, asked)
    assert_same(first, plain, name, asked)
    assert_same(again, plain, name, asked)
    assert [output.num_cached_tokens > 0 for output in again] == [len(ids) > 128 for ids in asked]


@pytest.mark.parametrize("name", GROUPED)
def test_compiled_it_does_too(name: str, plain: ProcessPoolExecutor) -> None:
    with engine(name, enforce_eager=False) as llm:
        outputs = generate(llm, prompts())
    assert_same(outputs, plain, name, prompts())


@pytest.mark.parametrize("name", GROUPED)
def test_two_processes_do_too(name: str, plain: ProcessPoolExecutor) -> None:
    with engine(name, tensor_parallel_size=2, distributed_executor_backend="mp") as llm:
        outputs = generate(llm, prompts())
    assert_same(outputs, plain, name, prompts())


@pytest.mark.parametrize(("eager", "tolerance"), [(True, 0.05), (False, 0.15)])
@pytest.mark.parametrize("name", GROUPED)
def test_in_bfloat16_log_probabilities_are_near(
    name: str, plain: ProcessPoolExecutor, eager: bool, tolerance: float
) -> None:
    with engine(name, dtype="bfloat16", enforce_eager=eager) as llm:
        outputs = generate(llm, prompts())
    answers = [list(output.outputs[0].token_ids) for output in outputs]  # nearly equal tokens may change places
    truth, rounded = (
        torch.tensor(plain.submit(scored, FOLDERS / name, prompts(), answers, dtype).result())
        for dtype in ("float32", "bfloat16")
    )
    found = torch.full_like(truth, torch.nan)
    for i, output in enumerate(outputs):
        for step, entries in enumerate(output.outputs[0].logprobs):
            for token, entry in entries.items():
                found[i, step, token] = entry.logprob
    listed = ~found.isnan()
    assert listed.sum() >= len(answers) * NEW * TOP
    assert (found - rounded)[listed].abs().mean() < tolerance
    assert (found - truth)[listed].abs().max() <= 2 * (rounded - truth)[listed].abs().max()


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_adapters_of_peft_are_applied(variant: str, plain: ProcessPoolExecutor) -> None:
    with engine(f"{variant}-gqa", enable_lora=True, max_lora_rank=8) as llm:
        adapted = generate(llm, prompts(), lora_request=LoRARequest("adapter", 1, str(FOLDERS / f"{variant}-adapter")))
        base = generate(llm, prompts())
    assert_same(base, plain, f"{variant}-gqa", prompts())
    assert_same(adapted, plain, f"{variant}-merged", prompts(), 1e-3)
    assert [output.outputs[0].token_ids for output in adapted] != [output.outputs[0].token_ids for output in base]
