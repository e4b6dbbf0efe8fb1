"""The lab's renderings: each shows the record's own numbers, fits its place and cannot be turned against a reader."""

from __future__ import annotations

import copy
import io
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from attemper import lab
from attemper._errors import OptionError
from attemper.lab import Estimate, Evidence, Panel, Result, Series, Table, Verdict
from attemper.lab._result import OUTCOMES, SCHEMA
from attemper.lab.variance import Config
from attemper.report import (
    _html,
    _lab_figure,
    _lab_html,
    _lab_view,
    lab_figure,
    lab_html,
    lab_markdown,
    lab_png,
    lab_rich,
    lab_summary,
    lab_svg,
    lab_text,
)

HOSTILE = "</script><script>alert(1)</script>\"'&<b>`|\u2028\x1b[31mred 模型 \u202e$x$\n# head"
WIDTHS = [4, 16, 64, 256]


def series(name: str, y: list[float], x: list | None = None) -> Series:
    x = WIDTHS if x is None else x
    return Series(name=name, x=tuple(x), y=tuple(y), low=tuple(v * 0.9 for v in y), high=tuple(v * 1.1 for v in y))


def panels() -> tuple[Panel, ...]:
    labels = {"x_label": "d_k (components)", "y_label": "entropy (nats)"}
    eight = tuple(series(f"rule {i}", [i + 1.0, i + 2, i + 3, i + 4]) for i in range(8))
    return (
        Panel(
            title="Eight rules can be told apart", series=eight, x_scale="log2", references=(("chance", 2.0),), **labels
        ),
        Panel(
            title="Many decades", series=(series("a", [1e-9, 1e-3, 1, 1e5]),), x_scale="log2", y_scale="log10", **labels
        ),
        Panel(title="Both signs", series=(series("a", [-100, -1, 0, 1e4]),), y_scale="symlog", kind="points", **labels),
        Panel(
            title="Bars",
            kind="bar",
            series=tuple(series(n, [1.0, 2.0], ["dot product", "additive scores of Bahdanau"]) for n in ("a", "b")),
            references=(("budget", 1.5),),
            **labels,
        ),
        Panel(
            title="A long run",
            series=(series("loss", [4 * math.exp(-t / 30) + 1 for t in range(200)], list(range(200))),),
            **labels,
        ),
    )


def result(question: str = "variance", **changes) -> Result:
    """A small Result with every kind of part in it."""
    verdicts = tuple(
        Verdict(
            claim=claim,
            outcome=outcome,
            expected=f"expected of {outcome}",
            measured=f"measured 0.5 ± 0.1 for {outcome}",
            reason=f"Reason of {outcome}.",
            evidence=(Evidence("ratio", Estimate(1.01, 0.99, 1.03, 400), 0.95, 1.05),),
        )
        for claim, outcome in zip((1, 2, 5, None), OUTCOMES, strict=True)
    )
    table = Table(
        title="Numbers",
        columns=("d_k", "rule", "variance of q·k", "exact", "how", "nothing"),
        rows=tuple((d, "√d_k", Estimate(d, d * 0.99, d * 1.01, 99), 0.25, "in words", None) for d in WIDTHS),
        note="A note.",
    )
    given = {
        "config": Config(d_k=(4, 16)),
        "summary": "What was found.",
        "verdicts": verdicts,
        "tables": (table,),
        "panels": panels(),
        "clock": (Table(title="Seconds", columns=("d_k", "ms"), rows=((4, 1.25),)),),
        **changes,
    }
    return Result(question=question, **given)


RECORD = result().to_dict()


def hostile() -> dict:
    """The record with every string in it replaced."""

    def spoil(value):
        if isinstance(value, dict):
            kept = ("schema", "question", "kind", "x_scale", "y_scale", "outcome")
            return {key: part if key in kept else spoil(part) for key, part in value.items()}
        if isinstance(value, list):
            return [spoil(part) for part in value]
        return HOSTILE if isinstance(value, str) and value not in ("inf", "-inf", "nan") else value

    return spoil(copy.deepcopy(RECORD))


