"""Content of figures, read back from matplotlib."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from diffllama.evaluation.figures import COLOURS, MARKERS, bars, finish, lines, panels


def test_lines_have_their_intervals_as_bands() -> None:
    (axes,) = panels(Figure(), 1)
    curves = {str(number): [{"mean": 0}, {"mean": number}] for number in range(9)}
    curves["1"] = [{"mean": 3, "low": 2, "high": 5}, {"mean": 4, "low": 4, "high": 4}]
    curves["8"] = [{"mean": 1}, {"mean": 2, "low": 0, "high": 3}]
    lines(axes, [1, 2], curves)
    first, last = axes.lines[1], axes.lines[8]
    assert (first.get_xdata().tolist(), first.get_ydata().tolist()) == ([1, 2], [3, 4])
    assert (first.get_color(), first.get_marker(), first.get_label()) == (COLOURS[1], MARKERS[1], "1")
    assert (last.get_color(), last.get_marker(), last.get_ydata().tolist()) == (COLOURS[1], MARKERS[1], [1, 2])
    assert [line.get_linewidth() for line in axes.lines] == sorted((4 / n for n in range(1, 10)), reverse=True)
    (band,) = axes.collections  # no band for a curve with a point without interval
    assert (band.get_datalim(axes.transData).ymin, band.get_datalim(axes.transData).ymax) == (2, 5)


def test_bars_stand_side_by_side_with_their_intervals() -> None:
    (axes,) = panels(Figure(), 1)
    points = {"one": [{"mean": 1, "low": 0.5, "high": 2}, {"mean": 2}], "two": [{"mean": 3}, {"mean": 4}]}
    bars(axes, ["a", "b"], points)
    one, two = axes.containers
    assert [bar.get_x() + bar.get_width() / 2 for bar in one] == pytest.approx([-0.2, 0.8])
    assert [bar.get_x() + bar.get_width() / 2 for bar in two] == pytest.approx([0.2, 1.2])
    assert [bar.get_width() for bar in (*one, *two)] == pytest.approx([0.4] * 4)
    assert [bar.get_height() for bar in (*one, *two)] == [1, 2, 3, 4]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b"]
    assert {to_hex(bar.get_facecolor()) for bar in two} == {COLOURS[1].lower()}
    (whisker,) = axes.lines
    assert (list(whisker.get_xdata()), list(whisker.get_ydata())) == ([pytest.approx(-0.2)] * 2, [0.5, 2])


def test_axes_are_labelled_and_have_a_legend_if_something_is_in_it() -> None:
    plain, labelled = panels(Figure(), 2)
    labelled.plot([1], [1], label="llama")
    finish(plain, "position (tokens)", "loss")
    finish(labelled, "x", "y", "a title")
    assert (plain.get_xlabel(), plain.get_ylabel(), plain.get_title()) == ("position (tokens)", "loss", "")
    assert plain.get_legend() is None
    assert labelled.get_title() == "a title"
    assert [text.get_text() for text in labelled.get_legend().get_texts()] == ["llama"]
