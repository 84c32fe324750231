"""Averages and intervals by arithmetic, interrupted runs, and written files."""

import dataclasses
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
import torch
import typer

import diffllama
from diffllama.checkpoints import versions
from diffllama.evaluation import runs
from diffllama.evaluation.datasets.data import Source
from diffllama.evaluation.models import LoadedModel, ModelSpec, digest
from diffllama.evaluation.runs import (
    Measurement,
    Outcome,
    Probe,
    Report,
    Row,
    SampleStore,
    average,
    averages_over,
    run,
    weighted_means,
)
from support.tiny_loaded_models import tiny_loaded_model


def outcomes(*values: float, weights: Sequence[float] = (), **condition: Any) -> dict[str, Outcome]:
    """Return an outcome for each value of `x`."""
    weights = weights or [1.0] * len(values)
    return {
        f"s{at}": Outcome(f"s{at}", [Measurement(condition, {"x": value}, weight)])
        for at, (value, weight) in enumerate(zip(values, weights, strict=True))
    }


def only(rows: list[runs.Row]) -> dict[str, Any]:
    (row,) = rows
    return row


class TestAverage:
    def test_mean_is_weighted(self) -> None:
        row = only(average([outcomes(1, 2, 4, weights=(1, 1, 2), at=7)], seed=0, intervals=False))
        assert row == {"condition": {"at": 7}, "samples": 3, "models": [{"x": {"mean": 11 / 4}}]}

    def test_interval_is_of_the_means_of_resamples(self) -> None:
        # half of the values are 1: the mean of six draws is 0 or 1 with probability 1/64 each, 1/6 or 5/6 with 6/64
        row = only(average([outcomes(0, 1, 0, 1, 0, 1)], seed=0, intervals=True))
        assert row["models"][0]["x"] == {"mean": 0.5, "low": pytest.approx(1 / 6), "high": pytest.approx(5 / 6)}

    def test_weighted_means_of_resamples_with_their_difference(self) -> None:
        values = np.array([[[[0.0, 1.0], [1.0, 1.0]], [[4.0, 8.0], [8.0, 8.0]]]])  # 1 metric, 2 models, 2 resamples
        weights = np.array([3.0, 1.0])[None, None, None]
        means = weighted_means(values, weights, -1)
        assert means.tolist() == [[[0.25, 1], [5, 8], [4.75, 7]]]

    def test_difference_is_of_paired_samples(self) -> None:
        noise = np.random.default_rng(0).normal(size=30).round(3)
        row = only(average([outcomes(*noise), outcomes(*(noise + 1))], seed=0, intervals=True))
        assert row["difference"]["x"] == pytest.approx({"mean": 1, "low": 1, "high": 1})
        for model in row["models"]:
            assert model["x"]["high"] - model["x"]["low"] > 0.3

    def test_resampled_values_keep_their_weights(self) -> None:
        row = only(average([outcomes(*4 * [0, 1], weights=4 * (1, 1e-9))], seed=0, intervals=True))
        assert row["models"][0]["x"]["high"] == pytest.approx(0, abs=1e-6)

    def test_sample_counts_where_every_model_has_it(self) -> None:
        one, other = outcomes(1, 2, 3, 100), outcomes(5, 6, 7, 8)
        del one["s0"], other["s3"]
        row = only(average([one, other], seed=0, intervals=False))
        assert row["samples"] == 2
        assert row["models"] == [{"x": {"mean": 2.5}}, {"x": {"mean": 6.5}}]
        assert row["difference"] == {"x": {"mean": 4}}

    def test_condition_missing_in_one_model_is_left_out(self) -> None:
        one = {name: Outcome(name, outcome.measurements * 2) for name, outcome in outcomes(1, 2, at=1).items()}
        for outcome in one.values():
            outcome.measurements[0] = Measurement({"at": 2}, {"x": 9})
        assert [row["condition"] for row in average([one, outcomes(1, 2, at=1)], seed=0, intervals=False)] == [
            {"at": 1}
        ]

    @pytest.mark.parametrize("count", [1, 2, 5])
    def test_fewer_than_six_samples_have_no_interval(self, count: int) -> None:
        row = only(average([outcomes(*range(count)), outcomes(*range(2, count + 2))], seed=0, intervals=True))
        middle = (count - 1) / 2
        assert row["models"] == [{"x": {"mean": middle}}, {"x": {"mean": middle + 2}}]
        assert row["difference"] == {"x": {"mean": 2}}

    def test_neither_order_nor_the_run_changes_an_interval_but_the_seed_does(self) -> None:
        measured = outcomes(*np.random.default_rng(1).normal(size=20))
        turned = dict(reversed(measured.items()))
        assert average([measured], seed=3, intervals=True) == average([turned], seed=3, intervals=True)
        assert average([measured], seed=3, intervals=True) != average([measured], seed=4, intervals=True)

    def test_intervals_hold_the_mean_as_often_as_they_say(self) -> None:
        held, draws = 0, np.random.default_rng(0)
        for trial in range(300):
            mean = only(average([outcomes(*draws.normal(size=50))], seed=trial, intervals=True))["models"][0]["x"]
            held += mean["low"] <= 0 <= mean["high"]
        assert 0.91 <= held / 300 <= 0.98  # about 0.94 for 50 samples, with a standard deviation of 0.014

    def test_infinite_loss_has_a_mean_and_no_warning(self, recwarn: pytest.WarningsRecorder) -> None:
        row = only(average([outcomes(1, 2, float("inf")), outcomes(1, 2, float("inf"))], seed=0, intervals=True))
        assert row["models"][0]["x"]["mean"] == float("inf")
        assert np.isnan(row["difference"]["x"]["mean"])
        assert not recwarn.list