def page(records=None, **options) -> str:
    questions = [{"name": q.name, "claims": q.claims} for q in lab.QUESTIONS.values()]
    return lab_html(
        [RECORD] if records is None else records, **{"claims": lab.CLAIMS, "questions": questions, **options}
    )


class Checker(HTMLParser):
    """Ids, links and the text of a page, and whether every tag is closed."""

    VOID = ("meta", "link", "br", "path", "use", "circle")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.links, self.open, self.styles, self.handlers = [], [], [], [], []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            elif name == "href":
                self.links.append(value)
            elif name == "style":
                self.styles.append(value)
            elif name.startswith("on"):
                self.handlers.append(name)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))


def test_the_schema_is_that_of_result():
    assert _lab_view.SCHEMA == SCHEMA
    assert set(_lab_view.OUTCOMES) == set(OUTCOMES)


@pytest.mark.parametrize(
    "render", [lab_figure, lab_svg, lab_png, lab_text, lab_rich, lab_markdown, lambda r: lab_html([r])]
)
def test_another_schema_is_refused(render):
    with pytest.raises(OptionError, match="schema is 'other/1'"):
        render({**RECORD, "schema": "other/1"})


# Figures


def test_drawing_changes_no_setting_of_matplotlib(tmp_path):
    (tmp_path / "record.json").write_text(json.dumps(RECORD))
    code = """
import json, matplotlib, sys
before = matplotlib.rcParams.copy()
from attemper.report import lab_figure, lab_svg
record = json.load(open("record.json"))
lab_svg(record), lab_figure(record)
assert matplotlib.rcParams.copy() == before
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_renderings_without_a_figure_do_not_import_matplotlib():
    code = """
import sys
from attemper import lab
print(lab.run("variance", d_k=(1, 4), relative=0.2))
assert not {"matplotlib", "torch", "rich"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_figures_show_every_panel():
    drawn = lab_figure(RECORD)
    axes = [part.axes[0] for part in drawn.subfigs[: len(RECORD["panels"])]]
    assert [part._suptitle.get_text() for part in drawn.subfigs[:5]] == [panel["title"] for panel in RECORD["panels"]]
    assert len(axes[0].lines) >= 8
    styles = {(str(line.get_linestyle()), line.get_marker(), line.get_color()) for line in axes[0].lines[:24]}
    assert len(styles) >= 8
    assert axes[0].get_xscale() == "log"
    assert [t.get_text() for t in axes[0].get_xticklabels()] == ["4", "16", "64", "256"]


def test_a_legend_names_each_series_in_order():
    drawn = lab_figure({**RECORD, "panels": [RECORD["panels"][3]]})
    legend = drawn.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "budget"]
    kinds = [type(handle).__name__ for handle in legend.legend_handles]
    assert kinds == ["Rectangle", "Rectangle", "Line2D"]


@pytest.mark.parametrize(("scale", "y"), [("linear", (0.25, 1.887)), ("log2", (0.25, 1.82)), ("log10", (0.025, 1.64))])
def test_the_name_of_an_axis_is_clear_of_its_numbers(scale, y):
    """Also where the axis ends at a number: other fonts, as a browser has, are larger than those of a draft."""
    line = Series(name="one", x=(1, 2), y=y)
    panel = Panel(title="P", x_label="x", y_label="height", series=(line,), y_scale=scale)
    figure = lab_figure(result(panels=(panel,)).to_dict())
    figure.canvas.draw()
    (axes,) = figure.axes
    low, high = axes.get_ylim()
    numbers = [t for t in axes.get_yticklabels() if t.get_text() and low <= t.get_position()[1] <= high]
    highest = max(one.get_window_extent().y1 for one in numbers)
    assert axes.yaxis.label.get_window_extent().y0 - highest > 5


def test_svg_is_the_same_every_time():
    assert lab_svg(RECORD) == lab_svg(copy.deepcopy(RECORD))


