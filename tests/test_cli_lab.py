"""`attemper lab`: options made from knobs, files that survive an interrupt, errors that say what to do."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import types
from dataclasses import dataclass, fields

import pytest

import attemper
from attemper import lab
from attemper.cli import _lab, _lab_all, main
from attemper.lab import Estimate, Panel, Result, Series, Table, Verdict
from attemper.lab._result import Config as Base
from attemper.lab._result import knob

TINY = ["--d-k", "1", "4", "--relative", "0.3", "--most", "5000"]


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """Knobs of every kind."""

    sizes: tuple[int, ...] = knob((1, 2), "how many, 100 % of them", least=1)
    rates: tuple[float, ...] = knob((0.5,), "how fast")
    rule: str = knob("one", "which", choices=("one", "two"))
    text: str | None = knob(None, "a sentence")
    limit: int | None = knob(None, "at the most")
    causal: bool = knob(False, "whether the future is hidden")
    share: float = knob(0.25, "which part", least=0)


def answer(name: str, config: Base, calls: list) -> Result:
    """What a question of a test answers."""
    return Result(
        question=name,
        config=config,
        summary=f"The summary of {name}.",
        verdicts=(
            Verdict(claim=lab.QUESTIONS[name].claims[0], outcome="holds", expected="e", measured="m", reason="r"),
        ),
        tables=(Table(title="T", columns=("n", "x"), rows=((1, Estimate(1, 0.9, 1.1, 5)),)),),
        panels=(Panel(title="P", x_label="x", y_label="y", series=(Series(name="s", x=(1, 2), y=(1.0, 2.0)),)),),
        clock=(Table(title="Clock", columns=("ms",), rows=((len(calls),),)),),
    )


@pytest.fixture
def fake(monkeypatch):
    """Questions that answer at once, and remember how they were asked; an Exception in `fails` is raised instead."""
    calls: list = []
    fails: dict[str, BaseException] = {}

    def load(name):
        def run(config, progress, **extras):
            calls.append((name, config, extras))
            progress("step", 1, 2)
            if name in fails:
                raise fails[name]
            return answer(name, config, calls)

        options = (("--jobs", {"type": int, "default": 1}), ("--records", {"metavar": "PATH"}))
        own = options if name == "saturation" else ()
        return types.SimpleNamespace(Config=Config, QUICK=Config(sizes=(1,)), run=run, OPTIONS=own)

    for module in (_lab, _lab_all):
        monkeypatch.setattr(module, "load", load)
    return types.SimpleNamespace(calls=calls, fails=fails)


class TestList:
    def test_one_line_each(self, capsys):
        assert main(["lab"]) == 0
        out, err = capsys.readouterr()
        lines = out.splitlines()
        assert [line.split()[0] for line in lines] == list(lab.QUESTIONS)
        assert "How large is q·k" in lines[0]
        assert "(claims 1, 2, 5)" in lines[0]
        assert "attemper lab all" in err

    @pytest.mark.parametrize("columns", [60, 80])
    def test_it_keeps_to_the_width(self, monkeypatch, capsys, columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(["lab"]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= columns
        assert [line.split()[0] for line in out.splitlines() if line[0] != " "] == list(lab.QUESTIONS)

    def test_json(self, capsys):
        assert main(["lab", "--json"]) == 0
        assert [one["name"] for one in json.loads(capsys.readouterr().out)] == list(lab.QUESTIONS)

    def test_what_is_missing_is_said(self, monkeypatch, capsys):
        monkeypatch.setattr(_lab, "missing_for", lambda name: ["torch"] if name == "cost" else [])
        assert main(["lab"]) == 0
        out, err = capsys.readouterr()
        assert "(claim 25; needs torch)" in out
        assert "pip install 'attemper[lab]'" in err

    def test_imports_nothing_heavy(self):
        code = """
