# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The settings of every probe: the fields of its class and the options of its command.

A field's help text documents it. The docstring of a settings class is the help text of its command. The settings live
outside of the probes' modules so that the command line can show and check them without importing torch.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import typer

from diffllama.checkpoints.options import DType, Variant
from diffllama.configuration import preset_names


BatchTokens = Annotated[int, typer.Option(min=1, help="Most tokens in a batch; a longer prompt is a batch alone.")]
"""Batch size of probes that compute prompts in batches."""

Depths = Annotated[
    list[float], typer.Option(min=0, max=1, help="Position of the answer, 0 (start) to 1 (end). May be repeated.")
]

Device = Annotated[str | None, typer.Option(help="Device: cpu, cuda, cuda:1, …; by default a GPU if there is one.")]

ClassificationTask = Literal["trec", "trec-fine", "banking77", "clinc150"]
MultipleChoiceTask = Literal["arc_challenge", "arc_easy", "boolq", "hellaswag", "openbook_qa", "piqa", "winogrande"]
SummaryTask = Literal["xsum", "cnn_dm", "multi_news"]
AnswerTask = Literal["qasper", "hotpotqa", "2wikimqa"]
DocumentTask = Literal[SummaryTask, AnswerTask]
WordProblemTask = Literal["gsm8k", "math", "svamp", "asdiv", "mawps"]


PROBES: dict[str, "type[Settings]"] = {}
"""Command of `diffllama probe` -> settings class, in the order of this file."""


@dataclass(kw_only=True)
class Settings:
    """Settings of every probe."""

    command: ClassVar[str]
    """The probe's name on the command line."""
    paper: ClassVar[str]
    """Section, table or figure of the paper that the probe reproduces."""
    loads_models: ClassVar[bool] = True
    """Whether the user names the models. Otherwise the probe builds them."""
    takes_data: ClassVar[bool] = True
    """Whether the probe reads data."""

    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed.")] = 0

    def __init_subclass__(cls, command: str = "", paper: str = "") -> None:
        """Register the settings of `command`. A class without a command is a base class or a probe."""
        super().__init_subclass__()
        if command:
            cls.command, cls.paper = command, paper
            PROBES[command] = cls


@dataclass(kw_only=True)
class LongTextSettings(Settings):
    """Settings of probes that measure the beginnings of long texts."""

    length: Annotated[int, typer.Option(min=2, help="Tokens read from each text; shorter texts are skipped.")] = 1024
    texts: Annotated[int, typer.Option(min=1, help="Number of texts.")] = 8


@dataclass(kw_only=True)
class InContextSettings(Settings):
    """Settings of probes that classify questions after labelled examples (in-context learning)."""

    task: Annotated[ClassificationTask, typer.Option(help="Data set; trec-fine has TREC's 50 classes.")] = "trec"
    length: Annotated[int, typer.Option(min=1, help="Maximum prompt length with its answer, in tokens.")] = 1024
    questions: Annotated[int, typer.Option(min=1, help="Maximum number of test questions, drawn at random.")] = 50


@dataclass(kw_only=True)
class ModelPairSettings(Settings):
    """Settings of probes that build the two models that they measure."""

    loads_models: ClassVar[bool] = False

    size: Annotated[
        str | None, typer.Option(help=f"Model size: {', '.join(preset_names())}; by default a small model.")
    ] = None
    variant: Annotated[
        Variant,
        typer.Option(help="DIFF variant: v1 has half the Transformer's heads at twice the width, v2 the same heads."),
    ] = "v1"
    device: Device = None


@dataclass(kw_only=True)
class NeedlesSettings(Settings, command="needles", paper="section 3.4, table 2 and figure 5"):
    """Multi-needle retrieval: find cities' magic numbers in long texts."""

    length: Annotated[list[int], typer.Option(min=1, help="Prompt length in tokens. May be repeated.")] = field(
        default_factory=lambda: [4096]
    )
    depth: Depths = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    needles: Annotated[
        list[str], typer.Option(metavar="R_of_N", help="R needles requested of N in the text. May be repeated.")
    ] = field(default_factory=lambda: ["1_of_1", "2_of_2", "2_of_4", "2_of_6"])
    samples_per_condition: Annotated[
        int, typer.Option("--samples", min=1, help="Number of prompts for each length, depth and R_of_N.")
    ] = 50
    batch_tokens: BatchTokens = 8192


@dataclass(kw_only=True)
class AttentionToAnswerSettings(Settings, command="attention", paper="section 3.4, table 3; figure 1"):
    """Attention to the answer in a long text, and to the rest of it (noise)."""

    length: Annotated[
        int, typer.Option(min=1, help="Prompt length in tokens; prompts may be up to a sentence shorter.")
    ] = 4096
    depth: Depths = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    samples_per_condition: Annotated[
        int, typer.Option("--samples", min=1, help="Number of prompts for each depth.")
    ] = 10


@dataclass(kw_only=True)
class ContextSettings(LongTextSettings, command="context", paper="section 3.3, figure 4"):
    """Average loss of the tokens up to each position of a long text."""


