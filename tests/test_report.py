"""The report: every rendering shows the record's own numbers, and none can be turned against its reader."""

from __future__ import annotations

import copy
import html
import io
import json
import math
import re
import subprocess
import sys
from importlib.resources import files

import pytest

from attemper import _checkup
from attemper._errors import OptionError
from attemper._vitals import Site, Vitals, field_table
from attemper.report import _html, _numbers, _view, _where, to_html, to_markdown, to_rich, to_text
from attemper.report._glossary import TERMS

HOSTILE = "</script><script>alert(1)</script>\"'&<b>`|\u2028\x1b[31mred 模型 \u202e_x_\n# head"


def vital(path: str, heads: int, *, pressure: bool = False, **site) -> dict:
    fields = {name: [0.25 + 0.5 * h / heads for h in range(heads)] for name, _, _ in field_table()}
    counts = [name for name, _, merge in field_table() if merge == "sum"]
    fields |= {name: [8] * heads for name in counts} | {"nonfinite": [0] * heads}
    measured = [0.001 * (h - 1) for h in range(heads)] if pressure else [None] * heads
    fields |= {"pressure": measured, "gradient_flow": [0.5 if pressure else None] * heads}
    fields |= {"pressure_spread": [0.0] * heads, "total_pressure_spread": [0.0]}
    fields |= {"total_pressure": [0.003 if pressure else None], "padding_weight": [None] * heads}
    fields |= {"pressure_error": [0.0005 if pressure else None] * heads}
    fields |= {"total_pressure_error": [0.001 if pressure else None]}
    weights = {name: [8] * len(fields[name]) for name, _, merge in field_table() if merge.startswith("mean")}
    where = Site(path=path, heads=heads, head_dim=64, effective_scale=0.125, kind="sdpa", **site).to_dict()
    return {"schema": "attemper.vitals/1", "site": where, "calls": 1, **fields, "weights": weights}


def finding(rule: str = "sink", severity: str = "information", where: dict | None = None, **fields) -> dict:
    return {
        "rule": rule,
        "severity": severity,
        "where": where or {},
        "headline": f"The headline of {rule}.",
        "evidence": {"share_of_heads": 0.2, "note": "in words"},
        "cause": f"The cause of {rule}.",
        "remedy": f"The remedy of {rule}.",
        "docs": f"docs/findings.md#{rule}",
        **fields,
    }


def checkup(layers: int = 4, heads: int = 6, *, pressure: bool = True, **fields) -> dict:
    return {
        "schema": "attemper.checkup/1",
        "version": "0.1.0",
        "model": {
            "name": "Model-1B",
            "kind": "Llama",
            "parameters": 1_234_567_890,
            "dtype": "float32",
            "trained": True,
        },
        "inputs": "4 sequences of 512 tokens",
        "sequences": 4,
        "loss": 2.545 if pressure else None,
        "pressure": -0.04 if pressure else None,
        "pressure_error": 0.0235 if pressure else None,
        "sequence_pressure": [-0.1, -0.02, -0.05, 0.01] if pressure else [],
        "probe": [{"factor": f, "loss": x} for f, x in ((0.5, 4.19), (1.0, 2.545), (2.0, 3.41))] if pressure else [],
        "findings": [],
        "unseen": {},
        "vitals": [vital(f"model.layers.{i}.self_attn", heads, pressure=pressure) for i in range(layers)],
        **fields,
    }


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def rich_text(record: dict, width: int = 80, **options) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, **options)
    console.print(to_rich(record))
    return console.file.getvalue()


RENDERINGS = {
    "html": lambda record: json.dumps(data_of(to_html(record))["view"], ensure_ascii=False),
    "noscript": lambda record: html.unescape(re.search(r"<noscript>(.*?)</noscript>", to_html(record), re.DOTALL)[1]),
    "markdown": to_markdown,
    "text": to_text,
    "rich": rich_text,
}