import sys
from attemper.cli import main
main(["lab"])
assert not {"torch", "matplotlib", "rich", "sklearn"} & set(sys.modules), "imported too early"
"""
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


class TestOptions:
    def test_every_kind_of_knob(self, fake, capsys):
        arguments = ["--sizes", "3", "4", "--rates", "0.1", "--rule", "two", "--text", "a b", "--limit", "7"]
        assert main(["lab", "variance", *arguments, "--causal", "--share", "1", "--seed", "5", "--json"]) == 0
        expected = Config(sizes=(3, 4), rates=(0.1,), rule="two", text="a b", limit=7, causal=True, share=1.0, seed=5)
        assert fake.calls == [("variance", expected, {})]
        assert json.loads(capsys.readouterr().out)["config"] == expected.to_dict()

    def test_quick_is_the_base(self, fake):
        assert main(["lab", "variance", "--quick", "--share", "0.5", "--json"]) == 0
        assert fake.calls[0][1] == Config(sizes=(1,), share=0.5)

    def test_what_is_no_knob_goes_to_run(self, fake):
        assert main(["lab", "saturation", "--jobs", "3", "--records", "runs.jsonl", "--json"]) == 0
        assert fake.calls[0][2] == {"jobs": 3, "records": "runs.jsonl"}
        assert main(["lab", "saturation", "--json"]) == 0
        assert fake.calls[1][2] == {"jobs": 1, "records": None}

    @pytest.mark.parametrize(
        "arguments", [["--json", "variance"], ["--quick", "variance", "--json"], ["variance", "--json"]]
    )
    def test_the_question_may_stand_anywhere(self, fake, capsys, arguments):
        assert main(["lab", *arguments]) == 0
        assert json.loads(capsys.readouterr().out)["question"] == "variance"

    def test_underscores(self, fake, capsys):
        assert main(["lab", "before_after", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["question"] == "before-after"

    @pytest.mark.parametrize("name", lab.QUESTIONS)
    def test_every_question_has_options(self, name, capsys):
        """A knob must not have the name of an option that every question has."""
        if lab._questions.missing_for(name):
            pytest.skip("packages are missing")
        module = lab.load(name)
        with pytest.raises(SystemExit) as caught:
            main(["lab", name, "--help"])
        assert caught.value.code == 0
        out = capsys.readouterr().out
        for one in fields(module.Config):
            assert f"--{one.name.replace('_', '-')}" in out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["varianc"], "attemper: question 'varianc' is not known.\n  Did you mean 'variance'? Choose from"),
            (["variance", "--sizes", "0"], "attemper: sizes is 0.\n  Pass a whole number of at least 1.\n"),
            (["variance", "--rule", "three"], "attemper: rule 'three' is not known.\n  Choose from 'one', 'two'.\n"),
            (
                ["variance", "--html", "x.htm"],
                "attemper: --html x.htm does not end in .html.\n  Write --html x.html.\n",
            ),
            (["variance", "--figure", "x.pdf"], "attemper: --figure x.pdf does not end in .svg.\n"),
            (["variance", "--json", "away/x.json"], "attemper: There is no directory away.\n"),
            (["all", "--only", "varianc"], "attemper: question 'varianc' is not known.\n  Did you mean 'variance'?"),
        ],
    )
    def test_errors_say_what_to_do(self, fake, capsys, arguments, message):
        assert main(["lab", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(message)
        assert fake.calls == []

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--sizes", "x"], "argument --sizes: 'x' is not a whole number"),
            (["--share", "much"], "argument --share: 'much' is not a number"),
            (["--speed", "3"], "unrecognized arguments: --speed 3"),
        ],
    )
    def test_usage(self, fake, capsys, arguments, message):
        with pytest.raises(SystemExit) as caught:
            main(["lab", "variance", *arguments])
        assert caught.value.code == 2
        assert capsys.readouterr().err.endswith(f"attemper lab variance: error: {message}\n")

    def test_missing_packages(self, monkeypatch, capsys):
        monkeypatch.setattr(_lab, "missing_for", lambda name: ["torch", "gguf"])
        assert main(["lab", "word"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("attemper: The question 'word' needs torch, gguf.\n  pip install 'attemper[lab,demo]'")

    @pytest.mark.parametrize(
        "arguments", [["variance", "--html", "x.html"], ["variance", "--figure", "x.svg"], ["all"]]
    )
    def test_without_matplotlib_nothing_is_run(self, fake, monkeypatch, capsys, arguments):
        import importlib.util

        real = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda n, *rest: None if n == "matplotlib" else real(n, *rest))
        assert main(["lab", *arguments]) == 2
        assert "pip install 'attemper[lab]'" in capsys.readouterr().err
        assert fake.calls == []
        assert main(["lab", "variance", "--json"]) == 0
        assert main(["lab", "variance"]) == 0


class TestOne:
    def test_on_the_terminal(self, fake, capsys):
        assert main(["lab", "variance"]) == 0
        out, err = capsys.readouterr()
        assert "✓ holds  claim 1" in out
        assert "Clock" in out
        assert "\x1b" not in out + err
        assert err == ""

    def test_files(self, fake, capsys, tmp_path):
        files = ["--json", "a.json", "--html", "a.html", "--figure", "a.svg"]
        assert main(["lab", "variance", *files]) == 0
        assert capsys.readouterr().err == "wrote a.json\nwrote a.html\nwrote a.svg\n"
        assert json.loads((tmp_path / "a.json").read_text())["question"] == "variance"
        assert "Clock" in (tmp_path / "a.html").read_text()
        assert (tmp_path / "a.svg").read_text().startswith("<svg")
        assert main(["lab", "variance", "--figure", "a.png"]) == 0
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")

    def test_a_real_question(self, capsys):
        assert main(["lab", "variance", *TINY, "--json"]) == 0
        out = capsys.readouterr().out
        assert Result.from_json(out).to_json() == out

    def test_the_command_of_an_answer_asks_it_again(self, capsys):
        assert main(["lab", "variance", *TINY, "--json"]) == 0
        first = capsys.readouterr().out
        command = json.loads(first)["command"]
        assert command.startswith("attemper lab variance ")
        assert main([*command.split()[1:], "--json"]) == 0
        assert capsys.readouterr().out == first


ASKED = ["--only", "variance", "softmax", "saturation"]


def names_of(fake) -> list[str]:
    return [name for name, _, _ in fake.calls]


class TestAll:
    def test_one_seed_for_all(self, fake, capsys, tmp_path):
        assert main(["lab", "all", "--seed", "7", *ASKED]) == 0
        for path in (tmp_path / "attemper-lab").glob("s*.json"):
            assert json.loads(path.read_text())["config"]["seed"] == 7

    def test_files_and_the_summary(self, fake, capsys, tmp_path):
        assert main(["lab", "all", *ASKED]) == 0
        out, err = capsys.readouterr()
        assert names_of(fake) == ["variance", "softmax", "saturation"]
        assert {path.name for path in (tmp_path / "attemper-lab").iterdir()} == {
            "variance.json",
            "softmax.json",
            "saturation.json",
            "clock.json",
            "why-sqrt-dk.html",
        }
        assert re.search(r"^✓  1  holds ", out, re.MULTILINE)
        # What was not asked is no news.
        assert not re.search(r"^– 25  not run ", out, re.MULTILINE)
        assert re.match(r"variance +\d+\.\d s\nsoftmax ", err)
        assert err.endswith("wrote attemper-lab/why-sqrt-dk.html\n")
        page = (tmp_path / "attemper-lab" / "why-sqrt-dk.html").read_text()
        assert page.count("<h3>Clock</h3>") == 3
        assert "The summary of saturation." in page

    def test_without_only_it_is_all_that_can_be_run(self, fake, monkeypatch, capsys):
        everything = {name: one for name, one in lab.QUESTIONS.items() if one.claims}
        monkeypatch.setattr(_lab_all, "QUESTIONS", everything)
        monkeypatch.setattr(_lab_all, "missing_for", lambda name: ["sklearn"] if name == "training" else [])
        monkeypatch.setattr(_lab_all, "quieten", lambda target: None)
        assert main(["lab", "all", "--quick"]) == 0
        out, err = capsys.readouterr()
        assert names_of(fake) == [name for name in everything if name != "training"]
        assert all(config == Config(sizes=(1,)) for _, config, _ in fake.calls)
        assert err.startswith("training is left out: it needs sklearn. pip install 'attemper[lab]'\n")
        assert re.search(r"^– 23  not run ", out, re.MULTILINE)

    def test_json(self, fake, capsys, tmp_path):
        assert main(["lab", "all", *ASKED, "--json", "--out", "there"]) == 0
        records = json.loads(capsys.readouterr().out)
        assert [record["question"] for record in records] == ["variance", "softmax", "saturation"]
        saved = [json.loads((tmp_path / "there" / f"{r['question']}.json").read_text()) for r in records]
        assert saved == records
        assert main(["lab", "--json", "all", *ASKED]) == 0
        assert json.loads(capsys.readouterr().out) == records
        assert main(["lab", "all", *ASKED, "--json", "list.json"]) == 0
        assert json.loads((tmp_path / "list.json").read_text()) == records

    def test_files_come_back_as_results(self, fake, monkeypatch, tmp_path):
        assert main(["lab", "all", "--only", "softmax"]) == 0
        text = (tmp_path / "attemper-lab" / "softmax.json").read_text()
        monkeypatch.setattr("attemper.lab._questions.load", lambda name: types.SimpleNamespace(Config=Config))
        assert Result.from_json(text).to_json() == text

    def test_an_interrupt_keeps_what_is_done(self, fake, capsys, tmp_path):
        fake.fails["softmax"] = KeyboardInterrupt()
        assert main(["lab", "all", *ASKED]) == 130
        out, err = capsys.readouterr()
        assert out == ""
        assert err.endswith("wrote attemper-lab/why-sqrt-dk.html\nattemper: interrupted.\n")
        folder = tmp_path / "attemper-lab"
        assert {path.name for path in folder.iterdir()} == {"variance.json", "clock.json", "why-sqrt-dk.html"}
        assert "The summary of variance." in (folder / "why-sqrt-dk.html").read_text()

    def test_an_interrupt_in_disguise(self, fake, tmp_path):
        error = ImportError("cannot import")
        error.__cause__ = KeyboardInterrupt()
        fake.fails["softmax"] = error
        assert main(["lab", "all", *ASKED]) == 130

    def test_an_interrupt_before_the_first_answer_keeps_the_older_page(self, fake, tmp_path):
        assert main(["lab", "all", *ASKED]) == 0
        page = tmp_path / "attemper-lab" / "why-sqrt-dk.html"
        older = page.read_text()
        fake.fails["variance"] = KeyboardInterrupt()
        assert main(["lab", "all", *ASKED]) == 130
        assert page.read_text() == older

    def test_resume_goes_on(self, fake, capsys, tmp_path):
        fake.fails["softmax"] = KeyboardInterrupt()
        assert main(["lab", "all", *ASKED]) == 130
        fake.fails.clear()
        fake.calls.clear()
        assert main(["lab", "all", *ASKED, "--resume"]) == 0
        assert names_of(fake) == ["softmax", "saturation"]
        assert re.search(r"^variance +kept$", capsys.readouterr().err, re.MULTILINE)
        page = (tmp_path / "attemper-lab" / "why-sqrt-dk.html").read_text()
        assert page.count("<h3>Clock</h3>") == 3
        fake.calls.clear()
        assert main(["lab", "all", *ASKED, "--resume"]) == 0
        assert names_of(fake) == []
        assert main(["lab", "all", *ASKED]) == 0
        assert names_of(fake) == ["variance", "softmax", "saturation"]

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda record: record | {"config": record["config"] | {"seed": 1}},
            lambda record: record | {"versions": record["versions"] | {"numpy": "0"}},
            lambda record: record | {"schema": "attemper.lab/0"},
            lambda record: [],
        ],
        ids=["config", "versions", "schema", "other"],
    )
    def test_resume_asks_again_what_is_not_the_same(self, fake, tmp_path, spoil):
        assert main(["lab", "all", "--only", "variance"]) == 0
        path = tmp_path / "attemper-lab" / "variance.json"
        path.write_text(json.dumps(spoil(json.loads(path.read_text()))))
        assert main(["lab", "all", "--only", "variance", "--resume"]) == 0
        assert names_of(fake) == ["variance", "variance"]

    def test_resume_survives_a_torn_file(self, fake, tmp_path):
        assert main(["lab", "all", "--only", "variance"]) == 0
        (tmp_path / "attemper-lab" / "variance.json").write_text('{"schema"')
        (tmp_path / "attemper-lab" / "clock.json").write_text("")
        assert main(["lab", "all", "--only", "variance", "--resume"]) == 0
        assert names_of(fake) == ["variance", "variance"]

    def test_resume_shows_the_others_too(self, fake, tmp_path):
        assert main(["lab", "all", "--only", "variance"]) == 0
        assert main(["lab", "all", "--only", "softmax", "--resume"]) == 0
        page = (tmp_path / "attemper-lab" / "why-sqrt-dk.html").read_text()
        assert page.index("The summary of variance.") < page.index("The summary of softmax.")

    def test_one_that_fails_does_not_stop_the_others(self, fake, capsys, tmp_path):
        fake.fails["softmax"] = ZeroDivisionError("division by zero\nat length")
        assert main(["lab", "all", *ASKED]) == 2
        out, err = capsys.readouterr()
        assert names_of(fake) == ["variance", "softmax", "saturation"]
        assert err.endswith("attemper: the question 'softmax' failed: ZeroDivisionError: division by zero\n")
        assert re.search(r"^– +6  not run ", out, re.MULTILINE)
        assert not (tmp_path / "attemper-lab" / "softmax.json").exists()

    def test_jobs_and_the_file_of_finished_parts(self, fake, tmp_path):
        parts = tmp_path / "attemper-lab" / "saturation-runs.jsonl"
        assert main(["lab", "all", *ASKED, "--jobs", "2"]) == 0
        assert fake.calls[0][2] == {}
        assert fake.calls[2][2] == {"jobs": 2, "records": parts.relative_to(tmp_path)}
        parts.write_text("{}\n")
        fake.fails["saturation"] = KeyboardInterrupt()
        assert main(["lab", "all", "--only", "saturation", "--resume"]) == 0  # kept, and not asked
        assert parts.exists()
        assert main(["lab", "all", "--only", "saturation"]) == 130
        assert not parts.exists()
        assert parts.with_suffix(".old").read_text() == "{}\n"

    def test_out_is_a_file(self, fake, capsys, tmp_path):
        (tmp_path / "there").write_text("")
        assert main(["lab", "all", "--out", "there"]) == 2
        assert capsys.readouterr().err == "attemper: --out there is no folder that could be made.\n  Name another.\n"
        assert fake.calls == []

    def test_the_share_that_is_done(self):
        show = _lab_all._Show(["variance", "training"], quick=False)
        show.begin("variance")
        assert 0 < show.share(0.5) < 0.01
        show.end("variance", "kept")
        show.begin("training")
        assert show.share(1.0) == 1.0
        assert show.left(0.5) == ""  # nothing can be told yet
        show.started -= 600
        assert show.left(0.5) == "about 10 min left"
        assert show.left(0.95) == "about 32 s left"

    def test_on_a_terminal(self, fake, monkeypatch, capsys):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        assert main(["lab", "all", *ASKED]) == 0
        assert "saturation" in capsys.readouterr().err


def test_a_signal(tmp_path):
    code = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from attemper import lab
from attemper.lab import softmax, variance
variance.QUICK = variance.Config(d_k=(1, 4), relative=0.3, most=5000)
def slow(config, progress):
    print("ready", file=sys.stderr, flush=True)
    time.sleep(600)
softmax.run = slow
from attemper.cli import main
sys.exit(main(["lab", "all", "--quick", "--only", "variance", "softmax"]))
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    while process.stderr.readline() not in ("ready\n", ""):
        pass
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert out == ""
    kept = "1 of 2 answers are in attemper-lab; --resume goes on from them.\n"
    assert err == f"{kept}wrote attemper-lab/why-sqrt-dk.html\nattemper: interrupted.\n"
    record = json.loads((tmp_path / "attemper-lab" / "variance.json").read_text())
    assert record["versions"]["attemper"] == attemper.__version__
