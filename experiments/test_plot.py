"""The figure of any runs: what is drawn of a log, and what is said where there is none."""

import os
import re
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from experiments import plot  # noqa: E402
from experiments.test_study import row, write  # noqa: E402

NESTED = [row(val=5), row("coarse1", 2, 10, val=4), row("coarse1", 4, 20, val=3),
          row("prolong1", 4, 20, val=3.5), row(step=1, flops=30, train_loss=3.0),
          row("coarse2", 2, 35, train_loss=3.0), row("prolong2", 2, 35, val=2.5),
          row("coarse3", 4, 40, train_loss=3.0), row("prolong3", 4, 40, val=2.4),
          row(step=4, flops=60, val=2)]


@pytest.fixture
def ax():
    pytest.importorskip("matplotlib")
    return plot.pyplot().subplots()[1]


def lines(ax):
    return [([float(x) for x in line.get_xdata()], [float(y) for y in line.get_ydata()],
             line.get_linestyle(), line.get_marker()) for line in ax.lines]


def test_start_growth_and_cycles(ax):
    assert plot.draw(ax, NESTED, color="C1") == ([20, 35, 40, 60], [3.5, 2.5, 2.4, 2])
    assert lines(ax) == [([0, 10, 20, 20], [5, 4, 3, 3.5], "--", "None"),
                         ([20], [3.5], "None", "o"),
                         ([20, 35, 40, 60], [3.5, 2.5, 2.4, 2], "-", "None"),
                         ([35, 40], [0.02, 0.02], "None", "|")]
    assert {line.get_color() for line in ax.lines} == {"C1"}


def test_a_run_in_its_start_and_one_without_levels(ax):
    plot.draw(ax, NESTED[:2])
    assert lines(ax)[0][:3] == ([0, 10], [5, 4], "--") and lines(ax)[1][:2] == ([], [])
    single = [row(val=5), row(step=4, flops=8, val=2)]
    assert plot.draw(ax, single) == ([0, 8], [5, 2])
    assert plot.draw(ax, NESTED[6:], "step") == ([4], [2])


def test_command(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    for name in ("a/run", "b/run", "b/other"):
        write(tmp_path / name, NESTED)
    folders, out = [str(tmp_path / name) for name in ("a/run", "b/run/", "b/other")], tmp_path / "x"
    for kind in ("svg", "png"):
        plot.main([*folders, "-o", f"{out}.{kind}"])
        assert os.path.getsize(f"{out}.{kind}") > 1000
    text = (tmp_path / "x.svg").read_text()
    plot.main([*folders, "-o", str(tmp_path / "y.svg")])
    assert text == (tmp_path / "y.svg").read_text()
    assert all(f"<!-- {label} -->" in text for label in
               (*(f[:-1] if f.endswith("/") else f for f in folders[:2]), "other",
                "training FLOPs", "seconds of training"))
    empty, damaged = tmp_path / "empty", tmp_path / "damaged"
    write(empty, [])
    write(damaged, NESTED)
    (damaged / "log.csv").write_text("hello\n1\n")
    for arguments, message in (
            ([str(tmp_path)], "is no run (no log.csv)"), ([str(empty)], "has no evaluation yet"),
            ([str(damaged)], "is no log of train.py"), ([str(tmp_path / "none")], "is no run"),
            ([folders[0], "-o", str(tmp_path / "x.abc")], "cannot write"),
            ([folders[0], "-o", str(tmp_path / "no" / "x.svg")], "cannot write")):
        with pytest.raises(SystemExit, match=re.escape(message)) as e:
            plot.main(arguments)
        assert str(e.value).startswith("error: ") and "\n" not in str(e.value)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        plot.main([folders[0]])