def test_the_schema_is_that_of_checkup():
    assert _view.SCHEMA == _checkup.SCHEMA


@pytest.mark.parametrize("render", [to_html, to_markdown, to_text, to_rich])
def test_another_schema_is_refused(render):
    with pytest.raises(OptionError, match="schema is 'other/1'"):
        render(checkup(schema="other/1"))


def test_the_page_carries_the_record_exactly():
    record = checkup(vitals=[vital("layers.0.attn", 3, pressure=True)])
    record["vitals"][0]["entropy"] = [1 / 3, 5e-324, 1.7976931348623157e308]
    record["vitals"][0]["max_logit"] = ["inf", "-inf", None]
    before = copy.deepcopy(record)
    assert data_of(to_html(record))["record"] == record == before


def test_what_json_has_no_word_for_is_put_into_words():
    import numpy as np

    evidence = {"a": math.nan, "b": math.inf, "c": np.float32(0.5), "d": np.int64(3)}
    page = to_html(checkup(findings=[finding(evidence=evidence)]))
    assert data_of(page)["record"]["findings"][0]["evidence"] == {"a": None, "b": "inf", "c": 0.5, "d": 3}


@pytest.mark.parametrize("name", RENDERINGS)
def test_every_finding_is_in_every_rendering(name):
    findings = [finding("scale-wrong", "error"), finding("saturated", "warning"), finding("sink")]
    text = RENDERINGS[name](checkup(findings=findings))
    for f in findings:
        for part in ("rule", "headline", "cause", "remedy", "docs"):
            assert f[part] in text, part
        assert f["severity"] in text.lower()
    assert "share of heads" in text
    assert "0.2" in text
    assert "in words" in text


@pytest.mark.parametrize("name", RENDERINGS)
def test_the_key_numbers_are_in_every_rendering(name):
    text = RENDERINGS[name](checkup())
    for part in ("Model-1B", "1.235 billion", "4 sites × 6 heads", "2.545", "−0.040 ± 0.024", "t = −1.7 over 4"):
        assert part in text, part
    assert "runs at its right temperature" in text


@pytest.mark.parametrize("name", RENDERINGS)
def test_what_was_not_measured_is_said_to_be_missing(name):
    text = RENDERINGS[name](checkup(2, 4, pressure=False))
    assert "not measured" in text
    for word in ("NaN", "nan,", "undefined", "None,"):
        assert word not in text


@pytest.mark.parametrize("name", RENDERINGS)
def test_unseen_attention_is_listed(name):
    text = RENDERINGS[name](checkup(unseen={"model.vision.attn": "a custom operator"}))
    assert "model.vision.attn" in text
    assert "a custom operator" in text
    assert "1 module that looks like attention could not be read." in text


def test_verdicts():
    def verdict(**fields):
        found = _view.view(checkup(**fields))["verdict"]
        return found["severity"], f"{found['lead']}: {found['sentence']}"

    assert verdict() == ("healthy", "Healthy: attention runs at its right temperature.")
    assert verdict(pressure=False) == ("healthy", "Healthy: no error and no warning.")
    assert verdict(findings=[finding()])[0] == "healthy"
    both = [finding("w", "warning"), finding("e", "error"), finding("f", "error")]
    assert verdict(findings=both) == ("error", "2 errors and 1 warning: The headline of e.")
    assert verdict(findings=both[:1]) == ("warning", "1 warning: The headline of w.")
    assert verdict(vitals=[]) == ("unknown", "Nothing read: no attention was seen.")
    # Far from zero, the pressure does not vouch for the temperature.
    assert "temperature" not in verdict(pressure_error=0.001)[1]


def told(**fields) -> dict:
    """A record as `check` makes it: the pressure is that of its sequences."""
    model = {"name": "M", "trained": fields.pop("trained", True)}
    n = fields.pop("sequences", 4)
    return checkup(model=model, sequences=n, sequence_pressure=[fields.get("pressure", -0.04)] * n) | fields


