"""The probe of hallucination, with summaries and judges that follow rules."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.probes.hallucination import Hallucination
from diffllama.evaluation.runs import Report
from support.fake_judge import Answer, FakeJudge
from support.probe_runs import run_probe
from support.rule_based_lm import rule_based_lm


def summarizer(known: int) -> LoadedModel:
    """Summarize "There are N birds. …" correctly if N < `known`, wrongly above, and not at all from 100 on."""

    def answer(text: str) -> str:
        number = int(text.rpartition("There are ")[2].partition(" ")[0])
        return f"\nThere are {number + (number >= known)} birds.\n\nAnd more." if number < 100 else ""

    return rule_based_lm(answer, after="\n\nSummary:")


def strict(body: dict[str, Any], count: int) -> Answer:
    """Judge a response as true if the document contains it."""
    document, _, response = body["messages"][0]["content"].partition("\n\nProposed ")
    claim = response.partition(": ")[2].partition("\n\nFirst explain")[0]
    return f"I see.\nConclusion: {claim in document.partition('Document: ')[2].partition('Reference ')[0]}"


def mean(report: Report, model: int = 0, **condition: Any) -> dict[str, float]:
    (row,) = report.select(**condition)
    return {metric: value["mean"] for metric, value in row["models"][model].items()}


@pytest.fixture(autouse=True)
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJudge]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with FakeJudge(lambda body, count: endpoint.rule(body, count)) as endpoint:
        endpoint.rule = strict
        yield endpoint


Measured = Callable[..., Report]


@pytest.fixture
def measured(tmp_path: Path, endpoint: FakeJudge) -> Measured:
    """Measure models, by default on documents about birds."""
    birds = tmp_path / "birds.jsonl"
    rows = [
        {"document": f"There are {number} birds. They sing.", "summary": f"{number} birds sing."}
        for number in (*range(10, 16), 100, 101)
    ]
    birds.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def measured(*models: LoadedModel, data: Path | None = birds, max_tokens: int = 40, **settings: Any) -> Report:
        probe = Hallucination(judge_url=endpoint.url, max_tokens=max_tokens, **settings)
        return run_probe(probe, *models, output=tmp_path, data=data)

    return measured


def test_accuracy_is_fraction_of_supported_summaries(measured: Measured, endpoint: FakeJudge, tmp_path: Path) -> None:
    report = measured(summarizer(14))
    assert [row["condition"] for row in report.rows] == [{"judge": "gpt-4o"}]
    assert report.rows[0]["samples"] == 8
    assert mean(report, judge="gpt-4o") == {"accuracy": 4 / 8, "unreadable": 0, "empty": 2 / 8}
    assert len(endpoint.bodies) == 6
    assert set(endpoint.keys) == {"Bearer sk-secret"}
    detail = report.outcomes[0]["birds.jsonl:5"].detail
    assert detail["response"] == "There are 16 birds."
    assert detail["replies"] == {"gpt-4o": "I see.\nConclusion: False"}
    assert detail["verdicts"] == {"gpt-4o": False}
    assert "Document: There are 15 birds. They sing.\n\nReference summary: 15 birds sing.\n\n" in detail["asked"]
    assert detail["asked"] in [body["messages"][0]["content"] for body in endpoint.bodies]
    assert report.outcomes[0]["birds.jsonl:6"].detail["replies"] == {}
    assert not [file for file in tmp_path.iterdir() if b"secret" in file.read_bytes()]


def test_judges_that_differ_have_accuracy_agreement_and_kappa(measured: Measured, endpoint: FakeJudge) -> None:
    """The kind judge finds everything true. The vague judge gives no verdict on the first."""

    def rule(body: dict[str, Any], count: int) -> Answer:
        if body["model"] == "kind":
            return "Conclusion: True"
        return "Hm." if body["model"] == "vague" and "There are 10" in str(body) else strict(body, count)

    endpoint.rule = rule
    judges = ["strict", "kind", "vague"]
    report = measured(summarizer(14), summarizer(99), judge_model=judges)
    assert [mean(report, judge=name)["accuracy"] for name in judges] == [4 / 8, 6 / 8, 3 / 8]
    assert [mean(report, judge=name)["unreadable"] for name in judges] == [0, 0, 1 / 8]
    assert [mean(report, 1, judge=name)["accuracy"] for name in judges] == [6 / 8, 6 / 8, 5 / 8]
    # each response has three pairs of verdicts: one of three agrees for 10, all for 11 to 13, one for 14 and 15
    observed = (1 / 3 + 3 + 1 / 3 + 1 / 3) / 6
    chance = (13 / 18) ** 2 + (4 / 18) ** 2 + (1 / 18) ** 2
    (row,) = report.select(judge="all judges")
    assert row["samples"] == 6
    assert mean(report, judge="all judges") == pytest.approx(
        {"agreement": observed, "kappa": (observed - chance) / (1 - chance)}
    )
    assert report.select(judge="strict")[0]["difference"]["accuracy"]["mean"] == pytest.approx(2 / 8)


def test_agreement_is_over_documents_that_all_models_respond_to(measured: Measured, endpoint: FakeJudge) -> None:
    """One model gives no response to the last two documents, the other gives the first's summary for all."""
    endpoint.rule = lambda body, count: "Conclusion: True" if body["model"] == "kind" else strict(body, count)
    other = rule_based_lm(lambda text: "\nThere are 10 birds.\n\n", after="\n\nSummary:")
    report = measured(summarizer(14), other, judge_model=["strict", "kind"])
    assert report.select(judge="all judges")[0]["samples"] == 6
    for model, (observed, true) in enumerate([(4 / 6, 10 / 12), (1 / 6, 7 / 12)]):
        chance = true**2 + (1 - true) ** 2
        expected = {"agreement": observed, "kappa": (observed - chance) / (1 - chance)}
        assert mean(report, model, judge="all judges") == pytest.approx(expected)


