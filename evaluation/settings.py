# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The settings of every probe: the fields of its class and the options of its command.

The help text of a field documents it, and the docstring of a probe's settings is the help text of its command. They are
apart from the probes so that the command line shows and checks them without importing torch.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import typer

from diffllama.checkpoints.options import DType, Variant
from diffllama.configuration import preset_names


BatchTokens = Annotated[int, typer.Option(min=1, help="Tokens computed at once, or one prompt with more.")]
"""Of probes that compute prompts in batches."""

Depths = Annotated[list[float], typer.Option(min=0, max=1, help="Where the answer stands, 0 to 1. May be repeated.")]

Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, …; a GPU if there is one.")]

ClassificationTask = Literal["trec", "trec-fine", "banking77", "clinc150"]
MultipleChoiceTask = Literal["arc_challenge", "arc_easy", "boolq", "hellaswag", "openbook_qa", "piqa", "winogrande"]
SummaryTask = Literal["xsum", "cnn_dm", "multi_news"]
AnswerTask = Literal["qasper", "hotpotqa", "2wikimqa"]
DocumentTask = Literal[SummaryTask, AnswerTask]
WordProblemTask = Literal["gsm8k", "math", "svamp", "asdiv", "mawps"]


PROBES: dict[str, "type[Settings]"] = {}
"""Command of `diffllama probe` -> the settings of its probe, in the order of this file."""


@dataclass(kw_only=True)
class Settings:
    """Of every probe."""

    command: ClassVar[str]
    """The probe's name on the command line."""
    paper: ClassVar[str]
    """Where the paper has what it measures."""
    loads_models: ClassVar[bool] = True
    """Whether the user names the models; otherwise the probe makes them."""
    takes_data: ClassVar[bool] = True
    """Whether it reads data."""

    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of everything that is drawn at random.")] = 0

    def __init_subclass__(cls, command: str = "", paper: str = "") -> None:
        """Registers the settings of a command. Without one, the class is a base of other settings, or a probe."""
        super().__init_subclass__()
        if command:
            cls.command, cls.paper = command, paper
            PROBES[command] = cls


@dataclass(kw_only=True)
class LongTextSettings(Settings):
    """Of probes that measure the beginnings of long texts."""

    length: Annotated[int, typer.Option(min=2, help="Tokens of each text; shorter texts are left out.")] = 1024
    texts: Annotated[int, typer.Option(min=1, help="How many texts.")] = 8


@dataclass(kw_only=True)
class InContextSettings(Settings):
    """Of probes that classify after demonstrations."""

    task: Annotated[ClassificationTask, typer.Option(help="Data set; trec-fine has the 50 fine classes.")] = "trec"
    length: Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt with its answer.")] = 1024
    questions: Annotated[int, typer.Option(min=1, help="How many test questions, drawn at random; at most all.")] = 50


@dataclass(kw_only=True)
class ModelPairSettings(Settings):
    """Of probes that make the pair of models that they measure."""

    loads_models: ClassVar[bool] = False

    size: Annotated[str | None, typer.Option(help=f"{', '.join(preset_names())}; a small model by default.")] = None
    variant: Annotated[
        Variant, typer.Option(help="v1 has half the Transformer's heads, twice as wide; v2 as many, of equal width.")
    ] = "v1"
    device: Device = None


@dataclass(kw_only=True)
class NeedlesSettings(Settings, command="needles", paper="section 3.4, table 2 and figure 5"):
    """Retrieve N magic numbers of cities from texts of any length."""

    length: Annotated[list[int], typer.Option(min=1, help="Tokens of a prompt. May be repeated.")] = field(
        default_factory=lambda: [4096]
    )
    depth: Depths = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    needles: Annotated[
        list[str], typer.Option(metavar="R_of_N", help="Needles asked for, of how many. May be repeated.")
    ] = field(default_factory=lambda: ["1_of_1", "2_of_2", "2_of_4", "2_of_6"])
    samples_per_condition: Annotated[int, typer.Option("--samples", min=1, help="Prompts of each condition.")] = 50
    batch_tokens: BatchTokens = 8192


@dataclass(kw_only=True)
class AttentionToAnswerSettings(Settings, command="attention", paper="section 3.4, table 3; figure 1"):
    """How much attention goes to the answer, and how much to noise."""

    length: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, or up to a sentence fewer.")] = 4096
    depth: Depths = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    samples_per_condition: Annotated[int, typer.Option("--samples", min=1, help="Prompts of each depth.")] = 10


@dataclass(kw_only=True)
class ContextSettings(LongTextSettings, command="context", paper="section 3.3, figure 4"):
    """Average loss of the tokens up to a position: what a longer context gives."""


