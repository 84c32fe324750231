# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Mathematical word problems: accuracy and length of the reasoning."""

from collections.abc import Iterator, Mapping
from typing import Any

from diffllama.evaluation.datasets.data import Source
from diffllama.evaluation.datasets.word_problems import (
    FOLDERS,
    INSTRUCTION,
    LATEX,
    WORDS,
    Problem,
    correct,
    final_answer,
    read,
)
from diffllama.evaluation.figures import bars, finish, panels
from diffllama.evaluation.likelihood import completions
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.runs import Measurement, Outcome, Probe, Report
from diffllama.evaluation.settings import MathSettings


class Math(MathSettings, Probe[Problem]):
    r"""Accuracy and length of the reasoning, by greedy generation.

    The prompts are our own. A problem follows worked examples, four by default, with `Question:` and `Answer:`, and its
    completion ends before the next "Question:". With `chat`, the problem is a user message with the instruction to put
    the answer within `\boxed{}`, the usual prompt of models fine-tuned on long reasoning. The answer is read from the
    last `\boxed{}`, else from the last "answer is", else it is the last number.

    The length is that of the text before the answer, in tokens of the model's own tokenizer. If the completion states
    no answer, for example because `max_tokens` cuts it off, the whole completion counts. The report has averages over
    all problems, over the solved and over the missed ones; with two models, over those that both solved or both missed.
    """

    @property
    def dataset(self) -> str:
        """Name of the data in `find`."""
        return FOLDERS.get(self.task, self.task)

    def samples(self, source: Source, loaded: LoadedModel) -> Mapping[str, Problem]:
        """Return randomly drawn problems by name."""
        problems = read(self.task, source)
        return {name: problems[name] for name in self.drawn(problems, self.problems, "math")}

    def prompt(self, loaded: LoadedModel, problem: Problem) -> list[int]:
        """Return the token ids of the prompt."""
        if self.chat:
            return loaded.chat(problem.question + INSTRUCTION)
        examples = (LATEX if self.task == "math" else WORDS)[: self.shots]
        texts = [f"Question: {question}\nAnswer: {solution}\n\n" for question, solution in examples]
        return loaded.prefix + loaded.encode("".join(texts) + f"Question: {problem.question}\nAnswer:")

    def tokens_at_once(self, loaded: LoadedModel, samples: Mapping[str, Problem]) -> int:
        """Return the tokens of the longest prompt and a completion of `max_tokens`."""
        return max(len(self.prompt(loaded, sample)) for sample in samples.values()) + self.max_tokens

    def measure(self, loaded: LoadedModel, samples: Mapping[str, Problem]) -> Iterator[Outcome]:
        """Generate and check an answer to each problem."""
        prompts = {name: self.prompt(loaded, problem) for name, problem in samples.items()}
        stop = () if self.chat else ("Question:",)
        for name, text in completions(loaded, prompts, self.max_tokens, self.batch_tokens, stop):
            right = samples[name].answer
            answer = final_answer(text)
            solved = correct(answer.text, right)
            tokens = len(loaded.encode(text[: answer.start]))
            measurements = [
                Measurement({"problems": "all"}, {"accuracy": solved, "stated": answer.stated, "tokens": tokens}),
                Measurement({"problems": "solved" if solved else "missed"}, {"tokens": tokens}),
            ]
            yield Outcome(name, measurements, {"completion": text, "answer": answer.text, "right": right})

    def draw(self, report: Report, figure: Any) -> None:
        """Draw fractions of all problems, and lengths of all, solved and missed problems; a bar for each model."""
        share, length = panels(figure, 2)
        rows = {row["condition"]["problems"]: row for row in report.rows}
        shares = {"accuracy": "solved", "stated": "with a stated answer"}
        everything = zip(report.names, rows["all"]["models"], strict=True)
        bars(share, [*shares.values()], {name: [values[metric] for metric in shares] for name, values in everything})
        kinds = {kind: f"{kind}\n({rows[kind]['samples']:,})" for kind in ("all", "solved", "missed") if kind in rows}
        bars(length, [*kinds.values()], report.points("tokens", [rows[kind] for kind in kinds]))
        share.set_ylim(0, 1.3)  # room for the legend
        share.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
        finish(share, "", "share of problems", self.task)
        length.margins(y=0.25)  # room for the legend
        finish(length, "problems", "tokens of reasoning")