def test_svg_follows_the_page_and_asks_for_nothing():
    text = lab_svg(RECORD)
    root = ET.fromstring(text)
    assert root.get("role") == "img"
    assert "Eight rules can be told apart" in root.get("aria-label")
    assert "currentColor" in text
    assert _lab_figure.INK not in text
    assert "<text" in text
    assert not re.search(r"style|DOCTYPE|metadata|<\?xml|xlink", text)
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    ids = [node.get("id") for node in root.iter() if node.get("id")]
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r'(?:url\(|href=")#([\w-]+)', text))
    assert wanted == set(ids)
    assert all(name.startswith("variance-") for name in ids)


def test_filled_markers_are_filled():
    text = lab_svg(RECORD, panel=0)
    assert re.search(r'<use [^>]*fill="#0072b2"', text)
    marker = re.search(r'<path [^>]*id="([\w-]+)"[^>]*stroke="#0072b2"[^>]*>', text)
    assert marker
    assert 'fill="none"' not in marker[0]


def test_indices_are_lowered():
    assert re.search(
        r'>d<tspan dy="[\d.]+" font-size="[\d.]+">k</tspan><tspan dy="-[\d.]+"> \(components\)', lab_svg(RECORD)
    )


def test_one_panel_alone():
    text = lab_svg(RECORD, panel=1, prefix="x")
    assert "Many decades" in text
    assert "Both signs" not in text
    assert 'id="x-0"' in text


@pytest.mark.parametrize("scale", ["linear", "log2", "log10", "symlog"])
@pytest.mark.parametrize("kind", ["line", "points", "bar"])
@pytest.mark.parametrize("y", [[0.0], [1.0], [-1.0, 2.0], [math.nan, math.inf], [1e-12, 1e12], [5.0, 5.0]])
def test_any_numbers_can_be_drawn(scale, kind, y):
    x = [f"w{i}" for i in range(len(y))] if kind == "bar" else list(range(1, len(y) + 1))
    panel = Panel(
        title="t",
        x_label="x",
        y_label="y",
        kind=kind,
        y_scale=scale,
        series=(Series(name="s", x=tuple(x), y=tuple(y)),),
    )
    record = result(panels=(panel,)).to_dict()
    lab_svg(record)
    assert lab_text(record)


def test_an_interval_of_one_sample_is_open():
    one = Series(name="s", x=(1.0, 2.0), y=(1.0, 2.0), low=(-math.inf, 1.5), high=(math.inf, 2.5))
    record = result(panels=(Panel(title="t", x_label="x", y_label="y", series=(one,)),)).to_dict()
    assert lab_svg(record)
    assert lab_png(record).startswith(b"\x89PNG")


def test_without_panels_and_verdicts():
    bare = result(panels=(), verdicts=(), tables=(), clock=()).to_dict()
    assert "What was found." in lab_text(bare)
    assert "What was found." in lab_html([bare])
    assert lab_svg(bare)


def test_without_matplotlib(monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else real(name, *rest)
    )
    with pytest.raises(OptionError, match=r"Figures need matplotlib.*\n.*pip install 'attemper\[lab\]'"):
        lab_svg(RECORD)


# Terminal


def rich_text(record: dict, width: int, **options) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, **options)
    console.print(lab_rich(record, result().clock_tables()))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [30, 40, 57, 80, 120, 200])
@pytest.mark.parametrize("record", [RECORD, hostile()], ids=["plain", "hostile"])
def test_the_terminal_fits(width, record):
    from rich.cells import cell_len

    text = lab_text(record, width, result().clock_tables())
    assert max(map(cell_len, text.splitlines())) <= width
    assert [line.rstrip() for line in rich_text(record, width).splitlines()] == text.splitlines()


def test_the_terminal_shows_everything():
    text = lab_text(RECORD, 100, result().clock_tables())
    for mark, outcome in (("✓", "holds"), ("✗", "does not hold"), ("◐", "holds only if"), ("?", "not decided")):
        assert f"{mark} {outcome}" in text
        for part in (f"expected of {outcome}", f"measured 0.5 ± 0.1 for {outcome}", f"Reason of {outcome}."):
            assert part in text
    for part in ("Dot products grow", lab.CLAIMS[2], "What was found.", "A note.", "Seconds", "Eight rules", "seed 0"):
        assert part in text, part
    assert "  attemper lab variance --d-k 4 16\n" in text
    assert 'result = lab.run("variance", d_k=(4, 16))' in text


