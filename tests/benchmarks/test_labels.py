"""Labels of the points of a picture."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.labels import place_labels


@pytest.mark.parametrize("gap", [0.5, 0.02, 0.0])
def test_place_labels_writes_each_label_once_where_it_covers_no_other(gap):
    figure = Figure(figsize=(5, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    panel.set(xlim=(0, 1), ylim=(0, 1))
    points = [(f"label {index}", 0.5 + gap * index, 0.5) for index in range(4) if 0.5 + gap * index <= 1]
    place_labels(panel, points)
    notes = [text for text in panel.texts if text.get_text()]
    assert [(note.get_text(), *note.xy) for note in notes] == points
    boxes = [note.get_window_extent() for note in notes]
    assert not any(one.overlaps(other) for index, one in enumerate(boxes) for other in boxes[:index])
    assert all(panel.bbox.x0 <= box.x0 and box.x1 <= panel.bbox.x1 for box in boxes)
