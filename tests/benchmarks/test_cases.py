import pytest

from benchmarks.cases import CASES, DEFAULT, choose


def test_names_and_groups_choose_each_case_once() -> None:
    assert [case.name for case in choose(["model/train", "attention", "model/train"])] == [
        "model/train",
        "attention/prefill",
        "attention/train",
        "attention/decode",
    ]
    assert {case.name for case in choose(["attention", "model", "generate"])} == set(CASES)
    assert {case.name for case in choose(DEFAULT)} == {
        *(f"attention/{step}" for step in ("prefill", "train", "decode")),
        *(f"model/{step}" for step in ("prefill", "train", "decode")),
    }


def test_name_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Unknown case or group 'model/predict'\. Known: attention, model, generate, att"
    ):
        choose(["model/predict"])


def test_continuous_batching_is_measured_where_there_is_one_call_that_takes_pages() -> None:
    assert CASES["generate/continuous"].architectures == ("llama", "v1", "v2", "llama-4to1", "v2-4to1")
    assert "transformers" in CASES["generate/static"].architectures