@dataclass(kw_only=True)
class RecallSettings(LongTextSettings, command="recall", paper="section 3.8, table 6"):
    """Associative recall: loss of tokens that repeat an n-gram, and of others."""

    n: Annotated[int, typer.Option("--n", min=2, help="Length of the n-grams in tokens: 2 is bigrams.")] = 2
    frequent: Annotated[
        int | None,
        typer.Option(min=0, help="An n-gram found more often than this in the other texts does not count as recall."),
    ] = None


@dataclass(kw_only=True)
class ManyShotSettings(InContextSettings, command="icl", paper="section 3.5, figure 6"):
    """Many-shot classification: accuracy with one to thousands of examples."""


@dataclass(kw_only=True)
class ShotOrderSettings(InContextSettings, command="icl-order", paper="section 3.5, figure 7"):
    """Robustness of accuracy to the order of the in-context examples."""

    orders: Annotated[int, typer.Option(min=2, help="Number of random orders for each arrangement.")] = 10


@dataclass(kw_only=True)
class OutliersSettings(Settings, command="outliers", paper="section 3.7, table 5"):
    """Activation outliers: largest and median attention logits and hidden states."""

    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to measure, rounded up to whole sequences; the paper uses 400000.")
    ] = 8192
    length: Annotated[int, typer.Option(min=16, help="Sequence length in tokens.")] = 1024


@dataclass(kw_only=True)
class LogitBitsSettings(Settings, command="logit-bits", paper="section 3.7, figure 8"):
    """Accuracy with attention logits quantized to 16, 8, 6 and 4 bits."""

    task: Annotated[MultipleChoiceTask, typer.Option(help="Data set with the questions.")] = "hellaswag"
    items: Annotated[int, typer.Option(min=1, help="Maximum number of questions, drawn at random.")] = 500
    batch_tokens: BatchTokens = 4096


@dataclass(kw_only=True)
class HallucinationSettings(Settings, command="hallucination", paper="section 3.6, table 4"):
    """Fraction of summaries or answers that a judge finds accurate."""

    task: Annotated[
        DocumentTask, typer.Option(help="Data set; the first three are for summaries, the others for answers.")
    ] = "xsum"
    documents: Annotated[int, typer.Option(min=1, help="Maximum number of documents, drawn at random.")] = 100
    length: Annotated[int, typer.Option(min=1, help="Tokens read from the beginning of a document.")] = 4096
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens in a response.")] = 128
    judge_url: Annotated[
        str, typer.Option(help="Base URL of an OpenAI-compatible endpoint; OPENAI_API_KEY holds its key.")
    ] = ""
    judge_model: Annotated[list[str], typer.Option(help="Model name of a judge. May be repeated.")] = field(
        default_factory=lambda: ["gpt-4o"]
    )
    judge_timeout: Annotated[float, typer.Option(min=0.1, help="Timeout of a judge's reply in seconds.")] = 120.0
    batch_tokens: BatchTokens = 8192


@dataclass(kw_only=True)
class MathSettings(Settings, command="math", paper="appendix C"):
    """Mathematical word problems: accuracy and length of the reasoning."""

    task: Annotated[WordProblemTask, typer.Option(help="Data set with the problems.")] = "gsm8k"
    problems: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of problems, drawn at random; all by default.")
    ] = None
    shots: Annotated[
        int, typer.Option(min=0, max=4, help="Number of worked examples before each problem; unused with --chat.")
    ] = 4
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template, without examples.")] = False
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens in a completion.")] = 512
    batch_tokens: BatchTokens = 8192


@dataclass(kw_only=True)
class GradientsSettings(ModelPairSettings, command="gradients", paper="appendix G"):
    """Gradient norms of a DIFF Transformer and its matched Transformer."""

    steps: Annotated[int, typer.Option(min=0, help="Number of training steps before the last measurement.")] = 100
    batch: Annotated[int, typer.Option(min=1, help="Batch size in sequences.")] = 8
    length: Annotated[int, typer.Option(min=3, help="Sequence length in bytes.")] = 256
    learning_rate: Annotated[
        float, typer.Option(min=0, help="Constant learning rate of AdamW; by default that of the scaling study.")
    ] = 1.5e-4


@dataclass(kw_only=True)
class ThroughputSettings(ModelPairSettings, command="throughput", paper="appendix A, table 7"):
    """Throughput of a DIFF Transformer and its matched Transformer."""

    takes_data: ClassVar[bool] = False

    length: Annotated[list[int], typer.Option(min=2, help="Sequence length in tokens. May be repeated.")] = field(
        default_factory=lambda: [2048, 4096]
    )
    batch: Annotated[int, typer.Option(min=1, help="Batch size in sequences.")] = 1
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")] = 10
    dtype: Annotated[DType, typer.Option(help="Dtype; auto is bfloat16 on a GPU, float32 elsewhere.")] = "auto"


@dataclass(kw_only=True)
class ScalingSettings(Settings, command="scaling", paper="section 3.2, figure 3"):
    """Scaling laws fitted to losses, and relative model sizes of equal loss."""

    loads_models: ClassVar[bool] = False
