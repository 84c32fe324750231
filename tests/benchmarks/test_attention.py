from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import attention
from benchmarks.attention import Attention
from benchmarks.correctness import CorrectnessError
from benchmarks.implementations import DIFFERENTIAL, Setting
from benchmarks.measure import Step
from diffllama.modeling_diff.differential_attention import combine_maps


SETTING = Setting("tiny", 2, 33)
ALONE = ("llama", "v1", "v2", "v2-4to1")


def check(step: Step) -> None:
    step.before()
    step.check()


def steps(architecture: str, setting: Setting) -> dict[str, Step]:
    whole, cached = Attention(architecture, setting), Attention(architecture, setting, decoding=True)
    return {
        "prefill": attention.forward(whole, "sdpa"),
        "train": attention.train(whole, "sdpa"),
        "decode": attention.forward(cached, "sdpa"),
    }


@pytest.mark.parametrize(("dtype", "groups"), [("float32", None), ("float32", 2), ("bfloat16", 2)])
@pytest.mark.parametrize("architecture", ALONE)
def test_timed_attention_computes_what_plain_pytorch_does(architecture: str, dtype: str, groups: int | None) -> None:
    timed = steps(architecture, replace(SETTING, dtype=dtype, groups=groups))
    for step in timed.values():
        check(step)
        step.run()
    assert {name: step.tokens for name, step in timed.items()} == {"prefill": 66, "train": 66, "decode": 2}


@pytest.mark.parametrize("case", ["prefill", "train", "decode"])
@pytest.mark.parametrize(("architecture", "scale"), [("llama", 1.01), ("v1", torch.nan), ("v2", 1.01)])
def test_function_that_computes_something_else_is_refused(
    architecture: str, scale: float, case: str, functions: dict[str, Any]
) -> None:
    sdpa = functions["sdpa"]
    functions["sdpa"] = lambda *args, **kwargs: (scale * sdpa(*args, **kwargs)[0], None)
    with pytest.raises(CorrectnessError, match="output attention differs"):
        check(steps(architecture, SETTING)[case])


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 1.01 * gradient


@pytest.mark.parametrize("architecture", ALONE)
def test_function_with_a_wrong_backward_is_refused(architecture: str, functions: dict[str, Any]) -> None:
    sdpa = functions["sdpa"]

    def wrong(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return sdpa(module, ScaledGradient.apply(query), *args, **kwargs)

    functions["sdpa"] = wrong
    check(steps(architecture, SETTING)["prefill"])
    with pytest.raises(CorrectnessError, match="gradient query"):
        check(steps(architecture, SETTING)["train"])


@pytest.mark.parametrize("variant", DIFFERENTIAL)
def test_fused_function_may_return_the_difference_itself(variant: str, functions: dict[str, Any]) -> None:
    def fused(*args: Any, differential_lambda: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return combine_maps(functions["sdpa"](*args, **kwargs)[0], differential_lambda, args[0].signals_per_noise), None

    functions["fused"] = fused
    loaded = Attention(variant, SETTING)
    check(attention.forward(loaded, "fused"))
    check(attention.train(loaded, "fused"))


def test_decoding_has_one_query_and_a_cache_as_models_have_it() -> None:
    loaded = Attention("v1", SETTING, decoding=True)
    assert loaded.query.shape == (2, 1, 4, 32)
    assert loaded.cached.shape == loaded.value.transpose(1, 2).shape == (2, 2, 33, 64)
    assert loaded.cached.is_contiguous()
    assert loaded.value.transpose(1, 2).is_contiguous()