def test_same_judge_named_twice_is_numbered_and_compared(measured: Measured, endpoint: FakeJudge) -> None:
    endpoint.rule = lambda body, count: f"Conclusion: {count % 2 == 0 or 'There are 10' in str(body)}"
    report = measured(summarizer(99), judge_model=["one", "one"])
    assert [row["condition"]["judge"] for row in report.rows] == ["one (1)", "one (2)", "all judges"]
    assert [mean(report, judge=f"one ({number})")["accuracy"] for number in (1, 2)] == [6 / 8, 1 / 8]
    assert mean(report, judge="all judges")["agreement"] == pytest.approx(1 / 6)


def test_judge_failing_midway_is_asked_only_for_the_rest(measured: Measured, endpoint: FakeJudge) -> None:
    endpoint.rule = lambda body, count: strict(body, count) if count < 4 else (401, "no credit")
    with pytest.raises(ConnectionError, match="rejected the request: 401 Unauthorized, no credit"):
        measured(summarizer(14))
    before = len(endpoint.bodies)
    endpoint.rule = strict
    report = measured(summarizer(14))
    assert (before, len(endpoint.bodies)) == (5, 5 + 2)
    assert mean(report, judge="gpt-4o")["accuracy"] == 4 / 8
    assert measured(summarizer(14)).rows == report.rows
    assert len(endpoint.bodies) == 7


def test_questions_are_answered_in_one_line(measured: Measured) -> None:
    loaded = rule_based_lm(lambda text: " the Ebbe\nQuestion: no", after="live?\n\nAnswer:")
    report = measured(loaded, data=None, task="hotpotqa", max_tokens=20)
    first = report.outcomes[0]["dev.json:0"].detail
    assert first["response"] == "the Ebbe"
    assert '\n\nQuestion: In which river\'s valley does the composer of "The Lamplighter" live?\n\n' in first["asked"]
    assert first["verdicts"] == {"gpt-4o": True}


def test_long_document_is_cut_for_model_and_judge(measured: Measured, endpoint: FakeJudge) -> None:
    seen: list[str] = []
    loaded = rule_based_lm(lambda text: seen.append(text) or " No.", after="\n\nSummary:")
    measured(loaded, length=19, documents=1, max_tokens=3)
    document = seen[0].partition("Document: ")[2].partition("\n\n")[0]
    assert len(document) == 19
    assert f"Document: {document}\n\n" in endpoint.bodies[0]["messages"][0]["content"]


def test_chat_templates_keep_every_paragraph(measured: Measured) -> None:
    loaded = rule_based_lm(lambda text: "One.\n\nTwo.", after="They sing.<assistant>")
    loaded.tokenizer.chat_template = "<user>{{ messages[0].content }}<assistant>"
    report = measured(loaded, documents=2, chat=True, max_tokens=15)
    assert [outcome.detail["response"] for outcome in report.outcomes[0].values()] == 2 * ["One.\n\nTwo."]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs a judge model: set --judge-url to the base URL of an OpenAI-compatible endpoint"),
        ({"judge_url": "http://localhost", "judge_model": []}, "--judge-model to the name of a model there"),
        ({"judge_url": "localhost:8000"}, "--judge-url must be the base address"),
    ],
)
def test_missing_or_invalid_judge_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hallucination(**settings)
