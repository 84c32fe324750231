"""The probe of quantized attention logits: values, errors and answers by arithmetic."""

from functools import partial
from pathlib import Path

import pytest
import torch

from diffllama.evaluation import attention
from diffllama.evaluation.attention import AttentionCall, watched
from diffllama.evaluation.datasets.data import find
from diffllama.evaluation.datasets.multiple_choice import read
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.probes.logit_bits import (
    BITS,
    LogitBits,
    log_likelihoods,
    quantized,
    quantized_attention,
)
from support.probe_runs import run_probe
from support.rule_based_lm import RuleBasedLM, byte_tokenizer
from support.tiny_loaded_models import KINDS, tiny_loaded_model


def made_call(scores: torch.Tensor, mask: torch.Tensor | None = None) -> AttentionCall:
    """Return causal attention in which query i has these scores [b, heads, 3] times i + 1. Its output is its map."""
    return AttentionCall(
        module=torch.nn.Identity(),
        query=torch.arange(1.0, 4.0).reshape(3, 1).expand(*scores.shape, 1),
        key=scores[..., None],
        value=torch.eye(3).expand(*scores.shape, 3),
        mask=mask,
        scaling=1.0,
    )


def test_values_become_the_nearest_levels() -> None:
    values = torch.tensor([7.0, -3.4, 2.6, 0.4, -0.6, -7.0])
    assert quantized(values, torch.tensor(7.0), 4).tolist() == [7, -3, 3, 0, -1, -7]
    assert quantized(values / 4, torch.tensor(7.0) / 4, 4).tolist() == [1.75, -0.75, 0.75, 0, -0.25, -1.75]
    assert quantized(torch.zeros(2), torch.zeros(1), 4).tolist() == [0, 0]


@pytest.mark.parametrize("bits", [8, 6, 4])
def test_error_is_at_most_half_a_step(bits: int) -> None:
    values = torch.linspace(-5, 5, 100_001, dtype=torch.float64)
    found = quantized(values, values.abs().max(), bits)
    assert (found - values).abs().max() == pytest.approx(5 / (2 ** (bits - 1) - 1) / 2, rel=1e-2)
    assert len(found.unique()) == 2**bits - 1


def test_scale_is_of_all_that_a_sequence_sees() -> None:
    # query 3 sees 3 · (1.2, -0.8, 7/3) = (3.6, -2.4, 7): steps of 1; 2 sees (2.4, -1.6); 1 sees 1.2
    hidden = float("-inf")
    scores = torch.tensor([1.2, -0.8, 7 / 3])
    seen = torch.tensor([[1.0, hidden, hidden], [2.0, -2.0, hidden], [4.0, -2.0, 7.0]])
    expected = seen.softmax(-1)[None, :, None]
    torch.testing.assert_close(quantized_attention(made_call(scores[None, None]), 4), expected)

    # another sequence changes nothing and has its own step: for twice the scores, twice the step
    both = quantized_attention(made_call(torch.stack([scores, 2 * scores])[:, None]), 4)
    torch.testing.assert_close(both[:1], expected)
    torch.testing.assert_close(both[1:], (2 * seen).softmax(-1)[None, :, None])

    # another head has the same step: (0.9, -0.6, 1.75), (0.6, -0.4) and 0.3
    heads = quantized_attention(made_call(torch.stack([scores, scores / 4])[None]), 4)
    small = torch.tensor([[0.0, hidden, hidden], [1.0, 0.0, hidden], [1.0, -1.0, 2.0]])
    torch.testing.assert_close(heads, torch.stack([seen.softmax(-1), small.softmax(-1)], dim=1)[None])

    # no query sees the last key: the largest score is 3.6, and the step is 3.6/7
    mask = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
    mask[..., 2] = False
    last = torch.tensor([7.0, -5.0, hidden]) * 3.6 / 7  # -2.4 is -4.67 steps
    found = quantized_attention(made_call(scores[None, None], mask), 4)[0, 2, 0]
    torch.testing.assert_close(found, last.softmax(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_fine_quantisation_and_block_size_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_loaded_model(kind).model
    ids = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(ids).logits
        with watched(model, partial(quantized_attention, bits=24)):
            torch.testing.assert_close(model(ids).logits, plain, rtol=1e-4, atol=1e-4)
        with watched(model, partial(quantized_attention, bits=4)):
            whole = model(ids).logits
            monkeypatch.setattr(attention, "BLOCK_BYTES", 1)
            torch.testing.assert_close(model(ids).logits, whole)
    assert (whole - plain).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_bits_change_answers_more(kind: str) -> None:
    loaded = tiny_loaded_model(kind)
    items = read("hellaswag", find("hellaswag", None))[:3]
    plain, *others = (torch.tensor(log_likelihoods(loaded, items, bits, 4096)) for bits in BITS)
    eight, six, four = ((one - plain).abs().mean() for one in others)
    assert 0 < eight < six < four


def test_uniform_model_chooses_by_length(tmp_path: Path) -> None:
    # -(1 + length) ln 257 is largest for the shortest; divided by the length, for the longest
    (tmp_path / "hellaswag_val_full.txt").write_text("a b\n0\nc\ncc\nccc\ncccc\nd e\n3\ncc\nccc\ncccc\nccccc\n")

    model = RuleBasedLM(lambda ids: dict.fromkeys(range(257), 0.0), 257).eval()
    loaded = LoadedModel(name="uniform", model=model, tokenizer=byte_tokenizer())
    report = run_probe(LogitBits(), loaded, output=tmp_path / "out", data=tmp_path)
    right = {name: [one.values for one in outcome.measurements] for name, outcome in report.outcomes[0].items()}
    assert right == {
        "hellaswag:0": [{"acc": 1.0, "acc_norm": 0.0}] * 4,
        "hellaswag:1": [{"acc": 0.0, "acc_norm": 1.0}] * 4,
    }


def test_nan_scores_are_refused(tmp_path: Path) -> None:
    loaded = tiny_loaded_model("v1")
    torch.nn.init.constant_(loaded.model.lm_head.weight, float("nan"))
    loaded.model.bfloat16()
    with pytest.raises(ValueError, match=r"scores are NaN in bfloat16\. Try another --dtype"):
        run_probe(LogitBits(items=2), loaded, output=tmp_path)
