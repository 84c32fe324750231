# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Contextual hallucination: whether a judge model finds summaries and answers supported by their document."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from diffllama.evaluation.datasets.data import Source
from diffllama.evaluation.datasets.summarization_qa import SUMMARIES, Document, read
from diffllama.evaluation.figures import bars, finish, panels
from diffllama.evaluation.judge import Judge, agreement, fleiss_kappa, verdict
from diffllama.evaluation.likelihood import completions
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.runs import Measurement, Outcome, Probe, Report, Row
from diffllama.evaluation.settings import HallucinationSettings


JUDGEMENT = """\
Below are a document, a reference {kind} by a person, and a proposed {kind}. Decide whether the proposed {kind} can be \
inferred from the document. If it says anything that the document contradicts or does not support, the decision is \
false. It may differ from the reference {kind} and be true all the same. Nothing counts that you know from elsewhere.

Document: {document}

Reference {kind}: {reference}

Proposed {kind}: {response}

First explain your decision. Then end with the line "Conclusion: True" if the proposed {kind} is accurate and free of \
hallucination, or with the line "Conclusion: False" if it is not."""
"""The prompt of a judge."""


def text_and_question(document: Document) -> str:
    """Return the document's text and, if there is one, its question."""
    return document.text + (f"\n\nQuestion: {document.question}" if document.question else "")


@dataclass(kw_only=True)  # its `__init__` calls `__post_init__`
class Hallucination(HallucinationSettings, Probe[Document]):
    """Fraction of greedy summaries or answers that a judge model finds accurate and free of hallucination.

    As in the paper, which follows Lookback Lens (Chuang et al., 2024), the judge reads the document, the reference and
    the response, and explains its binary verdict. The paper's judge is GPT-4o; the wording of all prompts is our own.
    Without a chat template, a summary is the first paragraph of the completion and an answer its first line.

    An empty response is not sent to the judge. It counts as not accurate, and so does a response whose verdict cannot
    be read. The report has both as fractions of all responses (`empty`, `unreadable`). With several judges it also has
    the raw agreement (fraction of pairs of judges with equal verdicts, over the responses that they saw) and Fleiss' κ.
    Name a judge twice to measure its agreement with itself.

    Raises:
        ValueError: there is no judge, or its URL is invalid.
    """

    def __post_init__(self) -> None:
        if not (self.judge_url and self.judges):
            raise ValueError(
                "This probe needs a judge model: set --judge-url to the base URL of an OpenAI-compatible endpoint, "
                "such as http://localhost:8000/v1, and --judge-model to the name of a model there."
            )

    @cached_property
    def judges(self) -> dict[str, Judge]:
        """The judges by name. Judges of equal names are numbered."""
        named = {}
        for at, model in enumerate(self.judge_model):
            number = f" ({self.judge_model[: at + 1].count(model)})" if self.judge_model.count(model) > 1 else ""
            named[model + number] = Judge(self.judge_url, model, self.judge_timeout)
        return named

    @property
    def dataset(self) -> str:
        """The task's folder."""
        return self.task

    @property
    def kind(self) -> str:
        """The kind of response: summary or answer."""
        return "summary" if self.task in SUMMARIES else "answer"

    def samples(self, source: Source, loaded: LoadedModel) -> Mapping[str, Document]:
        """Return randomly drawn documents, each cut to `length` tokens."""
        documents = read(self.task, source)
        return {name: self.cut(documents[name], loaded) for name in self.drawn(documents, self.documents, self.task)}

    def cut(self, document: Document, loaded: LoadedModel) -> Document:
        """Cut a document to its first `length` tokens."""
        ids = loaded.encode(document.text)
        if len(ids) <= self.length:
            return document
        return replace(document, text=loaded.tokenizer.decode(ids[: self.length]))

    def prompt(self, loaded: LoadedModel, document: Document) -> list[int]:
        """Return the token ids of the prompt."""
        task = "Answer the question from the document alone."
        if not document.question:
            task = "Summarize the document in a few sentences."
        text = f"{task}\n\nDocument: {text_and_question(document)}"
        if self.chat:
            return loaded.chat(text)
        return loaded.prefix + loaded.encode(f"{text}\n\n{self.kind.capitalize()}:")

    def response(self, completion: str) -> str:
        """Return the response in a completion."""
        if self.chat:
            return completion.strip()
        return completion.strip().partition("\n\n" if self.kind == "summary" else "\n")[0]

    def tokens_at_once(self, loaded: LoadedModel, samples: Mapping[str, Document]) -> int:
        """Return the tokens of the longest prompt and a completion of `max_tokens`."""
        return max(len(self.prompt(loaded, sample)) for sample in samples.values()) + self.max_tokens

    def measure(self, loaded: LoadedModel, samples: Mapping[str, Document]) -> Iterator[Outcome]:
        """Generate responses to documents and have them judged, batch by batch."""
        prompts = {name: self.prompt(loaded, document) for name, document in samples.items()}
        stop = () if self.chat else ("Document:",)
        for name, text in completions(loaded, prompts, self.max_tokens, self.batch_tokens, stop):
            yield self.judged(name, samples[name], self.response(text))

    def judged(self, name: str, document: Document, response: str) -> Outcome:
        """Return the outcome of a response, with the verdicts of all judges."""
        asked = JUDGEMENT.format(
            kind=self.kind,
            document=text_and_question(document),
            reference=document.reference,
            response=response,
        )
        replies = {judge: model.ask(asked) for judge, model in self.judges.items()} if response else {}
        verdicts = {judge: verdict(reply) for judge, reply in replies.items()}
        measurements = []
        for judge in self.judges:
            unreadable = bool(response) and verdicts[judge] is None
            values = {"accuracy": verdicts.get(judge) is True, "unreadable": unreadable, "empty": not response}
            measurements.append(Measurement({"judge": judge}, values))
        if len(verdicts) > 1:
            measurements.append(Measurement({"judge": "all judges"}, {"agreement": agreement(list(verdicts.values()))}))
        detail = {"response": response, "asked": asked, "replies": replies, "verdicts": verdicts}
        return Outcome(name, measurements, detail)

    def rows(self, measured: Sequence[Mapping[str, Outcome]]) -> list[Row]:
        """Return the averages, and Fleiss' κ of each model over the documents for which judges saw all responses."""
        rows = super().rows(measured)
        judged = [{name for name, outcome in outcomes.items() if outcome.detail["verdicts"]} for outcomes in measured]
        shared = sorted(set.intersection(*judged))
        for row in rows:
            if row["condition"]["judge"] == "all judges":
                for values, outcomes in zip(row["models"], measured, strict=True):
                    kappa = fleiss_kappa([list(outcomes[name].detail["verdicts"].values()) for name in shared])
                    values |= {} if kappa is None else {"kappa": {"mean": kappa}}
        return rows

    def draw(self, report: Report, figure: Any) -> None:
        """Draw the accuracy according to each judge, a bar for each model."""
        (axes,) = panels(figure, 1)
        judges = list(self.judges)
        bars(axes, judges, report.points("accuracy", [report.select(judge=judge)[0] for judge in judges]))
        axes.set_ylim(0, 1.3)  # room for the legend
        axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
        title = f"{self.task}, {report.rows[0]['samples']:,} documents"
        finish(axes, "judge", "share of responses\nfree of hallucination", title)
