"""What figures show, read back from matplotlib."""

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from diffllama.evaluation.figures import COLOURS, MARKERS, bars, finish, heat_map, lines, panels


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
    (band,) = axes.collections  # none where a point has no interval
    assert (band.get_datalim(axes.transData).ymin, band.get_datalim(axes.transData).ymax) == (2, 5)


def test_bars_stand_side_by_side_with_their_intervals() -> None:
    (axes,) = panels(Figure(), 1)
    bars(axes, {"one": [{"mean": 1, "low": 0.5, "high": 2}, {}], "two": [{"mean": 3}, {"mean": 4}]})
    one, two = axes.containers
    assert [bar.get_x() + bar.get_width() / 2 for bar in one] == pytest.approx([-0.2, 0.8])
    assert [bar.get_x() + bar.get_width() / 2 for bar in two] == pytest.approx([0.2, 1.2])
    assert [bar.get_width() for bar in (*one, *two)] == pytest.approx([0.4] * 4)
    assert one[0].get_height() == 1
    assert np.isnan(one[1].get_height())
    assert [bar.get_height() for bar in two] == [3, 4]
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


class TestHeatMap:
    VALUES = np.array([[0.0, 1.0], [np.nan, 4.0]])

    def test_cells_are_labelled_in_a_readable_colour(self) -> None:
        (axes,) = panels(Figure(), 1)
        picture = heat_map(axes, self.VALUES, ["1K", "2K"], ["top", "end"], show="{:.1f}".format)
        assert picture.get_clim() == (0, 4)
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1K", "2K"]
        assert [label.get_text() for label in axes.get_yticklabels()] == ["top", "end"]
        assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first row is at the top
        written = {text.get_position(): (text.get_text(), text.get_color()) for text in axes.texts}
        assert written == {(0, 0): ("0.0", "white"), (1, 0): ("1.0", "white"), (1, 1): ("4.0", "black")}
        for text in axes.texts:
            colour = picture.cmap(picture.norm(float(text.get_text())))
            assert (sum(colour[:3]) > 1.5) == (text.get_color() == "black")

    def test_signed_values_have_zero_in_the_middle(self) -> None:
        (axes,) = panels(Figure(), 1)
        picture = heat_map(axes, self.VALUES - 3, ["a", "b"], ["c", "d"], signed=True, show="{:.0f}".format)
        assert picture.get_clim() == (-3, 3)
        assert picture.cmap(picture.norm(0))[:3] == pytest.approx((0.97, 0.97, 0.97), abs=0.01)
        assert {text.get_text(): text.get_color() for text in axes.texts} == {
            "-3": "white",
            "-2": "white",
            "1": "black",
        }

    def test_limits_can_be_given(self) -> None:
        (axes,) = panels(Figure(), 1)
        assert heat_map(axes, self.VALUES, ["a", "b"], ["c", "d"], limits=(0, 10)).get_clim() == (0, 10)
        assert not axes.texts
