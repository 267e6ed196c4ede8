"""Charts and views: what a report shows is what was measured."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from tidelock_testbed.ledger import Ledger
from tidelock_testbed.svg import Marker, Series, line_chart
from tidelock_testbed.views import Views


def test_a_chart_is_well_formed_and_has_every_series():
    text = line_chart(
        "A & B", "time", "rows", [Series("x < y", [(0, 0), (1, 10)]), Series("one", [(0.5, 3)])], [Marker(1, "end")]
    )
    svg = ElementTree.fromstring(text)
    words = [node.text for node in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"A & B", "x < y", "one", "end"} <= set(words)


def test_a_chart_of_nothing_says_so():
    assert "nothing was measured" in line_chart("empty", "x", "y", [])


def test_the_secondary_has_the_rows_whose_writes_it_holds():
    views = Views()
    views.add(1.0, rows=0, pending=10, committed=0)
    views.add(2.0, rows=5, pending=30, committed=10)
    views.add(3.0, rows=9, pending=50, committed=29)
    views.add(4.0, rows=9, pending=50, committed=50)
    assert views.secondary_rows() == [0, 0, 0, 9]
    views.add(5.0, rows=12, pending=60, committed=55)
    assert views.secondary_rows()[-1] == 9


def test_the_views_chart_ends_at_the_disaster(tmp_path):
    views = Views()
    for second in range(10):
        views.add(float(second), second * 10, second * 100, second * 100)
    path = tmp_path / "ledger"
    path.write_text("".join(f"{n}.2 sent 1 {n}\n{n}.5 ok 1 {n}\n" for n in range(1, 9)))
    svg = views.chart("views", Ledger(path).follow(), disaster_at=7.0)
    ElementTree.fromstring(svg)
    assert "disaster" in svg