def whole(headline: str, **fields) -> dict:
    return finding("cannot-tell", headline=headline, remedy="Give more.", **fields)


@pytest.mark.parametrize(
    ("record", "sentence", "note"),
    [
        ({"findings": [whole("2 are too few.")], "sequences": 2}, "2 are too few.", "Give more."),
        ({"findings": [whole("It cannot be told.")], "trained": None}, "It cannot be told.", "Give more."),
        # Measured as wrong, whatever the findings say.
        ({"pressure": -2.53, "pressure_error": 0.011, "sequences": 2}, "does not show", "more of them"),
        ({"pressure": -2.53, "pressure_error": 0.011}, "does not show", "more of them"),
        ({"pressure": -0.21, "pressure_error": 0.42}, "does not show", "more of them"),
        ({"pressure": -0.04, "pressure_error": None, "sequences": 1}, "does not show", "more of them"),
        # Nothing is known of any layer's scale.
        ({"findings": [whole("None.", where={f"model.layers.{i}.self_attn": [] for i in range(4)})],
          "trained": False}, "None.", "Give more."),
    ],
)  # fmt: skip
def test_what_was_not_decided_is_not_called_healthy(record, sentence, note):
    shown = _view.view(told(**record))
    verdict = shown["verdict"]
    assert (verdict["severity"], verdict["lead"]) == ("unknown", "Not decided")
    assert sentence in verdict["sentence"]
    assert verdict["notes"][0].startswith("Otherwise no error and no warning.")
    assert note in verdict["notes"][0]
    assert "right temperature" not in shown["pressure"]["reading"]
    for render in RENDERINGS.values():
        text = render(told(**record))
        assert "Not decided" in text
        assert "Healthy" not in text


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"pressure": 0.0, "pressure_error": 0.0},
        {"pressure": -0.2, "pressure_error": 0.02},
        {"findings": [whole("Not of these weights.")], "trained": False},
        {"findings": [whole("One.", where={"model.layers.1.self_attn": []})]},
        {"findings": [whole("None.", where={f"model.layers.{i}.self_attn": [] for i in range(4)})]},
    ],
)
def test_what_was_decided_is_called_healthy(record):
    assert _view.view(told(**record))["verdict"]["lead"] == "Healthy"


@pytest.mark.parametrize(
    ("value", "error", "sequences", "reading"),
    [
        (-2.53, 0.011, 2, "a larger scale would lower the loss, if it holds on more sequences"),
        (-2.53, 0.011, 4, "a larger scale would lower the loss"),
        (0.2, 0.02, 4, "a smaller scale would lower the loss, but hardly"),
        (-0.01, 0.01, 2, "zero within its error, if it holds on more sequences"),
        (-0.01, 0.01, 4, "zero within its error, as at the right temperature"),
        (-0.21, 0.42, 4, "zero within its error"),
        (0.0, 0.0, 4, "zero, as at the right temperature"),
    ],
)
def test_the_reading_of_the_pressure(value, error, sequences, reading):
    shown = _view.view(told(pressure=value, pressure_error=error, sequences=sequences))
    assert shown["pressure"]["reading"] == reading


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([1, 2, 5], "1, 2, 5"), ([2, 3, 4, 9], "2–4, 9"), ([5, 4, 3, 3], "3–5")],
)
def test_ranges(numbers, text):
    assert _where.ranges(numbers) == text


def described(where: dict, paths: list[tuple[str, int]]) -> str:
    places, groups = _where.locate([{"path": path, "heads": heads} for path, heads in paths])
    return "; ".join(_where.describe(where, places, groups))