def test_errors_stand_one_under_the_other():
    lines = [
        line for line in lab_text(RECORD, 100).splitlines() if "√d_k" in line and "±" in line and "in words" in line
    ]
    assert len(lines) == 4
    assert len({line.index("±") for line in lines}) == 1
    assert "256.0 ± 2.6" in lines[-1]


def test_sparklines_share_a_scale():
    text = lab_text(RECORD, 100)
    first = re.search(r"^rule 0 +(.*?)  ", text, re.MULTILINE)[1].split()
    last = re.search(r"^rule 7 +(.*?)  ", text, re.MULTILINE)[1].split()
    assert [part[0] for part in first] == sorted(part[0] for part in first)
    assert first[0][0] == "▁"
    assert last[-1][0] == "█"
    assert re.search(r"^ +4 +16 +64 +256$", text, re.MULTILINE)


def test_long_tables_are_cut_and_say_so():
    table = Table(title="Long", columns=("n",), rows=tuple((i,) for i in range(100)))
    assert "… and 60 rows more" in lab_text(result(tables=(table,)).to_dict())


def test_a_folded_command_is_still_one():
    knobs = {"d_k": tuple(range(1, 40)), "relative": 0.5, "tolerance": 0.25, "correlation": 0.125, "mean": 0.0625}
    text = lab_text(result(config=Config(**knobs)).to_dict(), 60)
    told = text[text.index("Ask it again") :].splitlines()
    at = next(i for i, line in enumerate(told) if not line.strip() and i > 1)
    command = " ".join(line.strip().removesuffix("\\").strip() for line in told[1:at])
    assert command == result(config=Config(**knobs)).to_dict()["command"]


def test_names_cannot_steer_the_terminal():
    for text in (lab_text(hostile()), rich_text(hostile(), 80), lab_markdown(hostile()).split("## Ask")[0]):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e\u2028]", text)


