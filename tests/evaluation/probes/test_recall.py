"""The probe of recall: n-grams counted by hand, and a model with known losses."""

from itertools import pairwise
from math import log
from pathlib import Path

import pytest

from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.probes.recall import Recall, repeated
from diffllama.evaluation.runs import Report
from support.probe_runs import run_probe
from support.rule_based_lm import RuleBasedLM, byte_tokenizer


def reciter() -> LoadedModel:
    """Give probability ½ to the token that followed the previous occurrence of the last token, the rest to others."""
    vocabulary = len(byte_tokenizer())

    def next_token(ids: list[int]) -> dict[int, float]:
        logits = dict.fromkeys(range(vocabulary), 0.0)
        for before, after in pairwise(ids):
            if before == ids[-1]:
                logits = dict.fromkeys(logits, 0.0) | {after: log(vocabulary - 1)}
        return logits

    return LoadedModel(name="reciter", model=RuleBasedLM(next_token, vocabulary).eval(), tokenizer=byte_tokenizer())


def slices(report: Report) -> dict[str, tuple[float, float]]:
    """Return tokens and loss of each slice."""
    return {
        row["condition"]["slice"]: (row["models"][0]["tokens"]["mean"], row["models"][0]["nll"]["mean"])
        for row in report.rows
    }


def test_repeated_ngrams_of_a_sentence() -> None:
    words = ["the", "cat", "saw", "the", "dog", "and", "the", "cat", "saw", "the", "bird"]
    bigrams = {at: " ".join(gram) for at, gram in repeated(words, 2).items()}
    assert bigrams == {7: "the cat", 8: "cat saw", 9: "saw the"}
    assert set(repeated(words, 3)) == {8, 9}
    assert set(repeated(words, 4)) == {9}
    assert not repeated(words, 5)


def test_repetitions_may_overlap() -> None:
    assert repeated("aaab", 2) == {2: ("a", "a")}


def test_losses_of_a_model_that_recites(tmp_path: Path) -> None:
    # b, c and a follow new tokens; b after a is a hit; d after b is not, because b had c after it
    (tmp_path / "1.txt").write_text("abcabd")
    (tmp_path / "2.txt").write_text("aaaaxx")  # two a are hits, the others and both x are not
    report = run_probe(Recall(length=6), reciter(), output=tmp_path / "out", data=tmp_path)
    new, hit, wrong = log(257), log(2), log(512)
    by_text = {
        name: {one.condition["slice"]: (one.weight, one.values["nll"]) for one in outcome.measurements}
        for name, outcome in report.outcomes[0].items()
    }
    assert by_text["1.txt"]["AR-hit"] == (1, pytest.approx(hit))
    assert by_text["1.txt"]["others"] == (4, pytest.approx((3 * new + wrong) / 4))
    assert by_text["2.txt"]["AR-hit"] == (2, pytest.approx(hit))
    assert by_text["2.txt"]["others"] == (3, pytest.approx((new + wrong + new) / 3))
    assert slices(report) == {
        "AR-hit": (3, pytest.approx(hit)),
        "others": (7, pytest.approx((5 * new + 2 * wrong) / 7)),
        "all": (10, pytest.approx((5 * new + 2 * wrong + 3 * hit) / 10)),
    }


def test_ngrams_that_other_texts_have_often_are_no_hits(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("abcabc")  # hits: ab, bc
    (tmp_path / "2.txt").write_text("ab ab ab bc bc")  # ab three times, bc twice
    tokens = {}
    for frequent in (None, 3, 2, 1):
        report = run_probe(
            Recall(length=6, texts=1, frequent=frequent), reciter(), output=tmp_path / f"{frequent}", data=tmp_path
        )
        tokens[frequent] = {name: count for name, (count, _) in slices(report).items()}
    both = {"AR-hit": 2, "others": 3, "all": 5}
    assert tokens == {None: both, 3: both, 2: {"AR-hit": 1, "others": 4, "all": 5}, 1: {"others": 5, "all": 5}}


def test_frequent_without_other_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--frequent needs other texts than the 2 measured\. Lower --texts"):
        run_probe(Recall(length=50, frequent=1250), reciter(), output=tmp_path)