def test_where_is_compact():
    deep = [(f"model.layers.{i}.attn", 9) for i in range(30)]
    assert described({f"model.layers.{i}.attn": (1, 2, 5) for i in range(2, 20)}, deep) == "layers 2–19, heads 1, 2, 5"
    assert described({"model.layers.5.attn": ()}, deep) == "layer 5, all heads"
    assert described({"model.layers.5.attn": (7,)}, deep) == "layer 5, head 7"
    assert described({}, deep) == "the whole model"
    assert described({"elsewhere": ()}, deep) == "elsewhere"
    ragged = {f"model.layers.{i}.attn": tuple(range(i % 5 + 1)) for i in range(20)}
    assert described(ragged, deep) == "layers 0–19, 60 heads"


def test_where_tells_encoder_from_decoder():
    paths = [(f"encoder.layers.{i}.self_attn", 8) for i in range(3)] + [("decoder.layers.0.cross", 4)]
    where = {"encoder.layers.1.self_attn": (), "decoder.layers.0.cross": (2,)}
    assert described(where, paths) == (
        "layer 1 of encoder.layers.*.self_attn, all heads; layer 0 of decoder.layers.*.cross, head 2"
    )


def test_only_the_numbers_that_vary_name_a_layer():
    places, groups = _where.locate(
        [{"path": f"stage.{i}.block.{j}.attn.0", "heads": 2} for i in (0, 1) for j in (0, 1)]
    )
    assert [place.short for place in places] == ["0.0", "0.1", "1.0", "1.1"]
    assert [group.template for group in groups] == ["stage.*.block.*.attn.0"]
    assert _where.layers(places[:3]) == "layers 0.0, 0.1, 1.0"


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (None, "number", "not measured"),
        ("inf", "number", "∞"),
        ("-inf", "number", "−∞"),
        ("nan", "number", "not a number"),
        (0.0, "share", "0.000"),
        (0.0005, "share", "0.0005"),
        (0.0625, "share", "0.063"),
        (-0.5, "share", "−0.500"),
        (33.0, "number", "33"),
        (12.00449, "number", "12"),
        (123456.7, "number", "123500"),
        (1234567.0, "number", "1.235e6"),
        (-1.2345e-7, "number", "−1.235e-7"),
        (134515008, "count", "134,515,008"),
        (True, "number", "yes"),
        ([0.5, 0.25], "number", "0.5, 0.25"),
        ("sdpa", "number", "sdpa"),
    ],
)
def test_numbers(value, form, text):
    assert _numbers.shown(value, form) == text


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (-0.04, 0.0234, "−0.040 ± 0.023"),
        (1234.5, 12.3, "1235 ± 12"),
        (-0.00001, 0.0036, "0.0000 ± 0.0036"),
        (1e-7, 2e-8, "1e-7 ± 2e-8"),
        (0.5, None, "0.5"),
        (0.5, 0.0, "0.5"),
        (None, None, "not measured"),
    ],
)
def test_errors_set_the_digits(value, error, text):
    assert _numbers.with_error(value, error) == text


def test_aligned_columns_share_their_decimals():
    assert _numbers.aligned([3.0, 2.545, None, "inf"]) == ["3.000", "2.545", "not measured", "∞"]


def test_scales_that_differ_from_head_to_head():
    assert _numbers.spread([0.1, 0.2, None]) == "0.1 … 0.2"
    assert _numbers.spread([0.125, 0.125]) == "0.125"
    assert _numbers.spread([None]) == "not measured"


def test_every_vital_has_a_term():
    named = {term.name for term in TERMS}
    fields = {name for name, _, merge in field_table() if merge != "pairwise" and name != "total_pressure"}
    assert named == fields


def test_only_what_was_measured_has_a_map():
    names = {v["name"] for v in _view.view(checkup(pressure=False))["vitals"]}
    assert "normalized_entropy" in names
    assert not names & {"pressure", "gradient_flow", "padding_weight", "nonfinite", "rows"}
    assert {"pressure", "gradient_flow"} <= {v["name"] for v in _view.view(checkup())["vitals"]}


