"""Charts as figures of matplotlib show what the report's pictures show."""

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot

from reports.charts.drawing import Canvas, Chart
from reports.charts.figure import figure_of

mpl.use("agg")


def pixels(canvas):
    figure = figure_of(Chart(canvas, "Title?", "", []))
    figure.canvas.draw()
    shown = np.asarray(figure.canvas.buffer_rgba())[..., :3]
    pyplot.close(figure)
    return shown


def colour_at(shown, canvas, axes, x, y):
    """Return the colour where the picture has a point of the data."""
    right, down = canvas.place(axes, x, y)
    return "#" + bytes(shown[round(down + 28), round(right)]).hex()


def test_marks_are_at_the_same_places_in_the_same_layers():
    canvas = Canvas(100)
    axes = canvas.axes(100, 20, 200, 60)
    axes.x.low, axes.x.high, axes.y.low, axes.y.high = 0, 10, 0, 4
    axes.band(0, 4, "#c9c9c9", is_behind=True)
    axes.map(np.array([[5.0, np.nan]]), 5.0, (0, 4, 0, 4))
    axes.bar(6, 0, 2, 4, "#0000ff")
    axes.fill([6, 10], 0, [2, 2], "#00ff00")
    axes.plot([0, 10], [3, 3], colour="#ff0000", width=4)
    shown = pixels(canvas)
    at = {
        place: colour_at(shown, canvas, axes, *place)
        for place in [(1, 1), (3, 1), (5, 1), (7, 1), (7, 3.6), (9, 1), (7, 3)]
    }
    assert at == {
        (1, 1): "#fde724", (3, 1): "#c9c9c9", (5, 1): "#c9c9c9", (7, 1): "#00ff00", (7, 3.6): "#0000ff", (9, 1): "#00ff00",
        (7, 3): "#ff0000",
    }  # fmt: skip


def test_logarithmic_and_turned_scales_are_those_of_the_picture():
    canvas = Canvas(100)
    axes = canvas.axes(50, 20, 300, 60)
    axes.x.low, axes.x.high, axes.x.is_log = 100, 0.1, True
    axes.y.high = 1
    axes.plot([10, 10], [0, 1], colour="#ff0000", width=4)
    shown = pixels(canvas)
    assert colour_at(shown, canvas, axes, 10, 0.5) == "#ff0000"
    assert colour_at(shown, canvas, axes, 1, 0.5) == "#ffffff"