@dataclass(kw_only=True)
class Squares(Probe[int]):
    """Adds the square of each number to the model's number."""

    command: ClassVar[str] = "squares"
    paper: ClassVar[str] = "nowhere"
    dataset: ClassVar[str] = "novels"

    count: Annotated[int, typer.Option()] = 4
    values: Annotated[list[float], typer.Option()] = dataclasses.field(default_factory=list)

    def samples(self, source: Source | None, loaded: Any) -> Mapping[str, int]:
        return {f"{number}²\u2028": number for number in range(self.count)}

    def measure(self, loaded: Any, samples: Mapping[str, int]) -> Iterator[Outcome]:
        offset = loaded if isinstance(loaded, int) else 0
        for name, number in samples.items():
            yield Outcome(name, [Measurement({"of": "é"}, {"x": offset + number**2})], {"text": "日本\n"})

    def draw(self, report: Report, figure: Any) -> None:
        figure.add_subplot().plot([row["models"][0]["x"]["mean"] for row in report.rows])


def spec(loaded: Any = 0, name: str = "model") -> ModelSpec:
    return ModelSpec(name, {"sha256": str(loaded)}, lambda: loaded)


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


COMPUTED_BY = runs.computed_by()
LINE = Outcome("a", []).line.encode() + b"\n"