def test_a_maximum_over_nothing_is_missing_and_an_overflow_is_not():
    record = checkup(1, 3)
    record["vitals"][0]["max_logit"] = ["-inf", "-inf", "-inf"]
    assert "max_logit" not in {v["name"] for v in _view.view(record)["vitals"]}
    record["vitals"][0]["max_logit"] = ["-inf", 2.0, "inf"]
    shown = _view.view(record)
    assert next(v for v in shown["vitals"] if v["name"] == "max_logit")["domain"] == [2.0, 2.0]
    assert shown["table"]["rows"][0]["max_logit"] == "inf"
    assert "∞" in shown["table"]["texts"][0]


def test_a_diverging_scale_is_even_about_zero():
    low, high = next(v for v in _view.view(checkup())["vitals"] if v["name"] == "pressure")["domain"]
    assert low == -high < 0


def test_the_table_weighs_heads_as_vitals_do():
    record = checkup(1, 4, pressure=True)
    record["vitals"][0]["weights"]["flow"] = [1, 2, 3, 4]
    row = _view.view(record)["table"]["rows"][0]
    scalars = Vitals.from_dict(record["vitals"][0]).to_scalars()
    for name in ("flow", "normalized_entropy", "max_logit", "score_std"):
        assert row[name] == pytest.approx(scalars[f"model.layers.0.self_attn/{name}"])


def test_the_least_loss_of_the_probe():
    probe = [{"factor": 2.0, "loss": 3.0}, {"factor": 0.5, "loss": 2.0}, {"factor": 4.0, "loss": None}]
    shown = _view.view(checkup(probe=probe))["probe"]
    assert [p["factor"] for p in shown["points"]] == [0.5, 2.0, 4.0]
    assert shown["least"] == 0
    assert shown["reading"] == "The loss is least with every scale multiplied by 0.5."


@pytest.mark.parametrize(
    ("losses", "reading"),
    [
        ((2.0, 2.0, 2.0), "The loss is the same at every scale: it does not tell which is best."),
        ((2.0, 2.0, 3.0), "The loss is as low with every scale multiplied by 0.5 as by 1."),
        ((2.0, None, None), "One loss alone does not tell where the least is."),
        ((2.0, "nan", "inf"), "One loss alone does not tell where the least is."),
        (("nan", None, "inf"), "No loss was finite."),
    ],
)
def test_a_tie_of_the_probe_is_not_the_least(losses, reading):
    probe = [{"factor": f, "loss": x} for f, x in zip((0.5, 1.0, 2.0), losses, strict=True)]
    record = checkup(probe=probe)
    shown = _view.view(record)["probe"]
    assert (shown["least"], shown["reading"]) == (None, reading)
    for name in ("markdown", "text", "rich"):
        assert " ".join(RENDERINGS[name](record).split()).count(reading) == 1


def test_the_probe_says_what_it_left_alone():
    shown = _view.view(checkup(unseen={"layers.9": "by hand"}))["probe"]
    assert shown["reading"].endswith("model's own scale. What could not be read kept the scale it has.")


@pytest.mark.parametrize(("loss", "text"), [(None, "not measured"), (math.nan, "not a number"), (math.inf, "∞")])
def test_a_loss_that_is_no_number_is_not_one_that_was_not_measured(loss, text):
    found = _checkup.Checkup(model={}, vitals=(), findings=(), loss=loss)
    [shown] = [n["value"] for n in _view.view(found.to_dict())["numbers"] if n["label"] == "Loss"]
    assert shown == text
    again = _checkup.Checkup.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False)))
    assert again.loss == pytest.approx(loss, nan_ok=True)


def test_scales_are_compared_with_their_reference():
    sites = [vital("layers.0.attn", 2), vital("layers.1.attn", 2, declared_scale=0.25)]
    sites[0]["site"]["effective_scale"] = [0.125, 0.5]
    differs = [site["differs"] for site in _view.view(checkup(vitals=sites))["sites"]]
    assert differs == [True, True]
    assert not any(site["differs"] for site in _view.view(checkup())["sites"])


