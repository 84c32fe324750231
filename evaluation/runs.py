# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Run a probe: measure its samples, store each so that an interrupted run can continue, and write the report.

A probe defines its samples, measures them and draws its figure. This module does the rest: the sample store, averages,
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
"""Averages of fewer samples have no interval. A percentile interval never exceeds the range of its n samples, which
contains the centre of a symmetric distribution with probability 1 - 2 · 0.5ⁿ: less than `CONFIDENCE` if n < 6."""

CONFIDENCE = 0.95

Condition = dict[str, Any]
"""The condition of a measurement, such as {"length": 4096, "depth": 0.5}."""

Row = dict[str, Any]
"""The numbers of a condition: `condition`; `samples`, how many; `models`, for each model metric -> `mean` and, with
enough samples, `low` and `high`; and for two models `difference`, second minus first, likewise."""

S = TypeVar("S")
T = TypeVar("T")


@dataclass
class Measurement:
    """The values of one sample under one condition, by metric. Every sample of a condition has the same metrics.

    `weight` is the sample's weight in the condition's average, such as its number of tokens.
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
        """Read an outcome from its `line`."""
        entry = json.loads(line)
        return cls(entry["sample"], [Measurement(**item) for item in entry["measurements"]], entry["detail"])

    @property
    def line(self) -> str:
        """Return the outcome as one line of JSON."""
        return dumps(dataclasses.asdict(self))


def dumps(value: Any, indent: int | None = None) -> str:
    """Serialize as JSON. NaN and infinities, which JSON lacks, become strings that `float` can read: nan, inf, -inf."""

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
    """Whether the results are averages over samples, so that bootstrap intervals apply."""

    @property
    def dataset(self) -> str:
        """Name of the data in `find`."""
        raise NotImplementedError

    def specs(self) -> list[ModelSpec]:
        """Return the models to measure. Only for a probe that builds them itself."""
        raise NotImplementedError

    @abstractmethod
    def samples(self, source: Any, loaded: Any) -> Mapping[str, S]:
        """Return the samples by name. They depend only on the settings, the data and the tokenizer.

        Args:
            source: the data, a `Source`; `None` if the probe reads no data.
            loaded: a `LoadedModel`, or what the probe's own `specs` load.
        """

    def drawn(self, items: Iterable[T], count: int | None, name: str) -> list[T]:
        """Draw at most `count` items, all if `None`, in an order that depends on the seed and `name`."""
        everything = list(items)
        return random.Random(f"{self.seed}:{name}").sample(everything, min(count or len(everything), len(everything)))

    def tokens_at_once(self, loaded: LoadedModel, samples: Mapping[str, S]) -> int:
        """Return the tokens of the longest sample, including generated ones; by default the setting `length`."""
        length: int | list[int] = getattr(self, "length", 0)
        return max(length) if isinstance(length, list) else length

    @abstractmethod
    def measure(self, loaded: Any, samples: Mapping[str, S]) -> Iterator[Outcome]:
        """Measure samples and yield their outcomes, in any order."""

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
        """Return the values of a metric by model name, in `rows` or in all rows."""
        chosen = self.rows if rows is None else list(rows)
        return {name: [row["models"][index][metric] for row in chosen] for index, name in enumerate(self.names)}

    def select(self, **condition: Any) -> list[Row]:
        """Return the rows whose conditions have these values."""
        return [
            row for row in self.rows if all(row["condition"].get(name) == value for name, value in condition.items())
        ]


def weighted_means(values: np.ndarray, weights: np.ndarray, axis: int) -> np.ndarray:
    """Compute the weighted means of each metric for each model and, for two models, their difference.

    Args:
        values: [metrics, models, …, samples].
        weights: of the samples, in the same shape.
        axis: the samples' axis.

    Returns:
        [metrics, models or 3, …]: for one model its means, for two models those of A, B and B - A.
    """
    means = (values * weights).sum(axis) / weights.sum(axis)
    return np.concatenate((means, means[:, 1:] - means[:, :1]), axis=1)


@np.errstate(invalid="ignore")  # an infinite loss has no interval: NaN, not a warning
def average(measured: Sequence[Mapping[str, Outcome]], *, seed: int, intervals: bool) -> list[Row]:
    """Average over samples for each condition, with bootstrap intervals; for two models, also the paired difference.

    An average includes the samples that every model has in the condition. Fewer than `FEWEST` have no interval.

    Args:
        measured: each model's outcomes by sample.
        seed: of the bootstrap resamples.
        intervals: whether to compute intervals.
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
                batch=100,  # bounds memory
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
    """Average the outcomes of each unit, such as a question, over one field of their conditions.

    Outcomes of one unit are averaged only where the other fields of their conditions are equal.

    Args:
        name: the field to average over; the averages' conditions lack it.
        outcomes: a model's outcomes by sample, with one measurement each.
        unit: returns the unit of a sample from its name and outcome.
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
    """Return what the results depend on besides settings, data and model: a hash of the code and library versions."""
    code = hashlib.sha256()
    for module in (evaluation, modeling_diff):
        (folder,) = module.__path__
        code.update(digest(Path(folder), ("**/*.py",)).encode())
    return {"code": code.hexdigest(), "torch": torch.__version__, "transformers": transformers.__version__}


RECORDED = ("versions", "paper", "data.path", "model.name", "model.commit")
"""Fields that may differ when a run is resumed: equal data or code may have another name or commit."""


class SampleStore:
    """The outcomes of one model on disk: a header line that identifies the run, then a line for each sample.

    The file is created if it does not exist or has no samples. A truncated last line is dropped.

    Raises:
        ValueError: the file holds another run's samples, or is not a sample file.
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
            raise ValueError(f"{file} is not a file of samples: {error}. {advice}") from error
        expected = json.loads(dumps(header))
        differs = [name for name in differences(recorded, expected) if not name.startswith(RECORDED)]
        if self.outcomes and differs:
            raise ValueError(f"{file} has the samples of a run that differs in {', '.join(differs)}. {advice}")
        if differs:
            replace_file(file, dumps(header) + "\n")
        elif complete != content:
            replace_file(file, complete)

    def add(self, outcome: Outcome) -> None:
        """Store an outcome and keep it as read back, so that resumed and uninterrupted runs report the same."""
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(outcome.line + "\n")
        self.outcomes[outcome.sample] = Outcome.parse(outcome.line)