class TestRun:
    def test_run_writes_report_figure_and_samples(self, tmp_path: Path) -> None:
        report = run(Squares(seed=5, count=6), [spec(1, "a"), spec(3, "b")], output=tmp_path)
        assert {*files(tmp_path)} == {"results.json", "figure.png", "samples-1.jsonl", "samples-2.jsonl"}
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
        results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
        assert results == report.record
        assert (results["probe"], results["paper"]) == ("squares", "nowhere")
        assert results["settings"] == {"seed": 5, "count": 6, "values": []}
        assert results["notes"] == []
        assert results["data"] == {"path": "built-in novels", "sha256": digest(runs.find("novels", None).path)}
        assert [model["sha256"] for model in results["models"]] == ["1", "3"]
        assert results["versions"]["diffllama"] == diffllama.__version__
        assert results["versions"]["torch"] == torch.__version__
        assert {*results["versions"]} == {"diffllama", "commit", "torch", "transformers", "python"}
        (row,) = results["rows"]
        assert [model["x"]["mean"] for model in row["models"]] == [61 / 6, 73 / 6]  # 0, 1, 4, 9, 16, 25 and 1 or 3
        assert row["difference"]["x"] == pytest.approx({"mean": 2, "low": 2, "high": 2})

    def test_loaded_model_is_described(self, tmp_path: Path) -> None:
        (facts,) = run(Squares(), [spec(tiny_loaded_model("v2"))], output=tmp_path).record["models"]
        del facts["sha256"]
        parameters = tiny_loaded_model("v2").model.num_parameters()
        assert facts == {
            "model_type": "diff_llama", "variant": "v2", "parameters": parameters, "dtype": "float32", "device": "cpu",
            "attention": "sdpa", "positions": 1024,
        }  # fmt: skip

    @pytest.mark.parametrize("after", range(4))
    def test_interrupted_run_measures_the_rest_and_reports_the_same(
        self, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def measure(loaded: Any, samples: Mapping[str, int]) -> Iterator[Outcome]:
            yield from islice(Squares.measure(broken, loaded, samples), after)
            raise KeyboardInterrupt

        broken, progress = Squares(), []
        monkeypatch.setattr(broken, "measure", measure)
        run(Squares(), [spec()], output=tmp_path / "whole")
        with pytest.raises(KeyboardInterrupt):
            run(broken, [spec()], output=tmp_path / "broken")
        assert {*files(tmp_path / "broken")} == {"samples-1.jsonl"}
        run(Squares(), [spec()], output=tmp_path / "broken", progress=lambda *done: progress.append(done))
        assert files(tmp_path / "broken") == files(tmp_path / "whole")
        assert progress == [("model", done, 4) for done in range(after, 5)]

    @pytest.mark.parametrize(
        ("probe", "loaded", "data", "field"),
        [
            (Squares(count=5), 0, "1", r"settings\.count"),
            (Squares(seed=1), 0, "1", r"settings\.seed"),
            (Squares(count=5, seed=1), 0, "1", r"settings\.count, settings\.seed"),
            (Squares(), 1, "1", r"model\.sha256"),
            (Squares(), 0, "2", r"data\.sha256"),
        ],
    )
    def test_samples_of_another_run_are_refused_and_left(
        self, probe: Squares, loaded: int, data: str, field: str, tmp_path: Path
    ) -> None:
        file = tmp_path / "data"
        file.write_text("1")
        run(Squares(), [spec()], output=tmp_path / "out", data=file)
        before = files(tmp_path / "out")
        file.write_text(data)
        with pytest.raises(ValueError, match=rf"samples-1\.jsonl has .* differs in {field}\. .*--output"):
            run(probe, [spec(loaded)], output=tmp_path / "out", data=file)
        assert files(tmp_path / "out") == before

    def test_samples_that_other_code_or_libraries_computed_are_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run(Squares(), [spec()], output=tmp_path)
        for field in ("code", "torch", "transformers"):
            with monkeypatch.context() as patch:
                patch.setattr(runs, "computed_by", lambda field=field: COMPUTED_BY | {field: "another"})
                with pytest.raises(ValueError, match=rf"differs in computed_by\.{field}\."):
                    run(Squares(), [spec()], output=tmp_path)

    def test_run_goes_on_at_another_commit_and_by_another_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def named(name: str) -> ModelSpec:
            return ModelSpec(name, {"name": name, "commit": name, "sha256": "0"}, lambda: 0)

        (tmp_path / "data").write_text("1")
        run(Squares(), [named("a")], output=tmp_path / "out", data=tmp_path / "data")
        monkeypatch.setattr(versions, "commit", lambda: "another")
        monkeypatch.setattr(Squares, "measure", lambda *arguments: pytest.fail("measured again"))
        (tmp_path / "data").rename(tmp_path / "moved")
        report = run(Squares(), [named("b")], output=tmp_path / "out", data=tmp_path / "moved")
        assert report.record["versions"]["commit"] == "another"

    def test_computed_by_changes_with_code_bytes_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "a.py").write_text("x = 1")
        (tmp_path / "README.md").write_text("text")
        monkeypatch.setattr(runs.evaluation, "__path__", [str(tmp_path)])
        before = runs.computed_by()
        (tmp_path / "README.md").write_text("other text")
        assert runs.computed_by() == before
        (tmp_path / "a.py").write_text("x = 2")
        assert runs.computed_by()["code"] != before["code"]
        assert {**runs.computed_by(), "code": ""} == {**before, "code": ""}

    def test_second_run_into_one_folder_is_refused(self, tmp_path: Path) -> None:
        def load() -> int:
            with pytest.raises(ValueError, match=r"Another run is writing into .*: wait .* folder with --output"):
                run(Squares(), [spec()], output=tmp_path / "out")
            return 0

        run(Squares(), [ModelSpec("a", {}, load)], output=tmp_path / "out")

    def test_limitations_are_noted_before_measuring_and_recorded(self, tmp_path: Path) -> None:
        @dataclass(kw_only=True)
        class Long(Squares):
            length: int = 1025

        notes: list[str] = []

        def measure(loaded: Any, samples: Mapping[str, int]) -> Iterator[Outcome]:
            assert notes == ["1,025 tokens exceed the context of model, 1,024 tokens (`max_position_embeddings`)."]
            return Squares.measure(probe, 0, samples)

        probe = Long()
        probe.measure = measure  # type: ignore[method-assign]
        report = run(probe, [spec(tiny_loaded_model("v1"))], output=tmp_path, note=notes.append)
        assert notes[1:] == ["Averages of fewer than 6 samples have no confidence interval."]
        assert report.record["notes"] == notes
        assert (
            run(Long(length=1024), [spec(tiny_loaded_model("v1"))], output=tmp_path / "b").record["notes"] == notes[1:]
        )

    def test_foreign_samples_of_second_model_are_refused_before_loading_the_first(self, tmp_path: Path) -> None:
        run(Squares(), [spec(0), spec(1)], output=tmp_path)
        (tmp_path / "samples-1.jsonl").unlink()
        with pytest.raises(ValueError, match=r"samples-2\.jsonl .* differs in model\.sha256"):
            run(Squares(), [ModelSpec("a", {}, lambda: pytest.fail("loaded")), spec(2)], output=tmp_path)

    @pytest.mark.parametrize(
        "content", [b"hello\n", b'{"probe": "squares"}\n{}\n', b"\xff\n", b"{}\n7\n", b"7\n" + LINE]
    )
    def test_foreign_samples_file_is_refused_and_unchanged(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "samples-1.jsonl").write_bytes(content)
        with pytest.raises(ValueError, match=r"samples-1\.jsonl .* Name another folder with --output"):
            run(Squares(), [spec()], output=tmp_path)
        assert files(tmp_path) == {"samples-1.jsonl": content}

    def test_run_without_samples_does_not_block_another(self, tmp_path: Path) -> None:
        run(Squares(), [spec()], output=tmp_path / "whole")
        with pytest.raises(FileNotFoundError):
            run(Squares(count=3), [ModelSpec("a", {}, lambda: Path("nowhere").read_text())], output=tmp_path / "out")
        assert len((tmp_path / "out" / "samples-1.jsonl").read_text().splitlines()) == 1
        run(Squares(), [spec()], output=tmp_path / "out")
        assert files(tmp_path / "out") == files(tmp_path / "whole")

    def test_unwritable_folder_is_refused_before_loading(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(self: Path, content: bytes) -> int:
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "write_bytes", refuse)
        with pytest.raises(PermissionError, match="Permission denied"):
            run(Squares(), [ModelSpec("a", {}, lambda: pytest.fail("loaded"))], output=tmp_path)

    @pytest.mark.parametrize("name", ["results.json", "figure.png"])
    def test_report_files_appear_complete_or_not_at_all(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def half(self: Path, content: bytes, write: Any = Path.write_bytes) -> int:
            if name in self.name:
                write(self, content[: len(content) // 2])
                raise OSError(28, "No space left on device")
            return write(self, content)

        def fails() -> None:
            with monkeypatch.context() as patch:
                patch.setattr(Path, "write_bytes", half)
                with pytest.raises(OSError, match="No space left"):
                    run(Squares(), [spec()], output=tmp_path)

        fails()
        assert not (tmp_path / name).exists()
        run(Squares(), [spec()], output=tmp_path)
        before = (tmp_path / name).read_bytes()
        fails()
        assert (tmp_path / name).read_bytes() == before

    def test_results_are_written_even_if_the_figure_fails(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def draw(self: Squares, report: Report, figure: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(Squares, "draw", draw)
        with pytest.raises(ZeroDivisionError):
            run(Squares(), [spec()], output=tmp_path)
        assert json.loads((tmp_path / "results.json").read_text())["rows"]
        assert not (tmp_path / "figure.png").exists()

    def test_first_model_is_gone_when_the_second_is_loaded(self, tmp_path: Path) -> None:
        alive: list[weakref.ref[Any]] = []

        def load() -> LoadedModel:
            assert [reference for reference in alive if reference() is not None] == []
            loaded = tiny_loaded_model("v1")
            loaded.model.itself = [loaded.model]  # a reference cycle
            alive.append(weakref.ref(loaded.model))
            return loaded

        run(Squares(), [ModelSpec(name, {}, load) for name in "ab"], output=tmp_path)
        assert len(alive) == 2

    def test_nan_and_infinity_give_valid_json_and_a_run_continues(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def measure(self: Squares, loaded: Any, samples: Mapping[str, int]) -> Iterator[Outcome]:
            for name, number in samples.items():
                x = [1.0, float("inf"), float("-inf"), float("nan")][number]
                yield Outcome(name, [Measurement({"of": number}, {"x": x})], {"logits": [x]})

        monkeypatch.setattr(Squares, "measure", measure)

        def refuse(number: str) -> None:
            raise AssertionError(f"{number} is no JSON")

        written = []
        for _ in range(2):
            run(Squares(), [spec()], output=tmp_path)
            for file in ("results.json", "samples-1.jsonl"):
                text = (tmp_path / file).read_text(encoding="utf-8")
                lines = [text] if file == "results.json" else text.split("\n")[:-1]
                written.append([json.loads(line, parse_constant=refuse) for line in lines])
        assert written[:2] == written[2:]
        means = [row["models"][0]["x"]["mean"] for row in written[0][0]["rows"]]
        assert means == [1.0, "inf", "-inf", "nan"]


class TestSampleStore:
    HEADER: ClassVar[dict[str, Any]] = {"probe": "squares", "settings": {"name": "größer", "lengths": (1, 2)}}

    def whole(self, file: Path) -> dict[str, Outcome]:
        """Return a store with two samples in a new or an existing file."""
        store = SampleStore(file, self.HEADER)
        for name in ("α", "\u2028γ"):
            if name not in store.outcomes:
                store.add(Outcome(name, [Measurement({"at": (1, 2)}, {"x": 1 / 3}, 0.1)], {"text": "日本\r\n"}))
        return store.outcomes

    def test_samples_truncated_at_any_byte_are_completed(self, tmp_path: Path) -> None:
        file = tmp_path / "samples.jsonl"
        outcomes = self.whole(file)
        content = file.read_bytes()
        ends = [at + 1 for at, byte in enumerate(content) if byte == 10]
        assert len(ends) == 3
        for cut in range(len(content) + 1):
            file.write_bytes(content[:cut])
            assert len(SampleStore(file, self.HEADER).outcomes) == max(0, sum(end <= cut for end in ends) - 1)
            assert self.whole(file) == outcomes
            assert file.read_bytes() == content

    def test_samples_are_read_as_they_were_measured(self, tmp_path: Path) -> None:
        measured = self.whole(tmp_path / "samples.jsonl")
        assert SampleStore(tmp_path / "samples.jsonl", self.HEADER).outcomes == measured
        assert measured["α"] == Outcome("α", [Measurement({"at": [1, 2]}, {"x": 1 / 3}, 0.1)], {"text": "日本\r\n"})


def test_averages_over_a_field_are_per_unit() -> None:
    conditions = [{"length": length, "depth": depth} for length in (1, 2) for depth in (0.0, 0.5)]
    outcomes = {
        f"{number} {text}": Outcome(f"{number} {text}", [Measurement(condition, {"x": number + 10.0 * (text == "b")})])
        for number, condition in enumerate(conditions)
        for text in "ab"
    }
    averages = averages_over("depth", outcomes, lambda name, outcome: name.split()[1])
    assert [(one.measurements[0].condition, one.measurements[0].values) for one in averages.values()] == [
        ({"length": 1}, {"x": 0.5}),
        ({"length": 1}, {"x": 10.5}),
        ({"length": 2}, {"x": 2.5}),
        ({"length": 2}, {"x": 12.5}),
    ]


def test_points_are_a_metric_of_rows_by_model() -> None:
    rows: list[Row] = [
        {"condition": {"at": at}, "models": [{"x": {"mean": at}}, {"x": {"mean": -at}}]} for at in (1, 2)
    ]
    report = Report(["a", "b"], rows, [], {})
    assert report.points("x") == {"a": [{"mean": 1}, {"mean": 2}], "b": [{"mean": -1}, {"mean": -2}]}
    assert report.points("x", rows[1:]) == {"a": [{"mean": 2}], "b": [{"mean": -2}]}


def test_rows_are_selected_by_their_cells() -> None:
    rows = [{"condition": {"length": 1, "depth": depth}} for depth in (0.0, 0.5)] + [{"condition": {"length": 2}}]
    report = Report(["a"], rows, [], {})
    assert report.select(length=1, depth=0.5) == [rows[1]]
    assert report.select(length=1) == rows[:2]
    assert report.select(depth=1) == []