def hostile() -> dict:
    sites = [vital(f"a{HOSTILE}.{i}.b", 3) for i in range(2)] + [vital(HOSTILE, 2)]
    named = finding(HOSTILE, "warning", {HOSTILE: [0]}, headline=HOSTILE, evidence={HOSTILE: HOSTILE}, remedy=HOSTILE)
    model = {"name": HOSTILE, "kind": HOSTILE, "dtype": HOSTILE}
    return checkup(model=model, vitals=sites, findings=[named], unseen={HOSTILE: HOSTILE}, inputs=HOSTILE)


def test_nothing_in_a_record_is_markup():
    page = to_html(hostile())
    assert "<script>alert" not in page
    assert page.count("</script>") == 2
    assert page.count("<script") == 2
    assert page.count("<title>") == 1
    assert data_of(page)["record"] == hostile()
    lines = to_markdown(hostile()).splitlines()
    assert sum(line.startswith("# ") for line in lines) == 1
    assert not any("<script>alert" in line.replace("\\<", "") for line in lines if "`` " not in line)


@pytest.mark.parametrize("render", [to_text, rich_text, to_markdown])
def test_names_cannot_steer_the_terminal(render):
    text = render(hostile())
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e\u2028]", text)


def test_a_lone_surrogate_survives_the_way_to_disk():
    record = checkup(model={"name": "\ud800"})
    page = to_html(record)
    page.encode("utf-8")
    assert data_of(page)["record"] == record


def test_the_page_asks_nothing_of_a_network():
    page = to_html(checkup(findings=[finding()]))
    assert "http://" not in page
    assert "https://" not in page
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!data:)", page)
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|sendBeacon|sessionStorage|indexedDB)\b", page)
    assert "url(" not in page
    assert "@import" not in page
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]


def test_the_policy_names_the_script_and_the_style_that_are_there():
    page = to_html(checkup())
    for tag in ('script type="module"', "style"):
        inner = re.search(f"<{tag}>(.*?)</{tag.split()[0]}>", page, re.DOTALL)
        assert inner
        assert f"'{_html.digest(inner[1])}'" in page


def test_the_modules_join_into_one():
    code = _html.script(_html.MODULES)
    assert not re.search(r"^(import|export)\b", code, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:function|const|let|class) (\w+)", code, re.MULTILINE)
    assert len(names) == len(set(names)), sorted(n for n in set(names) if names.count(n) > 1)
    assert "</" not in re.sub(r'"<svg></svg>"', "", code)
    listed = {entry.name for entry in files("attemper.report").joinpath("static").iterdir()}
    assert {f"{name}.js" for name in _html.MODULES} | {"report.css", "lab.css", "lab.js"} == listed


def test_storage_that_a_disk_may_not_have_holds_the_theme_alone():
    code = _html.script(_html.MODULES)
    tried = re.findall(r"try \{([^}]*)\} catch \{", code)
    assert len(re.findall("localStorage", code)) == len(re.findall("localStorage", "".join(tried))) == 2
    assert set(re.findall(r"localStorage\.\w+\((\w+)", code)) == {"KEPT"}


def test_modules_import_only_what_is_before_them_and_exported():
    before: dict[str, set[str]] = {}
    for name in _html.MODULES:
        code = _html.static(f"{name}.js")
        for wanted, source in re.findall(r'^import \{ ([^}]*) \} from "\./(\w+)\.js";$', code, re.MULTILINE):
            assert set(wanted.split(", ")) <= before[source], (name, source)
        before[name] = set(re.findall(r"^export (?:async )?(?:function|const|class) (\w+)", code, re.MULTILINE))


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (2, 4), (30, 9), (96, 64), (3, 200)])
def test_the_terminal_fits(width, layers, heads):
    where = {f"model.layers.{i}.self_attn": [0] for i in range(layers)}
    record = checkup(layers, heads, findings=[finding("long-" * 12, where=where)])
    lines = to_text(record, width=width).splitlines()
    assert max(map(_columns, lines)) <= width
    assert sum(bool(re.match(r"\d+(–\d+)? ", line)) for line in lines) <= 40
    assert [line.rstrip() for line in rich_text(record, width).splitlines()] == lines


