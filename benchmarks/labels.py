"""Labels of the points of a picture, placed where they cover no other label and no point."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

_POINT = 5  # pixels around a point that a label leaves free
_PLACES = [
    (distance * right, distance * up, horizontal, vertical)
    for distance in (4, 10, 18, 28)
    for right, horizontal in ((1, "left"), (-1, "right"), (0, "center"))
    for up, vertical in ((1, "bottom"), (-1, "top"), (0, "center"))
    if right or up
]


def place_labels(panel: Axes, labels: Sequence[tuple[str, float, float]], fontsize: float = 8) -> None:
    """Write each label beside its point, with a line to the point where the nearest places are taken.

    Args:
        panel: that holds the points, with its scales and limits set; its figure has an Agg canvas.
        labels: of each point the text, x and y, in units of the axes; places go to the first ones first.
        fontsize: in points.
    """
    figure = panel.figure
    figure.draw_without_rendering()  # fixes the axes within the figure
    renderer = figure.canvas.get_renderer()
    legend = panel.get_legend()
    taken = [legend.get_window_extent(renderer)] if legend else []
    for _, x, y in labels:
        right, up = panel.transData.transform((x, y))
        taken.append(Bbox.from_extents(right - _POINT, up - _POINT, right + _POINT, up + _POINT))
    for text, x, y in labels:
        note = panel.annotate(text, (x, y), (0, 0), textcoords="offset points", fontsize=fontsize)
        note.set_in_layout(False)
        costs = []
        for place in _PLACES:
            _move(note, place)
            box = note.get_window_extent(renderer)
            costs.append(sum(_overlap(box, other) for other in taken) + 2 * (_area(box) - _overlap(box, panel.bbox)))
        best = _PLACES[costs.index(min(costs))]
        _move(note, best)
        taken.append(note.get_window_extent(renderer))
        if max(map(abs, best[:2])) > _PLACES[0][0]:
            panel.annotate("", (x, y), best[:2], textcoords="offset points", arrowprops={"arrowstyle": "-", "lw": 0.5})


def _move(note, place) -> None:
    right, up, horizontal, vertical = place
    note.set(position=(right, up), horizontalalignment=horizontal, verticalalignment=vertical)


def _area(box: Bbox) -> float:
    return box.width * box.height


def _overlap(one: Bbox, other: Bbox) -> float:
    both = Bbox.intersection(one, other)
    return _area(both) if both else 0.0
