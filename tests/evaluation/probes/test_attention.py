"""Attention to the answer, planted or uniform, has the shares that arithmetic gives."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from diffllama.evaluation.datasets.data import Source
from diffllama.evaluation.datasets.haystack import HEAD, ask
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.probes.attention import AttentionToAnswer, Passage, last_rows
from support.planted_attention import planted_model
from support.probe_runs import run_probe
from support.tiny_loaded_models import KINDS, tiny_loaded_model
from support.tiny_models import tiny_tokenizer


LENGTH = 700

NEEDLE = re.compile(r"The magic number of \w+ is \d{7}\.")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A text without digits, one byte per letter."""
    file = tmp_path / "sea.txt"
    file.write_text("The sea is grey. Gulls cry over the harbour! Who hears them? A boat lies there alone. " * 9)
    return file


def passages(probe: AttentionToAnswer, loaded: LoadedModel, data: Path) -> dict[str, Passage]:
    return dict(probe.samples(Source(data, built_in=False), loaded))


def shares(loaded: LoadedModel, passage: Passage) -> dict[str, dict[str, float]]:
    """Return the shares of a kind."""
    (outcome,) = AttentionToAnswer().measure(loaded, {"one": passage})
    return {one.condition["shares"]: one.values for one in outcome.measurements}


def counted(loaded: LoadedModel, passage: Passage) -> tuple[int, int, int]:
    """Return the numbers of letters of the prompt, of its text and of the answer, counted by hand."""
    prompt = loaded.tokenizer.decode(passage.ids)
    _, text, question = prompt.split("\n\n")
    assert question.startswith("Question: What is the magic number of ")
    (needle,) = NEEDLE.findall(text)
    return len(prompt), len(text), len(needle)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_to_the_answer_alone(kind: str, data: Path) -> None:
    loaded = planted_model(kind)
    for passage in passages(AttentionToAnswer(length=LENGTH, samples_per_condition=1), loaded, data).values():
        whole = 1 if kind == "llama" else 0.75
        for values in shares(loaded, passage).values():
            assert values == pytest.approx({"answer": 1, "noise": 0, "other": 0, "sum": whole}, abs=1e-5)


