import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import matplotlib
import numpy as np
import pytest
from mlsys_core import plot
from mlsys_core.errors import InvalidInputError
from mlsys_core.workload import LatencySummary, LoadPoint


def point(offered, throughput, latency_s, *, tokens=10, closed=False):
    latency = LatencySummary.of([latency_s, 2 * latency_s])
    return LoadPoint(
        offered_rps=None if closed else offered,
        throughput_rps=throughput,
        latency=latency,
        normalized_latency=LatencySummary.of([latency_s / tokens]) if tokens else None,
    )


SYSTEMS = {
    "orca": [point(4.0, 4.0, 0.2), point(1.0, 1.0, 0.1), point(8.0, 5.0, 0.9)],
    "ft": [point(1.0, 1.0, 0.1), point(4.0, 2.0, 0.8)],
}
FIGURES = {
    "latency_vs_load": lambda: plot.latency_vs_load(SYSTEMS, title="Load"),
    "cdf": lambda: plot.cdf({"orca": [0.3, 0.1, 0.2], "ft": [0.5]}),
}


@pytest.fixture(params=FIGURES)
def figure(request):
    return FIGURES[request.param]()


def legend_of(figure):
    legend = figure.axes[0].get_legend() or figure.legends[0]
    return [text.get_text() for text in legend.get_texts()]


def test_axes_have_labels_with_units_and_figures_have_legends(figure):
    (axes,) = figure.axes
    assert legend_of(figure)
    labels = [label for label in (axes.get_xlabel(), axes.get_ylabel()) if label]
    assert labels
    for label in labels:
        assert "(" in label or label in ("tokens", "share of samples")


def test_svg_is_one_element_to_embed(figure):
    text = plot.to_svg(figure)
    assert text.startswith("<svg")
    root = ET.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = "".join(root.itertext())
    for name in legend_of(figure):
        assert name in words  # text stays text
    assert "dc:date" not in text


def test_figures_touch_no_global_state(figure, tmp_path):
    before = dict(matplotlib.rcParams)
    plot.save(figure, tmp_path / "out.png")
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_figures_do_not_depend_on_the_users_style():
    expected = plot.to_svg(FIGURES["latency_vs_load"]())
    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": "other", "axes.facecolor": "black"}):
        assert plot.to_svg(FIGURES["latency_vs_load"]()) == expected


def test_equal_data_give_equal_bytes_in_another_process():
    code = (
        "from mlsys_core import plot; import hashlib, sys\n"
        "text = plot.to_svg(plot.cdf({'orca': [0.3, 0.1, 0.2], 'ft': [0.5]}))\n"
        "sys.stdout.write(hashlib.sha256(text.encode()).hexdigest() + ' ' + str('matplotlib.pyplot' in sys.modules))"
    )
    runs = [
        subprocess.check_output([sys.executable, "-c", code], text=True, env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert runs[0].endswith(" False")


@pytest.mark.parametrize(("suffix", "magic"), [(".svg", b"<?xml"), (".PNG", b"\x89PNG"), (".pdf", b"%PDF")])
def test_save_writes_each_format_twice_alike(tmp_path, suffix, magic):
    for name in ("a", "b"):
        plot.save(FIGURES["cdf"](), tmp_path / f"{name}{suffix}")
    first, second = ((tmp_path / f"{name}{suffix}").read_bytes() for name in "ab")
    assert first.startswith(magic)
    assert first == second


def test_save_refuses_other_formats_and_missing_folders(tmp_path):
    with pytest.raises(InvalidInputError, match=r"end the name in \.svg, \.png, \.pdf"):
        plot.save(FIGURES["cdf"](), tmp_path / "out.gif")
    with pytest.raises(InvalidInputError, match="cannot be written"):
        plot.save(FIGURES["cdf"](), tmp_path / "nowhere" / "out.svg")


def test_latency_vs_load_draws_p90_in_order_of_load():
    axes = FIGURES["latency_vs_load"]().axes[0]
    line = axes.containers[0].lines[0]
    assert line.get_xdata().tolist() == [1.0, 4.0, 8.0]
    assert line.get_ydata() == pytest.approx([190.0, 380.0, 1710.0])  # p90 of (x, 2x), in ms
    assert legend_of(axes.figure) == ["orca", "ft"]
    (bars,) = axes.containers[0].lines[2]
    low, high = bars.get_segments()[0][:, 1]
    assert (low, high) == pytest.approx((150.0, 199.0))  # p50 to p99


def test_in_a_closed_loop_throughput_stands_for_load():
    axes = plot.latency_vs_load({"a": [point(9.0, 3.0, 0.1, closed=True)]}).axes[0]
    assert axes.containers[0].lines[0].get_xdata().tolist() == [3.0]


def test_cdf_reaches_one_at_the_largest_sample():
    line = FIGURES["cdf"]().axes[0].lines[0]
    x, y = (np.asarray(data) for data in (line.get_xdata(), line.get_ydata()))
    assert x[-1] == pytest.approx(300.0)
    assert y[-1] == 1.0
    assert y[np.searchsorted(x, 200.0, side="right") - 1] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot.latency_vs_load({}), "nothing to plot"),
        (lambda: plot.latency_vs_load({"a": []}), "nothing to plot"),
        (lambda: plot.cdf({"a": []}), "nothing to plot"),
        (lambda: plot.cdf({"a": [float("nan")]}), "'a' must be finite"),
    ],
)
def test_bad_data_are_refused(draw, message):
    with pytest.raises(InvalidInputError, match=message):
        draw()
