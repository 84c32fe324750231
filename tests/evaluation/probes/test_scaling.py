"""The probe of scaling: laws with powers of two, and invalid data."""

import json
import math
from pathlib import Path

import pytest

from diffllama.evaluation.probes.scaling import PowerLaw, Scaling
from diffllama.evaluation.runs import Report
from support.probe_runs import run_probe


def measured(folder: Path, *rows: str) -> Report:
    """Run the probe on a file with these losses."""
    file = folder / "losses.csv"
    file.write_text("\n".join(("architecture,parameters,tokens,loss", *rows)) + "\n")
    return run_probe(Scaling(), output=folder / "out", data=file)


def shares(report: Report, over: str = "parameters") -> dict[float, dict[str, float]]:
    """Return the report's rows by size of the DIFF Transformer."""
    rows = [row for row in report.select(over=over) if "diff" in row["condition"]]
    return {row["condition"]["diff"]: row["models"][0]["share"] for row in rows}


TRANSFORMER = ("transformer,1,,9", "transformer,4,,5", "transformer,16,,3", "transformer,100,,1.8")  # 8·x^-1/2 + 1
DIFF = ("diff,1,,5", "diff,4,,3", "diff,16,,2", "diff,64,,1.5", "diff,400,,1.2")  # 4·x^-1/2 + 1: a quarter suffices


def test_power_law_fit_and_inverse_are_exact() -> None:
    law = PowerLaw.fit([(4, 5), (16, 3), (64, 2), (256, 1.5)], irreducible=True)
    assert (law.a, law.b, law.c) == pytest.approx((8, 0.5, 1))
    assert (law(1024), law.inverse(1.125)) == pytest.approx((1.25, 4096))
    assert law.inverse(1 - 1e-6) == math.inf
    law = PowerLaw.fit([(4, 4), (16, 2), (64, 1)], irreducible=False)
    assert (law.a, law.b, law.c) == pytest.approx((8, 0.5, 0))


def test_diff_with_a_quarter_of_the_parameters_has_share_one_quarter(tmp_path: Path) -> None:
    report = measured(tmp_path, *reversed(TRANSFORMER + DIFF))
    for name, a in (("transformer", 8), ("diff", 4)):
        (row,) = report.select(law=name)
        assert row["samples"] == 9
        assert [row["models"][0][part]["mean"] for part in "abc"] == pytest.approx([a, 0.5, 1])
        assert row["models"][0]["rms_error"]["mean"] == pytest.approx(0, abs=1e-6)
    for size, loss in ((1, 5), (4, 3), (16, 2), (64, 1.5), (400, 1.2)):
        (row,) = report.select(diff=size)
        assert row["condition"]["range"] == ("extrapolated" if 4 * size > 100 else "measured")
        numbers = {name: values["mean"] for name, values in row["models"][0].items()}
        assert numbers == pytest.approx({"loss": loss, "transformer": 4 * size, "share": 0.25}, rel=1e-5)


def test_range_is_of_the_fits_without_a_point(tmp_path: Path) -> None:
    rows = ("transformer,4,,4", "transformer,16,,2", "transformer,64,,1", "diff,4,,2", "diff,16,,1", "diff,64,,1")
    report = measured(tmp_path, *rows)
    assert [row["models"][0]["c"]["mean"] for row in report.rows[:2]] == [0, 0]
    # The Transformer's law is 8·x^-1/2. The log-linear fit of DIFF at 16 is 2^(1/3); without 4 or 64 it is 1, without
    # 16 it is 2^(1/2).
    (row,) = report.select(diff=16)
    assert row["models"][0]["loss"] == pytest.approx({"mean": 2 ** (1 / 3), "low": 1, "high": 2**0.5})
    assert row["models"][0]["share"] == pytest.approx({"mean": 2 ** (-4 / 3), "low": 0.25, "high": 0.5})


def test_loss_below_the_transformers_limit_has_share_zero(tmp_path: Path) -> None:
    rows = (row.replace("1.2", "0.1").replace("1.5", "0.5") for row in DIFF)
    report = measured(tmp_path, *TRANSFORMER, *rows)
    (row,) = report.select(diff=400)
    assert (row["models"][0]["transformer"]["mean"], row["models"][0]["share"]["mean"]) == (math.inf, 0)
    assert row["condition"]["range"] == "extrapolated"
    assert json.loads((tmp_path / "out" / "results.json").read_text())["rows"] != []


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_same_tokens_or_the_same_parameters_make_a_curve(kind: str, tmp_path: Path) -> None:
    rows = [*(row.replace(",,", ",9,") for row in TRANSFORMER + DIFF), "transformer,64,10,1.9"]
    for row in TRANSFORMER + DIFF:
        name, size, _, loss = row.split(",")
        rows.append(f"{name},32,{size},{loss}")
    if kind == "jsonl":
        fields = ("architecture", "parameters", "tokens", "loss")
        lines = [json.dumps(dict(zip(fields, row.split(","), strict=True))) for row in rows]
        (tmp_path / "losses.jsonl").write_text("\n".join(lines))
        report = run_probe(Scaling(), output=tmp_path / "out", data=tmp_path)
    else:
        report = measured(tmp_path, *rows)
    assert [row["condition"] for row in report.select(law="diff")] == [
        {"over": "parameters", "tokens": 9, "law": "diff"},
        {"over": "tokens", "parameters": 32, "law": "diff"},
    ]
    for over in ("parameters", "tokens"):
        assert [share["mean"] for share in shares(report, over).values()] == pytest.approx([0.25] * 5)


def test_built_in_sample_has_the_shares_of_which_it_was_made(tmp_path: Path) -> None:
    report = run_probe(Scaling(), output=tmp_path)
    for over, share in (("parameters", 0.625), ("tokens", 0.64)):
        for found in shares(report, over).values():
            assert found["mean"] == pytest.approx(share, abs=1e-3)
            assert found["low"] <= found["mean"] <= found["high"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (TRANSFORMER, "has no curve. It needs, for both `transformer` and `diff`, 3 or more"),
        ((*TRANSFORMER[:2], *DIFF), "has no curve"),
        ((*TRANSFORMER[:2], TRANSFORMER[0], *DIFF), "has no curve"),
        ((*TRANSFORMER, "llama,4,,5"), "`architecture` must be transformer or diff, got 'llama'"),
        ((*TRANSFORMER, "diff,,,5"), "neither `parameters` nor `tokens`"),
        ((*TRANSFORMER, "diff,4,,high"), "`loss` must be a positive number, got 'high'"),
        ((*TRANSFORMER, "diff,4,,-1"), "`loss` must be a positive number, got '-1'"),
        ((*TRANSFORMER, "diff,4,,nan"), "`loss` must be a positive number, got 'nan'"),
        ((*TRANSFORMER, "diff,0,,5"), "`parameters` must be a positive number, got '0'"),
        ((*TRANSFORMER, "diff,4,many,5"), "`tokens` must be a positive number, got 'many'"),
        ((*TRANSFORMER, "diff,1,,5", "diff,4,,5", "diff,16,,5"), "must have losses of diff that fall with parameters"),
    ],
)
def test_malformed_losses_are_refused(rows: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"losses\.csv .*{message}"):
        measured(tmp_path, *rows)
    assert not (tmp_path / "out" / "results.json").exists()


def test_folder_without_losses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no losses\.csv or losses\.jsonl"):
        run_probe(Scaling(), output=tmp_path / "out", data=tmp_path)
