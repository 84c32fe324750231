"""Judges behind failing endpoints, verdicts, and agreement computed by hand."""

import threading

import pytest

from diffllama.evaluation import judge
from diffllama.evaluation.judge import Judge, Verdict, agreement, fleiss_kappa, verdict
from support.fake_judge import Answer, FakeJudge


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_judge_with_and_without_key_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeJudge(lambda body, count: "Yes.") as endpoint:
        assert Judge(endpoint.url, "one").ask("Is it so?") == "Yes."
        monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
        assert Judge(f"{endpoint.url}/", "two").ask("Sure?") == "Yes."
    assert endpoint.keys == [None, "Bearer sk-secret"]
    assert endpoint.bodies == [
        {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0}
        for model, text in [("one", "Is it so?"), ("two", "Sure?")]
    ]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_busy_judge_is_retried(status: int) -> None:
    with FakeJudge(lambda body, count: "Yes." if count == 2 else (status, "busy")) as endpoint:
        assert Judge(endpoint.url, "one").ask("?") == "Yes."


@pytest.mark.parametrize(
    ("answer", "requests", "message"),
    [
        ((500, "out of order"), 1 + judge.RETRIES, "rejected the request: 500 Internal Server Error, out of order"),
        (
            (401, "wrong key"),
            1,
            "rejected the request: 401 Unauthorized, wrong key \\(set its key in .* OPENAI_API_KEY",
        ),
        ((404, "no such model"), 1, "rejected the request: 404 Not Found, no such model$"),
    ],
)
def test_judge_errors_are_reported_after_retries(answer: Answer, requests: int, message: str) -> None:
    with FakeJudge(lambda body, count: answer) as endpoint, pytest.raises(ConnectionError, match=message):
        Judge(endpoint.url, "one").ask("?")
    assert len(endpoint.bodies) == requests


@pytest.mark.parametrize("body", ["<html>", "[]", '{"choices": []}', '{"choices": [{"text": "Yes."}]}', '{"error": 1}'])
def test_reply_without_completion_is_refused(body: str) -> None:
    with (
        FakeJudge(lambda *_: (200, body)) as endpoint,
        pytest.raises(ValueError, match="must send a chat completion, got "),
    ):
        Judge(endpoint.url, "one").ask("?")


def test_reply_without_content_is_empty() -> None:
    with FakeJudge(lambda *_: (200, '{"choices": [{"message": {"content": null}}]}')) as endpoint:
        assert Judge(endpoint.url, "one").ask("?") == ""


def test_silent_judge_times_out_after_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "RETRIES", 1)
    over = threading.Event()

    def wait(body: object, count: int) -> str:
        over.wait(10)
        return "Yes."

    with FakeJudge(wait) as endpoint:
        with pytest.raises(ConnectionError, match=r"does not answer: .*timed out"):
            Judge(endpoint.url, "one", timeout=0.05).ask("?")
        over.set()
    assert len(endpoint.bodies) == 2
    with pytest.raises(ConnectionError, match="does not answer"):
        Judge(endpoint.url, "one").ask("?")  # the server has stopped


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000/v1",
        "file:///etc/passwd",
        "http://",
        "http://[bad",
        "http://host:99999/v1",
        "http://host:http/v1",
        "https://me:secret@host/v1",
        "https://host/v1?key=secret",
    ],
)
def test_invalid_judge_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="--judge-url must be the base address of an OpenAI-compatible endpoint"):
        Judge(url, "one")


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("All of it is there.\nConclusion: True", True),
        ("The year is wrong.\n\n**Conclusion: False**", False),
        ("**Conclusion:** true.", True),
        ('It might be "Conclusion: True", but no.\nCONCLUSION - FALSE', False),
        ("True", None),
        ("**Conclusion**:\n\n__False__", False),
        ("## Conclusion\nTrue", True),
        ("Conclusion:\\boxed{True}", True),
        ("$\\textbf{Conclusion: }\\boxed{\\text{False}}$", False),
        ("Conclusion - The response is False", False),
        ("Conclusion: it is true", True),
        ("Conclusion: The proposed summary is **True**.", True),
        ("Conclusion: False, although the year is true.", False),
        ("Conclusion: False because the year is wrong", False),
        ("Conclusion: True. It makes no false claim.", True),
        ("In conclusion, true claims abound.", None),
        ("In conclusion: true claims abound.", None),
        ("Conclusion: True or False", None),
        ("Conclusion: True/False", None),
        ("Conclusion: True, or false?", None),
        ("Conclusion: the response is not true", None),
        ("Conclusion: whether it is true is unclear", None),
        ("Conclusion: it is true in part", None),
        ("Conclusion: 0 false claims", None),
        ('"Conclusion: True" would be too kind.\nConclusion: unclear', None),
        ("Conclusion: Falsehood", None),
        ("", None),
    ],
)
def test_verdicts(reply: str, expected: Verdict) -> None:
    assert verdict(reply) is expected


def test_agreement_is_the_share_of_equal_pairs() -> None:
    assert agreement([True, True]) == 1
    assert agreement([True, False]) == agreement([True, None]) == 0
    assert agreement([True, True, False]) == pytest.approx(1 / 3)
    assert agreement([None, None, False, False]) == pytest.approx(2 / 6)


def test_fleiss_kappa() -> None:
    # of eight verdicts five are true; three pairs of four are equal
    texts = [[True, True], [True, True], [False, False], [True, False]]
    chance = (5 / 8) ** 2 + (3 / 8) ** 2
    assert fleiss_kappa(texts) == pytest.approx((3 / 4 - chance) / (1 - chance))
    assert fleiss_kappa([[True, True], [False, False]]) == 1
    assert fleiss_kappa([[True, False], [False, True]]) == -1
    assert fleiss_kappa([[True, True], [True, True]]) is None
    assert fleiss_kappa([]) is None
