# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Word problems of mathematics: how many a model solves, and how long its reasoning is."""

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

    The prompts are ours. A problem follows four worked examples, each with `Question:` and `Answer:`, and its
    completion ends before the next "Question:". Or it is, with `chat`, a user's message with the instruction to put
    the answer within `\boxed{}`, as models are asked that are fine-tuned on long reasoning. The answer is read from
    the last `\boxed{}`, else from the last "answer is", else it is the last number.

    The length is that of the text before the answer, in tokens of the model's own tokenizer, or of all of the
    completion if no answer is stated: a completion that `max_tokens` cuts off is as long as that. Beside those of all
    problems stand the averages over the problems that were solved, and that were missed; of two models, over those
    that both solved, and that both missed.
    """

    @property
    def dataset(self) -> str:
        """The task's folder."""
        return FOLDERS.get(self.task, self.task)

    def samples(self, source: Source, loaded: LoadedModel) -> Mapping[str, Problem]:
        """The problems that are drawn."""
        problems = read(self.task, source)
        return {name: problems[name] for name in self.drawn(problems, self.problems, "math")}

    def prompt(self, loaded: LoadedModel, problem: Problem) -> list[int]:
        """Token ids of the prompt."""
        if self.chat:
            return loaded.chat(problem.question + INSTRUCTION)
        examples = (LATEX if self.task == "math" else WORDS)[: self.shots]
        texts = [f"Question: {question}\nAnswer: {solution}\n\n" for question, solution in examples]
        return loaded.prefix + loaded.encode("".join(texts) + f"Question: {problem.question}\nAnswer:")

    def tokens_at_once(self, loaded: LoadedModel, samples: Mapping[str, Problem]) -> int:
        """The longest prompt and a completion that is cut off."""
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
        """Shares of all problems, and lengths by kind of problem; a bar for each model."""
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
        length.margins(y=0.25)  # likewise
        finish(length, "problems", "tokens of reasoning")
