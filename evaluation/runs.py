# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Run a probe: measure its samples, store each so that an interrupted run can continue, and write the report.

A probe defines its samples, measures them and draws its figure. Everything else is here: the sample store, averages,
bootstrap intervals, the comparison of two models, the JSON report and the figure's file.
"""

import dataclasses
import gc
import hashlib
import io
import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
import transformers
from scipy.stats import bootstrap

from diffllama import evaluation, modeling_diff
from diffllama.checkpoints.files import locked, replace_file
from diffllama.checkpoints.versions import versions
from diffllama.evaluation.datasets.data import Source, find
from diffllama.evaluation.models import LoadedModel, ModelSpec, digest
from diffllama.evaluation.settings import Settings


RESAMPLES = 1000
"""Bootstrap resamples of each interval."""

FEWEST = 6
"""Averages of fewer samples have no interval. A percentile interval never reaches beyond the smallest and the largest
sample, and these enclose the centre of a symmetric distribution with a probability of 1 - 2 · 0.5ⁿ: below `CONFIDENCE`
if n < 6."""

CONFIDENCE = 0.95

Condition = dict[str, Any]
"""What a number refers to, such as {"length": 4096, "depth": 0.5}."""

Row = dict[str, Any]
"""The numbers of a condition: `condition`, `samples` (how many), `models` (for each, metric -> `mean` and, of enough
samples, `low` and `high`) and, of two models, `difference` (second minus first, likewise)."""

S = TypeVar("S")
T = TypeVar("T")


@dataclass
class Measurement:
    """The numbers of one sample under one condition, by metric: the same metrics in every sample of a condition.

    The weight is that of the sample in the condition's average, such as the number of its tokens.
    """

    condition: Condition
    values: Mapping[str, Any]
    weight: float = 1.0

    def __post_init__(self) -> None:
        self.values = {name: float(value) for name, value in self.values.items()}


@dataclass(frozen=True)
class Outcome:
    """The result of one sample: its measurements, and details worth storing, such as the generated text."""

    sample: str
    measurements: list[Measurement]
    detail: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, line: str) -> "Outcome":
        """Parse what `line` returned."""
        entry = json.loads(line)
        return cls(entry["sample"], [Measurement(**item) for item in entry["measurements"]], entry["detail"])

    @property
    def line(self) -> str:
        """As one line of JSON."""
        return dumps(dataclasses.asdict(self))


def dumps(value: Any, indent: int | None = None) -> str:
    """Serialise as JSON. NaN and infinities, which JSON lacks, become strings that `float` reads: nan, inf, -inf."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


class Probe(Settings, ABC, Generic[S]):
    """One of the paper's experiments, with its settings. If it `loads_models`, the user names the models."""

    intervals: ClassVar[bool] = True
    """Whether its numbers are averages over samples, for which bootstrap intervals make sense."""

    @property
    def dataset(self) -> str:
        """The name of its data, as in `find`."""
        raise NotImplementedError

    def specs(self) -> list[ModelSpec]:
        """The models to measure, of a probe that makes them itself."""
        raise NotImplementedError

    @abstractmethod
    def samples(self, source: Any, loaded: Any) -> Mapping[str, S]:
        """Its samples by name; the same ones for the same settings, data and tokenizer.

        Args:
            source: the data, a `Source`; `None` of a probe that reads no data.
            loaded: a `LoadedModel`, or what the probe's own `specs` load.
        """

    def drawn(self, items: Iterable[T], count: int | None, name: str) -> list[T]:
        """So many items, or all there are, in an order of their own for each seed and name."""
        everything = list(items)
        return random.Random(f"{self.seed}:{name}").sample(everything, min(count or len(everything), len(everything)))

    def tokens_at_once(self, loaded: LoadedModel, samples: Mapping[str, S]) -> int:
        """How many tokens its longest sample has, with what is generated; by default the setting `length`."""
        length: int | list[int] = getattr(self, "length", 0)
        return max(length) if isinstance(length, list) else length

    @abstractmethod
    def measure(self, loaded: Any, samples: Mapping[str, S]) -> Iterator[Outcome]:
        """Measure samples, in any order."""

    def rows(self, measured: Sequence[Mapping[str, Outcome]]) -> list[Row]:
        """Compute the report's rows from the outcome of each sample and model."""
        return average(measured, seed=self.seed, intervals=self.intervals)

    @abstractmethod
    def draw(self, report: "Report", figure: Any) -> None:
        """Draw the report into an empty matplotlib figure."""


@dataclass(frozen=True)
class Report:
    """The result of a run: names of models, rows of numbers, each model's outcomes by sample, and the JSON report."""

    names: list[str]
    rows: list[Row]
    outcomes: list[dict[str, Outcome]]
    record: dict[str, Any]

    def points(self, metric: str, rows: Iterable[Row] | None = None) -> dict[str, list[Any]]:
        """Values of a metric by model name, in `rows` or in all rows."""
        chosen = self.rows if rows is None else list(rows)
        return {name: [row["models"][index][metric] for row in chosen] for index, name in enumerate(self.names)}

    def select(self, **condition: Any) -> list[Row]:
        """Rows whose conditions have these values."""
        return [
            row for row in self.rows if all(row["condition"].get(name) == value for name, value in condition.items())
        ]


