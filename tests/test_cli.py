"""The command: what goes to which stream, what it exits with, and what it says when something is wrong."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import attemper
from attemper import Reading, Site, Vitals
from attemper._checkup import Checkup
from attemper._diagnose import Finding
from attemper.cli import main

pytestmark = pytest.mark.usefixtures("place")

FACTORY = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=32, batch_first=True)
    return layer, torch.randn(2, 10, 32), lambda output: output.square().mean()

def clash():
    return nn.Identity(), {"loss": torch.ones(1)}

def ends():
    raise SystemExit(3)

def wrong():
    return nn.Linear(3, 4), torch.ones(2, 5)

def linear():
    return nn.Linear(3, 4), torch.ones(2, 3)

def full():
    class Full(nn.Module):
        def forward(self, x):
            raise MemoryError
    return Full(), torch.ones(1)
"""


def finding(severity):
    return Finding(
        rule="sink", severity=severity, where={}, headline="One sentence.", cause="c", remedy="r", docs="sink.md"
    )


@pytest.fixture
def stub(monkeypatch):
    """A check that finds what a test wants, and remembers its arguments."""
    calls = []

    def install(*severities):
        def check(model, *inputs, progress, name, **options):
            calls.append((model, inputs, {"name": name, **options}))
            progress("forward", 1, 2)
            findings = tuple(map(finding, severities))
            seen = Vitals.of(Reading(backend=""), Site(path="attn", heads=1))
            return Checkup(model={"name": name, "kind": "Linear"}, vitals=(seen,), findings=findings)

        monkeypatch.setattr(attemper, "check", check, raising=False)
        return calls

    return install