def test_the_summary_of_claims():
    text = str(lab_summary(lab.CLAIMS, [RECORD]))
    assert re.search(r"^✓  1  holds ", text, re.MULTILINE)
    assert re.search(r"^– 25  not run ", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 80


def test_colours_only_where_rich_has_them(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = rich_text(RECORD, 80, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in coloured
    assert "\x1b[" not in rich_text(RECORD, 80, force_terminal=False)


# Markdown


def test_markdown_has_one_heading_and_every_verdict():
    text = lab_markdown(RECORD, result().clock_tables())
    assert text.count("\n# ") + text.startswith("# ") == 1
    for outcome in OUTCOMES:
        assert f"{outcome}**" in text
    assert "| 256 | √d_k | 256.0 ± 2.6 | 0.25 | in words |  |" in text
    assert "wanted 0.95 to 1.05: holds" in text


# The page


def test_the_page_is_whole():
    checker = Checker(page(clock={"variance": result().clock_tables()}))
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    inside = [link[1:] for link in checker.links if link.startswith("#")]
    assert set(inside) <= set(checker.ids)
    # Styles and handlers in attributes are what the policy forbids.
    assert checker.styles == []
    assert checker.handlers == []


def test_the_page_has_every_claim_in_order():
    text = Checker(page()).text
    shown = [text.index(claim.replace("d_k", "dk").replace("d_model", "dmodel")) for claim in lab.CLAIMS.values()]
    assert shown == sorted(shown)


def test_the_page_shows_every_outcome_and_what_was_not_run():
    text = Checker(page()).text
    for outcome in OUTCOMES:
        assert f"Reason of {outcome}." in text
        assert f"expected of {outcome}" in text
    assert text.count("not run") == 22
    assert "attemper lab softmax" in text
    assert "attemper lab training" in text
    assert "3 of the 25 claims were run." in text


def test_a_page_of_one_question_is_about_that_one():
    text = Checker(lab_html([RECORD])).text
    assert "not run" not in text
    assert "Why √" not in text
    assert "Dot products grow" in text


def test_the_page_has_tables_config_versions_and_the_clock():
    text = Checker(page(clock={"variance": result().clock_tables()})).text
    for part in ("256.0\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}2.6", "0.95 to 1.05", "A note.", "d_k4 16", "python 3."):
        assert part.replace("\N{NO-BREAK SPACE}", " ") in text.replace("\N{NO-BREAK SPACE}", " "), part
    assert "differs from run to run" in text
    assert "Seconds" in text
    assert "attemper lab variance --d-k 4 16" in text
    assert "differs from run to run" not in Checker(page()).text


def test_the_same_question_twice():
    checker = Checker(page([RECORD, RECORD]))
    assert len(checker.ids) == len(set(checker.ids))


def test_a_command_breaks_between_its_options_only():
    record = result().to_dict() | {"command": "attemper lab variance --half-width 0.1 --text '<b>-'"}
    text = page([record])
    assert '<span class="whole">--half-width</span> 0.1' in text
    assert "<b>-" not in text
    assert ".code .whole { white-space: nowrap; }" in text


def test_nothing_in_a_record_is_markup():
    text = page([hostile()])
    assert "<script>alert" not in text
    assert text.count("<script") == text.count("</script>") == 2
    checker = Checker(text)
    assert checker.open == []
    assert "<b>" in checker.text
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert json.loads(data)["records"] == [hostile()]


def test_the_page_asks_nothing_of_a_network():
    text = page()
    assert set(re.findall(r"https?://[^\"'\s<]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"src\s*=", text.replace("img-src", ""))
    assert all(link.startswith(("#", "data:,")) for link in Checker(text).links)
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|sendBeacon|sessionStorage|import\()", text)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ('script type="module"', "style"):
        inner = re.search(f"<{tag}>(.*?)</{tag.split()[0]}>", text, re.DOTALL)
        assert f"'{_html.digest(inner[1])}'" in policy


def test_the_script_is_one():
    code = _html.script(_lab_html.MODULES, "document")
    assert not re.search(r"^(import|export)\b", code, re.MULTILINE)
    assert "</" not in code
    names = re.findall(r"^(?:async )?(?:function|const|let|class) (\w+)", code, re.MULTILINE)
    assert len(names) == len(set(names))


def test_every_table_and_figure_can_be_copied():
    tools = re.findall(r'data-tools="([\w.]+)"', page(clock={"variance": result().clock_tables()}))
    assert tools == [
        *(f"0.panels.{i}" for i in range(5)),
        *(f"0.verdicts.{i}.evidence" for i in range(4)),
        "0.tables.0",
        "0.clock.0",
        "0.command",
        "0.code",
        "all",
    ]


# Result


@pytest.mark.parametrize("suffix", [".json", ".html", ".md", ".svg", ".png"])
def test_save(tmp_path, suffix):
    path = result().save(tmp_path / f"answer{suffix}")
    start = {".json": b"{", ".html": b"<!doctype", ".md": b"# ", ".svg": b"<svg", ".png": b"\x89PNG"}[suffix]
    assert path.read_bytes().startswith(start)


def test_save_and_load(tmp_path):
    path = result().save(tmp_path / "answer.json")
    again = Result.from_json(path.read_text(encoding="utf-8"))
    assert again.to_json() == result().to_json()
    for render in (lab_text, lab_svg, lab_markdown):
        assert render(again.to_dict()) == render(RECORD)


def test_save_refuses_other_suffixes(tmp_path):
    with pytest.raises(
        OptionError, match=r"Cannot save a Result as 'x.pdf'.\n  End the path in .json, .html, .md, .svg, .png."
    ):
        result().save(tmp_path / "x.pdf")


def test_a_result_shows_itself():
    assert str(result()) == lab_text(RECORD, 80, result().clock_tables())
    assert "Seconds" in str(result())
    assert result().figure().get_figwidth() > 0


def test_a_real_answer_in_every_rendering():
    real = lab.run("variance", d_k=(1, 4), relative=0.1)
    record = real.to_dict()
    checker = Checker(lab_html([record]))
    assert checker.open == []
    assert real.verdict(1).measured.replace("d_k", "dk") in checker.text.replace("\N{NO-BREAK SPACE}", " ")
    assert "rademacher" in lab_svg(record)
    assert real.verdict(1).outcome in str(real)
