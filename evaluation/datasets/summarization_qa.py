# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Documents for summarization and question answering."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from diffllama.evaluation.datasets.data import Source, field, read_rows, read_text, text_field
from diffllama.evaluation.settings import DocumentTask, SummaryTask


SUMMARIES = get_args(SummaryTask)
"""Tasks whose documents have no question."""


@dataclass(frozen=True)
class Document:
    """A text, a question about it (empty for summarization), and the reference summary or answer."""

    text: str
    question: str
    reference: str


def read(task: DocumentTask, source: Source) -> dict[str, Document]:
    """Read the documents of a task by name.

    Args:
        task: determines whether rows must have a question.
        source: a file, or a folder with `TASK.jsonl`, `test.jsonl`, `validation.jsonl` or `dev.json`. A row has the
            text in `context`, `document` or `article` (a string, or titles with their sentences, as in HotpotQA); the
            question in `question` or `input` (as in LongBench); the reference in `answer`, `answers`, `summary` or
            `highlights`. A `.txt` file has IRCoT's prompts: "# METADATA", paragraphs, and lines with "Q: " and "A: ".

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has another format.
    """
    file = source.file(f"{task}.jsonl", "test.jsonl", "validation.jsonl", "dev.json")
    documents = _prompts(file) if file.suffix == ".txt" else _rows(file, task not in SUMMARIES)
    by_name = {f"{file.name}:{number}": document for number, document in enumerate(documents)}
    if not by_name:
        raise ValueError(f"{file} has no document with a question.")
    return by_name


def _rows(file: Path, questions: bool) -> Iterator[Document]:
    for row in read_rows(file):
        reference = field(row, ("answer", "answers", "summary", "highlights"), file)
        references = reference if reference and isinstance(reference, list) else [reference]
        yield Document(
            _text(field(row, ("context", "document", "article"), file), file),
            text_field(row, ("question", "input"), file) if questions else "",
            "; ".join(text_field({"the reference": text}, "the reference", file) for text in references),
        )


def _text(context: Any, file: Path) -> str:
    if not isinstance(context, str):
        try:
            context = "\n\n".join(f"{title}\n{' '.join(map(str.strip, sentences))}" for title, sentences in context)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{file} has a row whose document is neither a text nor a list of titles with sentences."
            ) from error
    return text_field({"the document": context}, "the document", file)


def _prompts(file: Path) -> Iterator[Document]:
    for match in re.finditer(r"# METADATA:.*\n((?s:.*?))\n+Q: (.*)\nA: (.*)", read_text(file)):
        yield Document(*match.groups())
