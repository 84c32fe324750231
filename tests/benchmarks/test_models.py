from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from benchmarks import models
from benchmarks.cases import CASES
from benchmarks.correctness import CorrectnessError
from benchmarks.implementations import ARCHITECTURES, Setting
from benchmarks.measure import Step


SETTING = Setting("tiny", 2, 33, new_tokens=3)
WHOLE = [name for name in CASES if not name.startswith("attention/")]


def step(case: str, architecture: str, setting: Setting = SETTING) -> Step:
    made = CASES[case].step(CASES[case].build(architecture, setting), "sdpa")
    made.before()
    return made


@pytest.mark.parametrize(
    ("case", "architecture"), [(case, architecture) for case in WHOLE for architecture in CASES[case].architectures]
)
def test_timed_model_computes_what_eager_attention_does(case: str, architecture: str) -> None:
    made = step(case, architecture)
    made.check()
    made.run()
    group, _, name = case.partition("/")
    assert made.tokens == {"generate": 2 * 3, "decode": 2}.get(group if group == "generate" else name, 2 * 33)


@pytest.mark.parametrize("case", ["model/prefill", "model/decode", "model/train", "generate/dynamic"])
@pytest.mark.parametrize("architecture", ["v1", "v2"])
def test_bfloat16_loses_no_more_than_eager_attention(case: str, architecture: str) -> None:
    step(case, architecture, replace(SETTING, dtype="bfloat16")).check()


@pytest.mark.parametrize("case", ["model/prefill", "model/decode", "model/train", "generate/dynamic"])
@pytest.mark.parametrize(("architecture", "scale"), [("llama", -10), ("v1", -10), ("v2", torch.nan)])
def test_model_that_computes_something_else_is_refused(
    architecture: str, scale: float, case: str, functions: dict[str, Any]
) -> None:
    def wrong(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (scale * function(*args, **kwargs)[0].roll(1, -1), None)

    made = step(case, architecture)
    functions |= {name: wrong(functions[name]) for name in ("sdpa", "diff_attention")}
    with pytest.raises(CorrectnessError, match=r"differs from plain PyTorch's by|below eager attention's largest"):
        made.check()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_model_that_does_not_learn_is_refused(architecture: str) -> None:
    loaded = models.trained_model(architecture, SETTING)
    loaded.optimizer = AdamW([*loaded.model.parameters()][1:], lr=1e-4)
    with pytest.raises(CorrectnessError, match=r"a training step does not change model\.embed_tokens\.weight"):
        models.train(loaded, "sdpa").check()
    loaded.model.lm_head.weight.requires_grad_(False)
    with pytest.raises(CorrectnessError, match=r"lm_head\.weight 0 has no gradient"):
        models.train(loaded, "sdpa").check()


def test_longer_cache_repeats_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = models.model_with_cache("v1", replace(SETTING, length=8)).cache.layers
    monkeypatch.setattr(models, "CHECKED_CACHE", 8)
    for layer, read in zip(models.model_with_cache("v1", SETTING).cache.layers, whole, strict=True):
        for tensor, repeated in ((layer.keys, read.keys), (layer.values, read.values)):
            torch.testing.assert_close(tensor, repeated[:, :, torch.arange(33) % 8])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_and_the_optimizers_state_are_measured(architecture: str) -> None:
    loaded = models.trained_model(architecture, SETTING)
    made = models.train(loaded, "sdpa")
    made.run()
    nbytes, tensors = 4 * loaded.model.num_parameters(), len(list(loaded.model.parameters()))
    assert made.kept() == {"weights": nbytes, "optimizer": 2 * nbytes + 4 * tensors}  # two moments, and a counter


def test_checkpointing_and_autocast_are_what_is_timed() -> None:
    assert models.trained_model("v1", SETTING, checkpointing=True).model.is_gradient_checkpointing
    loaded = models.trained_model("v1", SETTING, autocast=True)
    dtypes = set()
    loaded.model.lm_head.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    models.train(loaded, "sdpa").run()
    assert dtypes == {torch.bfloat16}
    assert loaded.model.dtype == torch.float32


def test_decoding_leaves_the_cache_as_it_was() -> None:
    loaded = models.model_with_cache("v1", SETTING)
    for run in [models.decode(loaded, "sdpa").run] * 3:
        run()
        assert loaded.cache.get_seq_length() == SETTING.length


@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_makes_so_many_tokens_and_checks_them(cache: str | None) -> None:
    loaded = models.plain_model("v2", SETTING)
    texts = models.generate(loaded, "sdpa", cache).run()
    assert [len(text) for text in texts] == [3, 3]
    prompts = loaded.tokens().tolist()
    models.check_generated(loaded, prompts, texts)
    with pytest.raises(CorrectnessError, match="generated 2 tokens instead of 3"):
        models.check_generated(loaded, prompts, [text[:2] for text in texts])
    with pytest.raises(CorrectnessError, match="below eager attention's largest"):
        models.check_generated(loaded, prompts, [[(text[0] + 1) % 512, *text[1:]] for text in texts])


def test_continuous_batching_has_prompts_of_a_quarter_of_the_length_to_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded, lengths = models.plain_model("v1", Setting("tiny", 4, 32, new_tokens=2)), []
    generate_batch = loaded.model.generate_batch

    def spy(prompts: list[list[int]], **options: Any) -> Any:
        lengths.extend(map(len, prompts))
        return generate_batch(prompts, **options)

    monkeypatch.setattr(loaded.model, "generate_batch", spy)
    texts = partial(models.continuous(loaded, "sdpa").run)()
    assert lengths == [32, 24, 16, 8]
    assert [len(text) for text in texts] == [2] * 4
