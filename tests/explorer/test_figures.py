import json

import pytest
import torch


pytest.importorskip("plotly", reason="needs the extra `explore`")

from diffllama.explorer import figures
from diffllama.explorer.maps import HeadMaps


FIRST = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
SECOND = torch.tensor([[0.5, 0.0], [0.1, 0.4]])


def test_three_maps_have_one_scale_whose_middle_is_zero() -> None:
    drawn = figures.maps(HeadMaps(FIRST, SECOND, torch.tensor([0.5, 0.5])), ["a", "b"])
    assert [figure.data[0].z.tolist() for figure in drawn] == [
        values.tolist() for values in (FIRST, SECOND, FIRST - SECOND)
    ]
    assert {(figure.data[0].zmin, figure.data[0].zmax) for figure in drawn} == {(-1.0, 1.0)}
    titles = [figure.layout.title.text for figure in drawn]
    assert titles[0] == "first map A₁ (softmax)"
    assert titles[1].endswith("λ = 0.500")
    assert titles[2] == "difference A₁ − λ·A₂ (signed)"


def test_range_of_lambda_is_stated() -> None:
    drawn = figures.maps(HeadMaps(FIRST, SECOND, torch.tensor([0.25, 0.75])), ["a", "b"])
    assert drawn[1].layout.title.text.endswith("λ = 0.250 to 0.750")


def test_a_transformer_has_one_figure() -> None:
    (drawn,) = figures.maps(HeadMaps(FIRST, None, None), ["a", "b"])
    assert drawn.layout.title.text == "attention map A (softmax)"


def test_labels_are_unique_and_escaped() -> None:
    assert figures.labels(["a", "a", "<b>", "\n"]) == ["0 a", "1 a", "2 &lt;b&gt;", "3 ⏎"]
    assert "<img" not in figures.overview([[0.5]], "<img src=x>").layout.title.text


def test_bars_show_the_parts_of_every_model() -> None:
    shares = {"differential": [[0.5, 0.1], [-0.2, 0.3], [0.1, 0.2]], "llama": [[0.2], [0.3], [0.5]]}
    drawn = figures.bars(shares, "signed")
    assert [[list(trace.y) for trace in figure.data] for figure in drawn] == list(shares.values())
    assert [trace.name for trace in drawn[0].data] == ["answer", "noise", "other"]
    assert drawn[0].layout.yaxis.range == drawn[1].layout.yaxis.range
    assert drawn[0].layout.yaxis.range[0] < -0.2


def test_value_is_json_with_the_numbers() -> None:
    value = json.loads(figures.as_value([figures.overview([[0.25, 0.5]], "tiny")], "overview"))
    assert value["file"] == "overview"
    assert value["figures"][0]["data"][0]["z"] == [[0.25, 0.5]]