class TestExitStatus:
    @pytest.mark.parametrize(
        ("found", "level", "status"),
        [
            ([], None, 0),
            (["information"], None, 0),
            (["warning"], None, 0),
            (["information", "error"], None, 1),
            (["error"], "error", 1),
            (["warning"], "error", 0),
            (["warning"], "warning", 1),
            (["error"], "warning", 1),
            (["information"], "warning", 0),
            ([], "warning", 0),
            (["error"], "never", 0),
        ],
    )
    def test_fail_on(self, stub, capsys, found, level, status):
        stub(*found)
        assert main(["check", "zoo:make", "--json", *(["--fail-on", level] if level else [])]) == status
        assert [f["severity"] for f in json.loads(capsys.readouterr().out)["findings"]] == found

    @pytest.mark.parametrize(("level", "status"), [(None, 2), ("error", 2), ("warning", 2), ("never", 0)])
    def test_a_model_of_which_nothing_was_read_does_not_pass(self, capsys, level, status):
        arguments = ["check", "zoo:linear", "--json", "--html", "report.html"]
        assert main([*arguments, *(["--fail-on", level] if level else [])]) == status
        out, err = capsys.readouterr()
        assert json.loads(out)["vitals"] == []
        assert "wrote report.html\n" in err
        assert err.endswith(
            "attemper: No attention was seen, so nothing was checked.\n"
            "  Check the module that holds the attention; docs/watch.md says what is seen.\n"
        )

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "attemper: error: the following arguments are required: COMMAND"),
            (["check"], "attemper check: error: name a TARGET: demo, a directory, a hub id, or package.module:factory"),
            (
                ["chek", "demo"],
                (
                    "attemper: error: argument COMMAND: invalid choice: 'chek' "
                    "(choose from 'check', 'lab', 'trace', 'doctor', 'bench')"
                ),
            ),
            (
                ["check", "demo", "--tokens", "0"],
                "attemper check: error: argument --tokens: '0' is not a whole number above 0",
            ),
            (
                ["check", "demo", "--sequences", "two"],
                "attemper check: error: argument --sequences: 'two' is not a whole number above 0",
            ),
            (["check", "demo", "extra"], "attemper check: error: unrecognized arguments: extra"),
            (["doctor", "foo"], "attemper doctor: error: unrecognized arguments: foo"),
            (
                ["lab", "--quick"],
                "attemper lab: error: name a QUESTION for --quick: one that attemper lab lists, or all",
            ),
            (["lab", "--all"], "attemper lab: error: name a QUESTION for --all: one that attemper lab lists, or all"),
        ],
    )
    def test_usage(self, capsys, arguments, message):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("usage: attemper")
        # The usage is that of the command that was meant.
        assert err.split()[1:3] == ["attemper", arguments[0] if arguments and arguments[0] != "chek" else "[-h]"]
        # Later versions of Python leave the quotes out of choices.
        assert err.splitlines()[-1].replace("'check'", "check") == message.replace("'check'", "check")

    def test_version(self, capsys):
        with pytest.raises(SystemExit) as caught:
            main(["--version"])
        assert caught.value.code == 0
        assert capsys.readouterr().out == f"attemper {attemper.__version__}\n"


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["zoo:ends"], "attemper: zoo:ends() raised SystemExit.\n  3\n"),
            (
                ["zoo:none"],
                "attemper: zoo has no none.\n  Name a function in it that returns a model.\n",
            ),
            (
                ["zoo:make", "--text", "nothing.txt"],
                (
                    "attemper: There is no file nothing.txt.\n"
                    "  Give --text a text file, or - to read it from standard input.\n"
                ),
            ),
            (
                ["zoo:make", "--html", "report.htm"],
                "attemper: --html report.htm does not end in .html.\n  Write --html report.html.\n",
            ),
            (
                ["zoo:make", "--json", "away/report.json"],
                "attemper: There is no directory away.\n  Make it first, or write elsewhere.\n",
            ),
            (
                ["zoo:clash"],
                (
                    "attemper: The input 'loss' has the name of an argument of check.\n"
                    "  Pass it by position: let inputs be a tuple.\n"
                ),
            ),
        ],
    )
    def test_ours_are_their_text(self, stub, capsys, arguments, message):
        calls = stub()
        assert main(["check", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.endswith(message)
        assert "Traceback" not in err
        assert calls == []

    def test_unknown_device(self, capsys):
        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device here")
        assert main(["check", "zoo:make", "--device", "cuda"]) == 2
        message = "attemper: torch sees no CUDA device here.\n  Leave --device out, or give cpu.\n"
        assert capsys.readouterr().err == message

    def test_others_are_one_line_and_a_hint(self, capsys):
        assert main(["check", "zoo:wrong"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        hint = "\n  Run again with --traceback to see where.\n"
        assert err.endswith(hint)
        last = err.removesuffix(hint).splitlines()[-1]
        assert last.startswith("attemper: RuntimeError: ")
        assert last.endswith("mat1 and mat2 shapes cannot be multiplied (2x5 and 3x4)")

    def test_traceback(self, capsys):
        assert main(["check", "zoo:wrong", "--traceback"]) == 2
        assert "Traceback (most recent call last)" in capsys.readouterr().err
        assert main(["check", "zoo:none", "--traceback"]) == 2
        assert "OptionError: zoo has no none." in capsys.readouterr().err

    def test_out_of_memory(self, capsys):
        assert main(["check", "zoo:full"]) == 2
        message = (
            "attemper: out of memory.\n  Ask for less: fewer tokens or sequences, a smaller type, smaller sizes.\n"
        )
        assert capsys.readouterr().err.endswith(message)

    def test_probe_without_a_loss(self, stub, capsys, tmp_path):
        calls = stub()
        size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=8, **size)).save_pretrained("vit")
        assert main(["check", "vit", "--probe"]) == 2
        message = (
            "attemper: A probe compares losses, and 2 synthetic images give none.\n"
            "  Leave --probe out, or write a factory that returns (model, inputs, loss).\n"
        )
        assert capsys.readouterr().err.endswith(message)
        assert calls == []


class TestStreams:
    def test_json_alone_on_standard_output(self, stub, capsys):
        stub("warning")
        assert main(["check", "zoo:make", "--json"]) == 0
        out, err = capsys.readouterr()
        assert Checkup.from_dict(json.loads(out)).worst() == "warning"
        assert err == "calling zoo:make …\nzoo:make on its own inputs\nforward …\n"  # one line per stage, no spinner

    def test_json_before_the_target(self, stub, capsys):
        calls = stub()
        assert main(["check", "--json", "zoo:make"]) == 0
        assert json.loads(capsys.readouterr().out)["model"]["name"] == "zoo:make"
        assert len(calls) == 1

    def test_json_to_a_file(self, stub, capsys, tmp_path):
        stub("warning")
        assert main(["check", "zoo:make", "--json", "report.json"]) == 0
        out, err = capsys.readouterr()
        assert "sink" in out
        assert not out.startswith("{")
        assert err.endswith("wrote report.json\n")
        assert json.loads((tmp_path / "report.json").read_text())["model"]["name"] == "zoo:make"

    def test_html(self, stub, capsys, tmp_path):
        stub("warning")
        (tmp_path / "report.html").write_text("an older one")
        assert main(["check", "zoo:make", "--html", "report.html"]) == 0
        assert capsys.readouterr().err.endswith("wrote report.html\n")
        assert (tmp_path / "report.html").read_text().lower().startswith("<!doctype html>")
        assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".html") == ["report.html"]

    def test_a_failed_report_leaves_the_older_one(self, stub, monkeypatch, capsys, tmp_path):
        stub()
        (tmp_path / "report.json").write_text("an older one")

        def torn(self, path):
            path.write_text("{")
            raise OSError("no space left")

        monkeypatch.setattr(Checkup, "save", torn)
        assert main(["check", "zoo:make", "--json", "report.json"]) == 2
        message = "attemper: report.json could not be written: no space left.\n  Make room, or write elsewhere.\n"
        assert capsys.readouterr().err.endswith(message)
        assert [path.name for path in tmp_path.iterdir() if "report" in path.name] == ["report.json"]
        assert (tmp_path / "report.json").read_text() == "an older one"

    @pytest.mark.parametrize("option", ["--html", "--json"])
    def test_a_folder_that_takes_no_file_is_refused_at_once(self, stub, monkeypatch, capsys, option):
        """Asked for access, a folder may say yes and still take no file: /sys does, and a full disk."""
        calls, touch = stub(), Path.touch

        def refuse(self, *args, **options):
            if self.parent.name == "sys":
                raise PermissionError(13, "Permission denied", str(self))
            touch(self, *args, **options)

        Path("sys").mkdir()
        monkeypatch.setattr(Path, "touch", refuse)
        path = f"sys/report.{option.removeprefix('--')}"
        assert main(["check", "zoo:make", option, path]) == 2
        message = f"attemper: {path} cannot be written: Permission denied.\n  Write elsewhere.\n"
        assert capsys.readouterr().err == message
        assert calls == []

    def test_what_was_tried_leaves_nothing(self, stub, tmp_path):
        stub()
        (tmp_path / "report.json").write_text("an older one")
        before = sorted(tmp_path.iterdir())
        assert main(["check", "zoo:none", "--json", "report.json"]) == 2
        assert sorted(tmp_path.iterdir()) == before
        assert (tmp_path / "report.json").read_text() == "an older one"

    def test_warnings_are_one_line(self, stub, monkeypatch, capsys):
        stub()
        inner = attemper.check

        def check(*args, **options):
            import warnings

            warnings.simplefilter("always")
            warnings.warn("something is odd\nat length", stacklevel=1)
            return inner(*args, **options)

        monkeypatch.setattr(attemper, "check", check)
        assert main(["check", "zoo:make", "--json"]) == 0
        assert "warning: something is odd\n" in capsys.readouterr().err

    @pytest.mark.parametrize(("name", "coloured"), [("NO_COLOR", False), ("FORCE_COLOR", True)])
    def test_colour(self, stub, monkeypatch, capsys, name, coloured):
        stub("error")
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv(name, "1")
        if name == "NO_COLOR":
            monkeypatch.setenv("FORCE_COLOR", "1")
        assert main(["check", "zoo:make"]) == 1
        # Colours are the codes 30-37, 38, 90-97; bold is not one.
        colours = re.findall(r"\x1b\[(?:\d+;)*(?:3\d|9\d)[;m]", capsys.readouterr().out)
        assert bool(colours) is coloured

    def test_no_escapes_into_a_pipe(self, stub, monkeypatch, capsys):
        monkeypatch.delenv("NO_COLOR", raising=False)
        stub("error")
        assert main(["check", "zoo:make"]) == 1
        out, err = capsys.readouterr()
        assert "\x1b" not in out + err


class TestOptions:
    def test_what_check_is_given(self, stub):
        calls = stub()
        assert main(["check", "zoo:make", "--probe", "--dtype", "float64", "--json"]) == 0
        model, inputs, options = calls[0]
        assert isinstance(model, torch.nn.TransformerEncoderLayer)
        assert inputs[0].dtype == torch.float64
        assert inputs[0].shape == (2, 10, 32)
        assert options["name"] == "zoo:make"
        assert options["probe"] is True
        assert options["trained"] is None
        assert options["loss"](torch.full((2,), 3.0)) == 9

    def test_text_tokens_and_sequences(self, stub, capsys, tmp_path):
        calls = stub()
        size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        config = transformers.LlamaConfig(vocab_size=50, **size)
        transformers.LlamaForCausalLM(config).save_pretrained("llama")
        assert main(["check", "llama", "--tokens", "12", "--sequences", "3", "--json"]) == 0
        _, _, options = calls[0]
        assert options["input_ids"].shape == (3, 12)
        assert torch.equal(options["labels"], options["input_ids"])
        err = capsys.readouterr().err
        assert "llama on 3 sequences of 12 random token ids\n  No tokenizer: it ran on random token ids" in err
        (tmp_path / "note.txt").write_text("a short note")
        assert main(["check", "llama", "--text", "note.txt"]) == 2
        assert "A text needs a tokenizer" in capsys.readouterr().err


def run(code, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, **options
    )


class TestProcess:
    """What only a process of its own shows."""

    def test_module_and_script(self):
        script = Path(sys.executable).with_name("attemper")
        commands = [[sys.executable, "-m", "attemper"], *([[str(script)]] if script.exists() else [])]
        for command in commands:
            done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
            assert done.stdout == f"attemper {attemper.__version__}\n"

    def test_help_and_version_import_nothing_heavy(self):
        code = """
import sys
from attemper.cli import main
try:
    main(["--version"])
except SystemExit:
    pass
assert not {"torch", "transformers", "rich", "gguf"} & set(sys.modules), "imported too early"
"""
        assert run(code).returncode == 0

    def test_interrupt(self, tmp_path):
        (tmp_path / "slow.py").write_text(
            "import sys, time\ndef make():\n print('ready', file=sys.stderr, flush=True)\n time.sleep(600)\n"
        )
        # A shell that starts a job in the background lets it ignore interrupts: undone here.
        code = (
            "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from attemper.cli import main\n"
            "sys.exit(main(['check', 'slow:make', '--html', 'report.html', '--json', 'report.json']))"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
        while process.stderr.readline() not in ("ready\n", ""):
            pass
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 130
        assert out == ""
        assert err == "attemper: interrupted.\n"
        assert not [path.name for path in tmp_path.iterdir() if "report" in path.name]

    @pytest.mark.parametrize("arguments", [["lab"], ["lab", "softmax"], ["lab", "softmax", "--json"]])
    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
    def test_nowhere_to_write_to(self, arguments):
        with Path("/dev/full").open("w") as full:
            command = [sys.executable, "-m", "attemper", *arguments]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 2
        message = "attemper: No space left on device.\n  Make room, or write elsewhere.\n"
        assert done.stderr.endswith(message)
        assert "Errno" not in done.stderr
        assert "Exception ignored" not in done.stderr

    @pytest.mark.parametrize("module", ["attemper.cli._lab", "attemper._walk", "attemper.lab._questions"])
    def test_an_interrupt_while_the_command_is_imported(self, module):
        code = f"""
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from attemper.cli import main
sys.exit(main(["lab"]))
"""
        done = run(code)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "attemper: interrupted.\n")

    def test_no_network_and_pure_json(self, tmp_path):
        size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
        config = transformers.LlamaConfig(vocab_size=50, max_position_embeddings=32, **size)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
        code = """
import socket, sys
def refuse(*_, **__):
    raise AssertionError("a connection was opened")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from attemper.cli import main
sys.exit(main(["check", "llama", "--json", "--device", "cpu"]))
"""
        quiet = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_OFFLINE", "TRANSFORMERS_VERBOSITY")
        environment = {name: value for name, value in os.environ.items() if name not in quiet}
        done = run(code, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        checkup = Checkup.from_dict(json.loads(done.stdout))
        assert [v.site.path for v in checkup.vitals] == [f"model.layers.{i}.self_attn" for i in range(2)]
        assert checkup.loss > 0
        assert "Traceback" not in done.stderr
        assert "\x1b" not in done.stderr
        assert "%" not in done.stderr  # no bar of anybody's


def test_end_to_end_on_a_factory(capsys, tmp_path):
    assert main(["check", "zoo:make", "--html", "report.html", "--json", "report.json"]) == 0
    out, err = capsys.readouterr()
    assert "zoo:make" in out
    assert err.endswith("wrote report.html\nwrote report.json\n")
    record = json.loads((tmp_path / "report.json").read_text())
    assert len(record["vitals"]) == 1
    assert record["loss"] > 0