def differences(left: Any, right: Any, name: str = "") -> list[str]:
    """Return the paths at which two JSON values differ, such as ["settings.length"]."""
    if isinstance(left, dict) and isinstance(right, dict):
        fields = sorted(left.keys() | right.keys())
        return [at for field in fields for at in differences(left.get(field), right.get(field), f"{name}.{field}")]
    return [] if left == right else [name.removeprefix(".") or "everything"]


Progress = Callable[[str, int, int], None]
"""Called with the model's name, the number of samples measured so far, and the total number of samples."""


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
        specs: one or two models, measured one after the other.
        output: the folder. Samples that the same run stored there before it was interrupted are not measured again.
        data: file or folder with the probe's data, or the parent of a folder named as the probe's `dataset`; by
            default the built-in sample.
        progress: called after each sample.
        note: called with each limitation of the results, such as texts longer than a model's context. The report
            contains them, too.

    Raises:
        FileNotFoundError: `data` lacks the probe's data.
        NotADirectoryError: `output` is a file.
        IsADirectoryError: results.json or figure.png is a folder.
        ValueError: the data or a setting is invalid, the folder has another run's samples, or another run is writing
            into it.
    """
    from matplotlib.figure import Figure  # needs the extra `eval`

    if output.exists() and not output.is_dir():
        raise NotADirectoryError(f"{output} is not a folder. Name a folder with --output.")
    for name in ("results.json", "figure.png"):
        if (output / name).is_dir():
            raise IsADirectoryError(f"{output / name} must be a file, it is a folder. Name another with --output.")
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
            gc.collect()  # frees this model before the next is loaded
        rows = probe.rows(outcomes)
        if probe.intervals and any(row["samples"] < FEWEST for row in rows):
            tell(f"Averages of fewer than {FEWEST} samples have no confidence interval.")
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
    """Measure the samples that the store lacks. Return all outcomes, in the order of the samples, and model facts."""
    loaded = spec.load()
    samples = probe.samples(source, loaded)
    facts = {}
    if isinstance(loaded, LoadedModel):
        facts = loaded.facts()
        tokens, positions = probe.tokens_at_once(loaded, samples), facts["positions"]
        if positions and tokens > positions:
            tell(
                f"{tokens:,} tokens exceed the context of {spec.name}, {positions:,} tokens "
                "(`max_position_embeddings`)."
            )
    missing = {name: sample for name, sample in samples.items() if name not in store.outcomes}
    progress(spec.name, len(samples) - len(missing), len(samples))
    for outcome in probe.measure(loaded, missing) if missing else ():
        store.add(outcome)
        progress(spec.name, len(store.outcomes), len(samples))
    return {name: store.outcomes[name] for name in samples}, facts