def weighted_means(values: np.ndarray, weights: np.ndarray, axis: int) -> np.ndarray:
    """Weighted means of each metric for each model and, of two models, their difference.

    Args:
        values: [metrics, models, …, samples]. weights: of the samples, likewise.
        axis: of the samples.

    Returns:
        [metrics, models or 3, …]: of one model its means, of two A, B and B - A.
    """
    means = (values * weights).sum(axis) / weights.sum(axis)
    return np.concatenate((means, means[:, 1:] - means[:, :1]), axis=1)


@np.errstate(invalid="ignore")  # an infinite loss has no interval: NaN, not a warning
def average(measured: Sequence[Mapping[str, Outcome]], *, seed: int, intervals: bool) -> list[Row]:
    """Average over samples for each condition, with bootstrap intervals; of two models, also their paired difference.

    A sample is counted in a condition if every model has it there. Fewer than `FEWEST` have no interval.
    """
    by_condition: dict[str, list[dict[str, Measurement]]] = {}
    for index, outcomes in enumerate(measured):
        for sample, outcome in outcomes.items():
            for measurement in outcome.measurements:
                key = json.dumps(measurement.condition, sort_keys=True)
                by_condition.setdefault(key, [{} for _ in measured])[index][sample] = measurement
    rows = []
    for models in by_condition.values():
        shared = sorted(set.intersection(*(set(samples) for samples in models)))
        if not shared:
            continue
        first = models[0][shared[0]]
        values = np.array(
            [[[model[name].values[metric] for name in shared] for model in models] for metric in first.values]
        )
        weights = np.broadcast_to([[model[name].weight for name in shared] for model in models], values.shape)
        statistics = {"mean": weighted_means(values, weights, -1)}
        if intervals and len(shared) >= FEWEST:
            interval = bootstrap(
                (values, weights),
                weighted_means,
                n_resamples=RESAMPLES,
                batch=100,  # computed together, which bounds memory
                paired=True,  # the same resamples for every model and metric
                axis=-1,
                confidence_level=CONFIDENCE,
                method="percentile",
                rng=np.random.default_rng(seed),
            ).confidence_interval
            statistics |= {"low": interval.low, "high": interval.high}
        columns = [
            {
                metric: {name: float(array[at, column]) for name, array in statistics.items()}
                for at, metric in enumerate(first.values)
            }
            for column in range(statistics["mean"].shape[1])
        ]
        row: Row = {"condition": first.condition, "samples": len(shared), "models": columns[: len(models)]}
        if len(models) == 2:
            row["difference"] = columns[2]
        rows.append(row)
    return rows


def averages_over(
    name: str, outcomes: Mapping[str, Outcome], unit: Callable[[str, Outcome], str]
) -> dict[str, Outcome]:
    """Outcomes of units, such as questions, that were measured at every value of one field of their conditions.

    Each outcome of a model has one measurement, of the `unit` that its name and itself tell. The averages' conditions
    lack the field `name`, and are of different units where the rest of the conditions differs.
    """
    by_unit: dict[str, tuple[Condition, list[Mapping[str, float]]]] = {}
    for sample, outcome in outcomes.items():
        (measurement,) = outcome.measurements
        condition = {field: value for field, value in measurement.condition.items() if field != name}
        key = f"{json.dumps(condition)} {unit(sample, outcome)}"
        by_unit.setdefault(key, (condition, []))[1].append(measurement.values)
    return {
        key: Outcome(key, [Measurement(condition, {metric: fmean(x[metric] for x in values) for metric in values[0]})])
        for key, (condition, values) in by_unit.items()
    }


def computed_by() -> dict[str, str]:
    """What the numbers depend on besides settings, data and model: a hash of the code, and versions of libraries."""
    code = hashlib.sha256()
    for module in (evaluation, modeling_diff):
        (folder,) = module.__path__
        code.update(digest(Path(folder), ("**/*.py",)).encode())
    return {"code": code.hexdigest(), "torch": torch.__version__, "transformers": transformers.__version__}


RECORDED = ("versions", "paper", "data.path", "model.name", "model.commit")
"""Fields that may differ in a run that goes on: the same bytes by another name, another commit of the same code."""


class SampleStore:
    """The outcomes of one model on disk: a header line that identifies the run, then a line for each sample.

    The file is created if it does not exist or has no samples. A truncated last line is dropped.

    Raises:
        ValueError: the file holds another run's samples, or something else.
    """

    def __init__(self, file: Path, header: dict[str, Any]) -> None:
        self.file = file
        self.outcomes: dict[str, Outcome] = {}
        advice = "Name another folder with --output, or remove this one."
        content = file.read_bytes() if file.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]  # a whole line ends in a line feed
        try:
            lines = complete.decode().split("\n")[:-1]
            recorded = json.loads(lines[0]) if lines else {}
            for text in lines[1:]:
                outcome = Outcome.parse(text)
                self.outcomes[outcome.sample] = outcome
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(f"{file} has something else than samples: {error}. {advice}") from error
        expected = json.loads(dumps(header))
        differs = [name for name in differences(recorded, expected) if not name.startswith(RECORDED)]
        if self.outcomes and differs:
            raise ValueError(f"{file} has samples of a run that differs in {', '.join(differs)}. {advice}")
        if differs:
            replace_file(file, dumps(header) + "\n")
        elif complete != content:
            replace_file(file, complete)

    def add(self, outcome: Outcome) -> None:
        """Store an outcome, as it will be read back: an interrupted run reports the same as an uninterrupted one."""
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(outcome.line + "\n")
        self.outcomes[outcome.sample] = Outcome.parse(outcome.line)