@pytest.mark.parametrize("lambda_", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_uniform_attention(kind: str, lambda_: float, data: Path) -> None:
    """Each of n tokens has 1/n, signed and absolute, and rows sum to 1 - λ."""
    loaded = planted_model(kind, score=0, second=0, lambda_=lambda_)
    passage = passages(AttentionToAnswer(length=LENGTH, depth=[0.5], samples_per_condition=1), loaded, data)["0.5 0"]
    n, text, answer = counted(loaded, passage)
    expected = {"answer": answer / n, "noise": (text - answer) / n, "other": (n - text) / n}
    whole = 1 if kind == "llama" else 1 - lambda_
    for values in shares(loaded, passage).values():
        assert values == pytest.approx(expected | {"sum": whole}, rel=1e-4)


@pytest.mark.parametrize(("kind", "lambda_"), [("v1", 0.25), ("v1", 1.0), ("v1", 1.5), ("v2", 0.25), ("v2", 0.75)])
def test_first_maps_on_the_answer_and_second_maps_uniform(kind: str, lambda_: float, data: Path) -> None:
    """A1 has 1/7 for each digit, A2 has 1/n for each token. The noise is negative, and no sum is 0."""
    loaded = planted_model(kind, second=0, lambda_=lambda_)
    passage = passages(AttentionToAnswer(length=LENGTH, depth=[0.25], samples_per_condition=1), loaded, data)["0.25 0"]
    n, text, answer = counted(loaded, passage)
    parts = {part: -lambda_ * count / n for part, count in (("noise", text - answer), ("other", n - text))}
    parts["answer"] = 1 - lambda_ * answer / n
    found = shares(loaded, passage)
    if lambda_ == 1:
        assert "signed" not in found
    else:
        signed = {part: value / (1 - lambda_) for part, value in parts.items()}
        assert found["signed"] == pytest.approx(signed | {"sum": 1 - lambda_}, rel=1e-4)
    parts["answer"] = 7 * (1 / 7 - lambda_ / n) + (answer - 7) * lambda_ / n
    whole = sum(map(abs, parts.values()))
    absolute = {part: abs(value) / whole for part, value in parts.items()}
    assert found["absolute"] == pytest.approx(absolute | {"sum": whole}, rel=1e-4)


def test_every_head_and_layer_counts_by_what_it_gives(data: Path) -> None:
    """One layer has λ = 0.5 and attends to the answer, the other has λ = 0.9 and attends uniformly."""
    loaded = planted_model("v1", lambda_=0.5)
    last = loaded.model.model.layers[1].self_attn
    last.lambda_init = 0.9
    last.q_proj.weight.data.zero_()
    passage = passages(AttentionToAnswer(length=LENGTH, depth=[0.5], samples_per_condition=1), loaded, data)["0.5 0"]
    n, _, answer = counted(loaded, passage)
    assert shares(loaded, passage)["signed"]["answer"] == pytest.approx((0.5 + 0.1 * answer / n) / 0.6, rel=1e-4)
    (outcome,) = AttentionToAnswer().measure(loaded, {"one": passage})
    assert outcome.detail["layers"]["signed"]["answer"] == pytest.approx([0.5, 0.1 * answer / n], rel=1e-4)


def test_maps_that_cancel_have_no_shares(data: Path) -> None:
    loaded = planted_model("v1", lambda_=1.0)
    (passage,) = passages(AttentionToAnswer(length=LENGTH, depth=[0], samples_per_condition=1), loaded, data).values()
    (outcome,) = AttentionToAnswer().measure(loaded, {"one": passage})
    assert outcome.measurements == []
    assert not torch.tensor(outcome.detail["map"]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_last_of_the_maps_that_eager_returns(kind: str) -> None:
    loaded = tiny_loaded_model(kind)
    ids = loaded.tensor(loaded.encode("A boat lies in the harbour."))
    signed, absolute = last_rows(loaded.model, ids)
    loaded.model.set_attn_implementation("eager")
    maps = torch.stack(loaded.model(ids, output_attentions=True).attentions)[:, 0, :, -1].double()
    torch.testing.assert_close(signed, maps.mean(1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(absolute, maps.abs().mean(1), rtol=1e-4, atol=1e-6)


def test_spans_of_tokens_are_those_of_the_letters(data: Path) -> None:
    loaded = tiny_loaded_model("llama")
    found = passages(AttentionToAnswer(length=LENGTH, samples_per_condition=2), loaded, data)
    assert len({tuple(passage.ids) for passage in found.values()}) == len(found) == 10
    for name, passage in found.items():
        prompt = loaded.tokenizer.decode(passage.ids)
        answer, text = (prompt[slice(*span)] for span in (passage.answer, passage.context))
        assert NEEDLE.fullmatch(answer)
        assert text == prompt.split("\n\n")[1]
        assert text.index(answer) / (len(text) - len(answer)) == pytest.approx(float(name.split()[0]), abs=0.06)
        assert LENGTH - 40 < len(passage.ids) <= LENGTH


def test_spans_of_words_after_a_token_of_beginning(data: Path) -> None:
    """The BOS token is neither text nor answer."""
    words = tiny_tokenizer()
    words.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    words = PreTrainedTokenizerFast(tokenizer_object=words.backend_tokenizer, bos_token="<s>", unk_token="<unk>")
    loaded = dataclasses.replace(tiny_loaded_model("llama"), tokenizer=words)
    passage = passages(AttentionToAnswer(length=100, depth=[1], samples_per_condition=1), loaded, data)["1 0"]
    head, question = len(HEAD.split()), len(ask(["X"]).split())
    assert passage.ids[:2] == [1, words.unk_token_id]
    assert passage.context == (1 + head, len(passage.ids) - question)
    assert passage.answer == (len(passage.ids) - question - 7, len(passage.ids) - question)
    assert len(passage.ids) <= 100


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that is created."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return made


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_has_all_token_pairs_or_all_logits(kind: str) -> None:
    """The largest tensors are queries, n × 6 × 16 padded or n × 8 × 16, or hidden states of the MLP, n × 96."""
    loaded, n = tiny_loaded_model(kind), 1000
    with Largest() as largest:
        last_rows(loaded.model, torch.ones(1, n, dtype=torch.int64))
    assert largest.elements == n * (128 if kind == "v2" else 96)  # the vocabulary has 257


def test_shares_of_two_models_differ_by_lambda_and_sum_to_one(tmp_path: Path) -> None:
    probe = AttentionToAnswer(length=500, depth=[0.0, 1.0], samples_per_condition=2)
    report = run_probe(probe, planted_model("llama"), planted_model("v1", second=0), output=tmp_path)
    assert [(row["condition"], row["samples"]) for row in report.rows] == [
        ({"depth": depth, "shares": shares}, 2) for depth in (0.0, 1.0) for shares in ("signed", "absolute")
    ]
    for row in report.rows:
        for model in row["models"]:
            assert sum(model[part]["mean"] for part in ("answer", "noise", "other")) == pytest.approx(1)
            assert row["condition"]["shares"] == "signed" or all(model[part]["mean"] >= 0 for part in model)
    row = report.select(depth=0.0, shares="signed")[0]
    assert row["difference"]["sum"]["mean"] == pytest.approx(-0.25)
    assert row["models"][1]["noise"]["mean"] < 0


def test_tokenizer_without_offsets_is_refused(tmp_path: Path) -> None:
    loaded = dataclasses.replace(tiny_loaded_model("llama"), tokenizer=ByT5Tokenizer())
    with pytest.raises(ValueError, match="tokenizer of llama must be a fast one"):
        run_probe(AttentionToAnswer(), loaded, output=tmp_path)
