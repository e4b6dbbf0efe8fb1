"""A quick part of the zoo in benchmarks/zoo: planted faults are found, healthy models are left in peace."""

import sys
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import attemper  # noqa: E402

with warnings.catch_warnings():
    # What other packages deprecate on import is not this test's business.
    warnings.simplefilter("ignore")
    zoo = pytest.importorskip("zoo")

ARCHITECTURES = {architecture.name: architecture for architecture in zoo.architectures()}
FAULTS = {fault.name: fault for fault in zoo.FAULTS}

OWN = [
    "gpt-sdpa",
    "gpt-matmul",
    "gpt-einsum",
    "gpt-mha",
    "gpt-sdpa-grouped",
    "gpt-einsum-premultiplied-rotary",
    "gpt-matmul-softcap",
    "gpt-matmul-padded",
    "gpt-sdpa-mup",
    "vit-sdpa",
    "vit-matmul",
    "vit-einsum",
    "vit-mha",
    "vit-encoder",
    "vit-timm-unfused",
    "vit-diffusers-unfused",
    "seq2seq-sdpa",
]
HUGGING = ["hf-gpt2-eager", "hf-llama-padded-sdpa", "hf-opt-sdpa", "hf-bert-eager", "hf-t5-sdpa"]
# torch's own module takes no scale: a wrong one can only hide in its weights. T5 is right without.
SCALED = [name for name in [*OWN, *HUGGING] if not name.endswith(("-mha", "-encoder", "t5-sdpa"))]
PLANTED = [
    *[(name, "scale removed, all layers") for name in SCALED],
    *[(name, "scale 1/√d_model, one layer") for name in SCALED],
    *[(name, "scale doubled, one layer") for name in SCALED],
    *[(name, "NaN in one head") for name in [*OWN, *HUGGING]],
    *[(name, "one head grown 10×") for name in ("gpt-einsum", "gpt-mha", "vit-timm-unfused", "hf-llama-padded-sdpa")],
    *[(name, "padded head_dim") for name in ("gpt-sdpa", "gpt-einsum", "hf-llama-padded-sdpa")],
    *[(name, "float16 overflow") for name in ("gpt-matmul", "hf-bert-eager")],
    *[(name, "empty rows") for name in ("gpt-sdpa", "gpt-matmul", "gpt-einsum", "gpt-mha", "hf-gpt2-eager")],
    *[(name, "mask leak") for name in ("gpt-matmul-padded", "seq2seq-sdpa", "hf-llama-padded-sdpa", "hf-bert-eager")],
    ("gpt-matmul-softcap", "saturating softcap"),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The models are too small to share, and the other workers want their cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def specimens():
    """Each is built when it is first wanted."""
    built = {}

    def get(name):
        if name not in built:
            if name.startswith("hf-"):
                pytest.importorskip("transformers")
            built[name] = ARCHITECTURES[name].build(0)
        return built[name]

    return get


def check(specimen):
    return attemper.check(specimen.model, *specimen.args, loss=specimen.loss, **specimen.kwargs)


@pytest.mark.parametrize("name", [*OWN, *HUGGING])
def test_healthy_is_seen_whole_and_left_in_peace(specimens, name):
    specimen = specimens(name)
    checkup = check(specimen)
    assert [p.path for p in specimen.places if not any(p.names(v.site.path) for v in checkup.vitals)] == []
    assert zoo.alarms(checkup.findings) == []


@pytest.mark.parametrize("name", [*OWN, *HUGGING])
def test_watching_changes_no_bit(specimens, name):
    same = zoo.same(specimens(name))
    assert same["output"]
    assert same["output watched"]
    if specimens(name).has_loss:
        assert same["gradients"]


@pytest.mark.parametrize(("name", "fault"), PLANTED, ids=[f"{fault} in {name}" for name, fault in PLANTED])
def test_planted_fault_is_found_where_it_is(specimens, name, fault):
    planted = FAULTS[fault].plant(specimens(name), FAULTS[fault])
    verdict = zoo.judge(planted, check(planted.specimen).findings)
    assert verdict.found, verdict.instead
    assert verdict.exact


def test_zoo_is_large_and_both_halves_hold_every_kind():
    every = [(a.kind, zoo.half(a.name, seed)) for a in ARCHITECTURES.values() for seed in a.seeds]
    assert len(every) >= 60
    assert {(kind, half) for kind in ("own", "hugging") for half in ("tune", "holdout")} <= set(every)


@pytest.mark.parametrize("fault", ["factor 2 folded into W_q, all layers", "factor 1/2 folded into W_q, one layer"])
def test_factor_in_random_weights_is_not_identifiable(specimens, fault):
    with pytest.raises(zoo.NotIdentifiable):
        FAULTS[fault].plant(specimens("gpt-sdpa"), FAULTS[fault])


def test_planting_leaves_the_specimen_as_it_was(specimens):
    specimen = specimens("hf-gpt2-eager")
    before = {name: value.clone() for name, value in specimen.model.state_dict().items()}
    scales = [specimen.module(place).scaling for place in specimen.places]
    for fault in FAULTS.values():
        try:
            fault.plant(specimen, fault)
        except (zoo.NotApplicable, zoo.NotIdentifiable):
            continue
    assert all(torch.equal(value, before[name]) for name, value in specimen.model.state_dict().items())
    assert [specimen.module(place).scaling for place in specimen.places] == scales


def test_judging_wants_rule_severity_place_and_head(specimens):
    planted = FAULTS["NaN in one head"].plant(specimens("gpt-sdpa"), FAULTS["NaN in one head"])
    (place,) = planted.where
    (heads,) = planted.where.values()

    def finding(rule="nonfinite", severity="error", path=place.path, heads=heads):
        return attemper.Finding(
            rule=rule, severity=severity, where={path: heads}, headline="", cause="", remedy="", docs=""
        )

    assert zoo.judge(planted, [finding()]).found
    assert not zoo.judge(planted, []).found
    assert not zoo.judge(planted, [finding(rule="hot")]).found
    assert not zoo.judge(planted, [finding(severity="warning")]).found
    assert not zoo.judge(planted, [finding(path="blocks.0.mlp")]).found
    assert not zoo.judge(planted, [finding(heads=(0,))]).found
    assert not zoo.judge(planted, [finding(heads=())]).found
