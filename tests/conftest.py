"""One profile for every property: the same examples on every machine, and no clock; and a place to run commands in."""

import sys

import pytest
from hypothesis import settings

settings.register_profile("attemper", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("attemper")


@pytest.fixture
def place(monkeypatch, request, tmp_path):
    """A directory with the module's FACTORY in it; environment, sys.path and sys.modules as they were afterwards."""
    for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setenv("DISABLE_SAFETENSORS_CONVERSION", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "zoo", raising=False)
    (tmp_path / "zoo.py").write_text(request.module.FACTORY)
    yield
    sys.modules.pop("zoo", None)