def _columns(line: str) -> int:
    from rich.cells import cell_len

    return cell_len(line)


def test_plain_text_has_no_colour_codes(monkeypatch):
    record = checkup(findings=[finding("scale-wrong", "error")])
    assert "\x1b" not in to_text(record)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|4[0-7]|38|48)[;m]", rich_text(record, force_terminal=True))
    monkeypatch.delenv("NO_COLOR")
    assert "\x1b[" in rich_text(record, force_terminal=True, color_system="truecolor")


def test_the_terminal_marks_what_findings_name():
    where = {"model.layers.1.self_attn": [0]}
    findings = [finding("e", "error", where), finding("sink", where={"model.layers.2.self_attn": [1, 2]})]
    text = to_text(checkup(findings=findings))
    rows = {line.split()[0]: line for line in text.splitlines() if re.match(r"\d ", line)}
    assert rows["1"].split("  ", 1)[1].strip().startswith("2x")
    assert rows["2"].count("s") == 2
    assert "x error, s sink" in text


def test_the_terminal_shows_a_head_that_was_not_read():
    record = checkup(1, 3)
    record["vitals"][0]["normalized_entropy"] = [None, 0.5, None]
    text = to_text(record)
    assert "· 5 ·" in text
    assert "· not measured" in text


def test_fewer_heads_than_the_widest_site_leave_a_gap():
    text = to_text(checkup(vitals=[vital("layers.0.attn", 2), vital("layers.1.attn", 5)]))
    rows = [line for line in text.splitlines() if re.match(r"[01] ", line)]
    assert [len(row.split()) for row in rows] == [3, 6]


def test_a_record_without_sites_renders():
    record = checkup(vitals=[], probe=[{"factor": 1.0, "loss": None}])
    for render in (to_html, to_markdown, to_text, rich_text):
        assert "no attention was seen" in render(record)


def test_code_in_a_sentence_stays_code_in_markdown():
    named = finding(remedy="Pass `scale=a|b` and <b>.", headline="1/√d_k, *not* d_k.")
    text = to_markdown(checkup(findings=[named]))
    assert "Pass `scale=a\\|b` and \\<b\\>." in text
    assert "1/√d_k, \\*not\\* d_k." in text


def test_markdown_tables_are_whole():
    for record in (checkup(findings=[finding()]), hostile()):
        widths: set[int] = set()
        for line in [*to_markdown(record).splitlines(), ""]:
            if line.startswith("|"):
                widths.add(len(re.findall(r"(?<!\\)\|", line)))
            else:
                assert len(widths) <= 1
                widths = set()


def test_a_checkup_renders_itself(tmp_path):
    found = _checkup.Checkup.from_dict(checkup(findings=[finding()]))
    assert str(found) == to_text(found.to_dict())
    assert data_of(found.save(tmp_path / "a.html").read_text(encoding="utf-8"))["record"] == found.to_dict()
    assert found.save(tmp_path / "a.md").read_text(encoding="utf-8") == to_markdown(found.to_dict())


def test_the_report_needs_neither_torch_nor_rich():
    code = """if True:
        import sys
        sys.modules["torch"] = sys.modules["rich"] = None
        from attemper.report import to_html, to_markdown, to_rich, to_text
        record = {"schema": "attemper.checkup/1", "version": "", "model": {}, "inputs": "", "sequences": 1,
                  "loss": None, "pressure": None, "pressure_error": None, "sequence_pressure": [], "probe": [],
                  "findings": [], "unseen": {}, "vitals": []}
        for render in (to_html, to_markdown, to_text, to_rich):
            assert render(record)
    """
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