def differences(left: Any, right: Any, name: str = "") -> list[str]:
    """Paths at which two JSON values differ, such as ["settings.length"]."""
    if isinstance(left, dict) and isinstance(right, dict):
        fields = sorted(left.keys() | right.keys())
        return [at for field in fields for at in differences(left.get(field), right.get(field), f"{name}.{field}")]
    return [] if left == right else [name.removeprefix(".") or "everything"]


Progress = Callable[[str, int, int], None]
"""Called with the model's name, the number of samples measured so far, and the number of all samples."""


def run(
    probe: Probe,
    specs: Sequence[ModelSpec],
    *,
    output: Path,
    data: Path | None = None,
    progress: Progress = lambda name, done, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> Report:
    """Measure models and write `results.json`, `figure.png` and each model's samples into a folder.

    Args:
        probe: what to measure.
        specs: one or two models, in turn.
        output: the folder. Samples that an earlier part of the same run stored there are not measured again.
        data: file or folder with the probe's data, or a folder in which it lies under the probe's name for it; the
            built-in sample by default.
        progress: called after each sample.
        note: called with each limitation of the numbers, such as texts longer than a model's context; they are in
            the report, too.

    Raises:
        FileNotFoundError: `data` lacks the probe's data.
        NotADirectoryError: `output` is a file.
        IsADirectoryError: a file to write is a folder.
        ValueError: the data or a setting is not what the probe takes, the folder has another run's samples, or another
            run is writing into it.
    """
    from matplotlib.figure import Figure  # needs the extra `eval`

    if output.exists() and not output.is_dir():
        raise NotADirectoryError(f"{output} is no folder. Name one with --output.")
    for name in ("results.json", "figure.png"):
        if (output / name).is_dir():
            raise IsADirectoryError(f"{output / name} is a folder. Name another place with --output.")
    source = find(probe.dataset, data) if probe.takes_data else None
    notes: list[str] = []

    def tell(text: str) -> None:
        notes.append(text)
        note(text)

    with locked(output, "name another folder with --output"):
        record: dict[str, Any] = {
            "probe": probe.command,
            "paper": probe.paper,
            "settings": dataclasses.asdict(probe),
            "data": source.facts() if source else None,
            "versions": versions(),
        }
        header = record | {"computed_by": computed_by()}
        stores = [
            SampleStore(output / f"samples-{number}.jsonl", header | {"model": spec.facts})
            for number, spec in enumerate(specs, 1)
        ]
        record |= {"notes": notes, "models": []}
        outcomes = []
        for spec, store in zip(specs, stores, strict=True):
            measured, facts = measure(probe, spec, store, source, progress, tell)
            outcomes.append(measured)
            record["models"].append(spec.facts | facts)
            gc.collect()  # before the next model takes memory
        rows = probe.rows(outcomes)
        if probe.intervals and any(row["samples"] < FEWEST for row in rows):
            tell(f"Averages of fewer than {FEWEST} samples have no interval.")
        report = Report([spec.name for spec in specs], rows, outcomes, record | {"rows": rows})
        replace_file(output / "results.json", dumps(report.record, indent=1) + "\n")
        figure, image = Figure(), io.BytesIO()
        probe.draw(report, figure)
        figure.savefig(image, dpi=110, format="png")
        replace_file(output / "figure.png", image.getvalue())
    return report


def measure(
    probe: Probe,
    spec: ModelSpec,
    store: SampleStore,
    source: Source | None,
    progress: Progress,
    tell: Callable[[str], None],
) -> tuple[dict[str, Outcome], dict[str, Any]]:
    """Measure the samples that the store lacks: all outcomes, in the order of the samples, and facts of the model."""
    loaded = spec.load()
    samples = probe.samples(source, loaded)
    facts = {}
    if isinstance(loaded, LoadedModel):
        facts = loaded.facts()
        tokens, positions = probe.tokens_at_once(loaded, samples), facts["positions"]
        if positions and tokens > positions:
            tell(
                f"{tokens:,} tokens are more than the {positions:,} positions of {spec.name} "
                "(`max_position_embeddings`), which it was not made for."
            )
    missing = {name: sample for name, sample in samples.items() if name not in store.outcomes}
    progress(spec.name, len(samples) - len(missing), len(samples))
    for outcome in probe.measure(loaded, missing) if missing else ():
        store.add(outcome)
        progress(spec.name, len(store.outcomes), len(samples))
    return {name: store.outcomes[name] for name in samples}, facts