@dataclass(kw_only=True)
class RecallSettings(LongTextSettings, command="recall", paper="section 3.8, table 6"):
    """Loss of tokens that the context has shown before, and of others."""

    n: Annotated[int, typer.Option("--n", min=2, help="Of the n-grams: 2 is bigrams.")] = 2
    frequent: Annotated[
        int | None,
        typer.Option(min=0, help="N-grams that the data's other texts have more often than this count as others."),
    ] = None


@dataclass(kw_only=True)
class ManyShotSettings(InContextSettings, command="icl", paper="section 3.5, figure 6"):
    """Classify with one to thousands of examples in the context."""


@dataclass(kw_only=True)
class ShotOrderSettings(InContextSettings, command="icl-order", paper="section 3.5, figure 7"):
    """How far accuracy depends on the order of the examples."""

    orders: Annotated[int, typer.Option(min=2, help="Permutations of each arrangement, each with its own seed.")] = 10


@dataclass(kw_only=True)
class OutliersSettings(Settings, command="outliers", paper="section 3.7, table 5"):
    """The largest attention logits and hidden states, and their median."""

    tokens: Annotated[int, typer.Option(min=1, help="Tokens to measure, in whole pieces; the paper has 400000.")] = 8192
    length: Annotated[int, typer.Option(min=16, help="Tokens of each piece of a text.")] = 1024


@dataclass(kw_only=True)
class LogitBitsSettings(Settings, command="logit-bits", paper="section 3.7, figure 8"):
    """Accuracy with attention logits quantised to 16, 8, 6 and 4 bits."""

    task: Annotated[MultipleChoiceTask, typer.Option(help="Which questions.")] = "hellaswag"
    items: Annotated[int, typer.Option(min=1, help="How many questions, drawn at random; at most all.")] = 500
    batch_tokens: BatchTokens = 4096


@dataclass(kw_only=True)
class HallucinationSettings(Settings, command="hallucination", paper="section 3.6, table 4"):
    """Summaries and answers that a judge finds free of hallucination."""

    task: Annotated[DocumentTask, typer.Option(help="Which documents; the first three are summarised.")] = "xsum"
    documents: Annotated[int, typer.Option(min=1, help="How many documents, drawn at random.")] = 100
    length: Annotated[int, typer.Option(min=1, help="Tokens of a document that are read; its beginning.")] = 4096
    chat: Annotated[bool, typer.Option("--chat", help="Ask in the model's chat template.")] = False
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens at which a response is cut off.")] = 128
    judge_url: Annotated[str, typer.Option(help="An OpenAI-compatible endpoint; its key is in OPENAI_API_KEY.")] = ""
    judge_model: Annotated[list[str], typer.Option(help="A judge's name there. May be repeated.")] = field(
        default_factory=lambda: ["gpt-4o"]
    )
    judge_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a judge's reply may take.")] = 120.0
    batch_tokens: BatchTokens = 8192


@dataclass(kw_only=True)
class MathSettings(Settings, command="math", paper="appendix C"):
    """Word problems: accuracy, and how long the reasoning is."""

    task: Annotated[WordProblemTask, typer.Option(help="Which problems.")] = "gsm8k"
    problems: Annotated[int | None, typer.Option(min=1, help="How many, drawn at random; all by default.")] = None
    shots: Annotated[int, typer.Option(min=0, max=4, help="Worked examples before each problem, without --chat.")] = 4
    chat: Annotated[bool, typer.Option("--chat", help="Ask in the model's chat template, without examples.")] = False
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens at which a completion is cut off.")] = 512
    batch_tokens: BatchTokens = 8192


@dataclass(kw_only=True)
class GradientsSettings(ModelPairSettings, command="gradients", paper="appendix G"):
    """Gradient norms of each projection, of a DIFF beside its Transformer."""

    steps: Annotated[int, typer.Option(min=0, help="Training steps before the last measurement.")] = 100
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 8
    length: Annotated[int, typer.Option(min=3, help="Bytes of a sequence.")] = 256
    learning_rate: Annotated[float, typer.Option(min=0, help="Of AdamW, constant; the scaling study's.")] = 1.5e-4


@dataclass(kw_only=True)
class ThroughputSettings(ModelPairSettings, command="throughput", paper="appendix A, table 7"):
    """Tokens per second, forward and backward, of a DIFF beside its Transformer."""

    takes_data: ClassVar[bool] = False

    length: Annotated[list[int], typer.Option(min=2, help="Tokens of a sequence. May be repeated.")] = field(
        default_factory=lambda: [2048, 4096]
    )
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 1
    rounds: Annotated[int, typer.Option(min=1, help="How often each model is timed.")] = 10
    dtype: Annotated[DType, typer.Option(help="auto is bfloat16 on a GPU, float32 elsewhere.")] = "auto"


@dataclass(kw_only=True)
class ScalingSettings(Settings, command="scaling", paper="section 3.2, figure 3"):
    """Scaling laws of given losses, and how much smaller a DIFF of equal loss is."""

    loads_models: ClassVar[bool] = False
