"""Files of documents with questions, or to summarize."""

import json
from pathlib import Path

import pytest

from diffllama.evaluation.datasets.data import Source, find
from diffllama.evaluation.datasets.summarization_qa import Document, read


@pytest.mark.parametrize(
    ("task", "count", "text", "question", "reference"),
    [
        ("xsum", 3, "The ferry between Kelm", "", "Storm damage to the pier"),
        ("cnn_dm", 2, "The city council of Varn", "", "Varn closes Bridge Street"),
        ("multi_news", 2, "The museum of Aldery", "", "Aldery's museum opens"),
        ("qasper", 2, "We study how small", "Which corpus", "TideText; TideText, 14 million words"),
        ("hotpotqa", 2, "The Lamplighter\nThe Lamplighter is an opera in two acts", "In which river", "the Ebbe"),
        ("2wikimqa", 2, "Passage 1:\nGrey Water\n", "Where was the director", "Port Sable"),
    ],
)
def test_built_in_documents(task: str, count: int, text: str, question: str, reference: str) -> None:
    documents = read(task, find(task, None))
    assert len(documents) == count
    first = next(iter(documents.values()))
    assert first.text.startswith(text)
    assert first.question.startswith(question)
    assert bool(first.question) == bool(question)
    assert first.reference.startswith(reference)


def test_paragraphs_are_titles_and_sentences(tmp_path: Path) -> None:
    rows = [{"context": [["A", ["One.", " Two. "]], ["B", []]], "question": "?", "answer": "One"}]
    (tmp_path / "dev.json").write_text(json.dumps(rows))
    assert read("hotpotqa", Source(tmp_path, False)) == {"dev.json:0": Document("A\nOne. Two.\n\nB\n", "?", "One")}


def test_prompts_of_ircot(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    block = "# METADATA: {}\nWikipedia Title: A\nOne.\n\nWikipedia Title: B\nTwo.\n\nQ: One or two?\nA: both\n\n\n"
    file.write_text(2 * block)
    document = Document("Wikipedia Title: A\nOne.\n\nWikipedia Title: B\nTwo.", "One or two?", "both")
    assert read("2wikimqa", Source(file, False)) == {"prompts.txt:0": document, "prompts.txt:1": document}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("test.jsonl", '{"text": "One."}', "without `answer` or `answers` or `summary` or `highlights`; .* text"),
        ("test.jsonl", '{"answer": "One."}', "test.jsonl has a row without `context` or `document` or `article`"),
        ("test.jsonl", '{"answer": "1", "context": "One."}', "test.jsonl has a row without `question` or `input`"),
        (
            "test.jsonl",
            '{"answer": "1", "context": {"title": []}}',
            "neither a text nor a list of titles with sentences",
        ),
        ("test.jsonl", '{"answer": "1", "context": [], "question": "?"}', "the document must be .* got ''"),
        ("test.jsonl", '{"answer": "1", "context": "One.", "question": 5}', "question or input must be .* got 5"),
        ("test.jsonl", '{"answers": [], "context": "One.", "question": "?"}', r"the reference must be .* got \[\]"),
        ("test.jsonl", '{"answers": ["1", 2], "context": "One.", "question": "?"}', "the reference must be .* got 2"),
        ("other.jsonl", "{}", "has no qasper.jsonl or test.jsonl or validation.jsonl or dev.json"),
    ],
)
def test_malformed_files_are_refused(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read("qasper", Source(tmp_path, False))


def test_text_without_prompts_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("Q: One or two?\n")
    with pytest.raises(ValueError, match=r"prompts\.txt has no document with a question"):
        read("2wikimqa", Source(file, False))
