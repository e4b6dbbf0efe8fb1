"""The training study: its design, its runs and their file, and the verdict that follows from records."""

import dataclasses
import json
import math
import multiprocessing
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

import torch

from attemper._errors import OptionError
from attemper._progress import silent
from attemper.lab import Result, _runs, _study, _study_data, training
from attemper.lab._comparison import Comparison, gap_at_equal_loss, share_difference, steps_to
from attemper.lab._result import FAILS, HOLDS, ONLY_IF, OPEN
from attemper.lab._statistics import share_of
from attemper.lab._study import MOMENTS, VITALS
from attemper.lab._study_data import RULES, TASKS, Cell

TINY = training.Config(
    seeds=2,
    rules=("unscaled", "sqrt_dk"),
    head_dim=(4, 16),
    depth=(1, 2),
    learning_rate=(1e-2,),
    initialiser=("unit",),
    at_head_dim=16,
    at_depth=1,
    at_learning_rate=1e-2,
    steps=10,
    batch=2,
    images=8,
    context=8,
    width=8,
    validation=8,
    length=40_000,
)
ONE = dataclasses.replace(TINY, head_dim=(16,), depth=(1,))


def answer(config=TINY, **how):
    return training.run(config, silent, **how)


@pytest.fixture(scope="module")
def tiny():
    return answer()


# The design


def test_design_has_every_cell_once():
    cells = training.Config().cells()
    assert len(set(cells)) == len(cells)
    wanted = set()
    for task in ("text", "digits"):
        base = Cell(task=task, rule="sqrt_dk", initialiser="unit", head_dim=64, depth=2, learning_rate=3e-3)
        wanted |= {dataclasses.replace(base, rule=rule) for rule in RULES}
        for rule in ("unscaled", "sqrt_dk"):
            own = dataclasses.replace(base, rule=rule)
            wanted |= {dataclasses.replace(own, head_dim=width) for width in (16, 32, 64, 128, 256, 512)}
            wanted |= {dataclasses.replace(own, depth=depth) for depth in (1, 2, 4, 8)}
            wanted |= {dataclasses.replace(own, learning_rate=rate) for rate in (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)}
            wanted |= {dataclasses.replace(own, initialiser=name) for name in ("unit", "gpt")}
    assert set(cells) == wanted
    assert Counter(cell for cell, _ in training.Config().runs()) == dict.fromkeys(cells, 5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("task", TASKS)
def test_every_rule_trains_on_both_tasks(task, rule):
    cell = dataclasses.replace(TINY.base(task), rule=rule)
    record = _study.train(cell, 0, TINY.settings())
    assert record["finite"]
    assert [look["step"] for look in record["moments"]] == sorted({round(share * 10) for share in MOMENTS})
    assert all(math.isfinite(layer[name]) for look in record["moments"] for layer in look["layers"] for name in VITALS)
    json.dumps(record, allow_nan=False)


def test_seeds_pair_initial_weights_and_data_but_not_different_seeds():
    base, settings = TINY.base("text"), TINY.settings()
    one, same, other = (
        _study.build(dataclasses.replace(base, rule=rule), settings, seed)["blocks"][0]["attention"].in_proj_weight
        for rule, seed in (("unscaled", 0), ("sqrt_dk", 0), ("sqrt_dk", 1))
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_unit_initialiser_gives_queries_of_variance_one():
    settings = dataclasses.replace(TINY.settings(), width=64)
    cell = dataclasses.replace(TINY.base("text"), head_dim=64)
    attention = _study.build(cell, settings, 0)["blocks"][0]["attention"]
    q, k, _ = attention.project(torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0)))
    assert 0.9 < q.var().item() < 1.1
    assert 0.9 < k.var().item() < 1.1


def test_training_and_validation_text_do_not_overlap():
    data = _study_data.load("text", training.Config().settings(), 0)
    train, held = ({row.tobytes() for row in part} for part in (data.train, data.validation))
    assert not train & held
    assert len(data.train) > 5 * len(data.validation)


# The runs


def test_same_bytes_again(tiny):
    text = tiny.to_json()
    assert answer().to_json() == text
    assert Result.from_json(text).to_json() == text


def test_same_bytes_from_two_processes_interrupted_and_resumed(tmp_path):
    path = tmp_path / "records.jsonl"

    def impatient(stage, done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.run(ONE, impatient, jobs=2, records=path)
    assert not multiprocessing.active_children()
    kept = path.read_text().splitlines()
    assert len(kept) == 2
    # Two of the runs from the processes, the others from here.
    assert answer(ONE, records=path).to_json() == answer(ONE).to_json()
    assert path.read_text().splitlines()[:2] == kept


def test_interrupted_study_goes_on(tiny, tmp_path, monkeypatch):
    path = tmp_path / "records.jsonl"
    trained = []
    real = _study.train

    def counted(cell, seed, settings):
        trained.append((cell, seed))
        if len(trained) == 4:
            raise KeyboardInterrupt
        return real(cell, seed, settings)

    monkeypatch.setattr(_runs, "train", counted)
    with pytest.raises(KeyboardInterrupt):
        answer(records=path)
    assert len(path.read_text().splitlines()) == 3
    # Killed in the middle of a line.
    with path.open("a") as file:
        file.write(path.read_text().splitlines()[0][:100])
    first = trained[:3]
    trained.clear()
    trained.extend([None] * 4)
    assert answer(records=path).to_json() == tiny.to_json()
    assert len(trained[4:]) == len(TINY.runs()) - 3
    assert not set(first) & set(trained[4:])
    trained.clear()
    assert answer(records=path).to_json() == tiny.to_json()
    assert not trained


def test_records_of_other_settings_are_not_taken(tmp_path):
    path = tmp_path / "records.jsonl"
    answer(ONE, records=path)
    before = len(path.read_text().splitlines())
    answer(dataclasses.replace(ONE, steps=11), records=path)
    assert len(path.read_text().splitlines()) == 2 * before


def test_threads_are_left_as_they_were():
    before = torch.get_num_threads()
    answer(ONE)
    assert torch.get_num_threads() == before


def test_run_that_breaks_down_has_no_nan():
    # A learning rate at which float32 overflows.
    cell = dataclasses.replace(TINY.base("digits"), learning_rate=1e30)
    record = _study.train(cell, 0, TINY.settings())
    assert not record["finite"]
    assert record["diverged"]
    assert record["curve"][-1]["loss"] is None
    json.dumps(record, allow_nan=False)
    wild = dataclasses.replace(ONE, learning_rate=(1e30,), at_learning_rate=1e30)
    json.loads(answer(wild).to_json())


def test_digits_from_a_file(tmp_path):
    from sklearn.datasets import load_digits

    bunch = load_digits()
    path = tmp_path / "digits.npz"
    np.savez(path, images=bunch.images, labels=bunch.target)
    named = dataclasses.replace(TINY.settings(), digits=str(path))
    assert _study_data.load("digits", named, 0).digest == _study_data.load("digits", TINY.settings(), 0).digest


IMAGES = np.zeros((30, 8, 8))
NO_DIGITS = {
    "text": b"root:x:0:0",
    "empty": b"",
    "array": IMAGES,
    "names": {"x": IMAGES},
    "pickled": {"images": np.array([None] * 30), "labels": np.zeros(30)},
    "size": {"images": np.zeros((30, 7, 7)), "labels": np.zeros(30)},
    "counts": {"images": IMAGES, "labels": np.zeros(29)},
    "labels": {"images": IMAGES, "labels": np.full(30, 10)},
    "few": {"images": IMAGES[:2], "labels": np.zeros(2)},
    "words": {"images": IMAGES, "labels": np.array(["one"] * 30)},
}


@pytest.mark.parametrize("kind", NO_DIGITS)
def test_files_that_hold_no_digits(tmp_path, kind):
    path, content = tmp_path / "digits.npz", NO_DIGITS[kind]
    with path.open("wb") as file:
        if isinstance(content, bytes):
            file.write(content)
        elif isinstance(content, dict):
            np.savez(file, **content)
        else:
            np.save(file, content)
    with pytest.raises(OptionError) as caught:
        answer(dataclasses.replace(ONE, digits=str(path)))
    assert str(caught.value) == (
        f"digits {str(path)!r} holds no images of digits.\n"
        "  Pass an .npz file with images, n × 8 × 8, and labels, n whole numbers from 0 to 9; n at least 3."
    )


@pytest.mark.parametrize("knob", ["text", "digits"])
def test_files_that_are_not_there(tmp_path, knob):
    missing = str(tmp_path / "nope")
    with pytest.raises(OptionError) as caught:
        answer(dataclasses.replace(ONE, **{knob: missing}))
    assert str(caught.value).startswith(f"{knob} {missing!r} cannot be read: No such file or directory.\n  Pass a")
    with pytest.raises(OptionError, match=r"cannot be read: Is a directory\."):
        answer(dataclasses.replace(ONE, **{knob: str(tmp_path)}))


def test_records_that_cannot_be_kept_are_refused_before_the_first_run(monkeypatch, tmp_path):
    monkeypatch.setattr(_runs, "train", lambda *_: pytest.fail("it was trained"))
    away = tmp_path / "away" / "runs.jsonl"
    with pytest.raises(OptionError) as caught:
        answer(ONE, records=away)
    assert str(caught.value) == (
        f"records {str(away)!r} cannot be written: No such file or directory.\n  Pass a file in a folder that is there."
    )
    with pytest.raises(OptionError, match=r"cannot be read: Is a directory\."):
        answer(ONE, records=tmp_path)


# The verdict


def record(*, worse=0.0, noise=0.0, entropy=0.8, gap=0.1, finite=True, diverged=False):
    """A made-up run whose loss falls from 3 to 1, or to as much above it as `worse` says."""
    level = 1 + worse + noise
    curve = [{"step": 15 * (i + 1), "loss": level + (3 - level) * 0.8 ** (i + 1)} for i in range(20)]
    moments = [
        {
            "step": round(share * 300),
            "training": level + (3 - level) * 0.8 ** (20 * share),
            "validation": level + gap + (3 - level) * 0.8 ** (20 * share),
            "layers": [dict.fromkeys(VITALS, entropy)],
        }
        for share in MOMENTS
    ]
    return {
        "start": 3.0,
        "finite": finite,
        "diverged": diverged or not finite,
        "curve": curve if finite else [{**point, "loss": None} for point in curve],
        "rise": 0.0,
        "training": level if finite else None,
        "validation": level + gap if finite else None,
        "training_accuracy": 0.5,
        "validation_accuracy": 0.5,
        "moments": moments if finite else moments[:1],
    }


def judged(make, config=None):
    config = config or training.Config()
    records = {(cell, seed): make(cell, seed) for cell, seed in config.runs()}
    points = training.evidence(config, Comparison(records))
    return training.by.conclude(points), points, training.reason(config, Comparison(records), points)


def jitter(cell, seed):
    # The same for both rules of a pair up to a little.
    return 0.05 * seed + (0.001 * seed if cell.rule == "unscaled" else 0.0)


def test_verdict_worse_everywhere():
    def make(cell, seed):
        if cell.rule != "unscaled":
            return record(noise=jitter(cell, seed))
        return record(worse=0.1 * cell.depth, noise=jitter(cell, seed), entropy=0.2, gap=0.2)

    outcome, points, _ = judged(make)
    assert outcome == HOLDS, [point for point in points if point.outcome != HOLDS]


def test_verdict_equal_everywhere():
    outcome, points, words = judged(lambda cell, seed: record(noise=jitter(cell, seed)))
    assert outcome == FAILS
    assert not [point for point in points if point.outcome == HOLDS]
    assert "training ends worse on text at no head width, at no depth" in words


def test_a_part_that_was_not_tried_is_named():
    """--quick has one depth and one learning rate: nothing can be said of deeper models, nor of instability."""
    told = ("Depth was not varied: all models have 2 layers", "No learning rate above 0.003 was tried")
    config = dataclasses.replace(training.QUICK, width=8)
    words = judged(lambda cell, seed: record(noise=jitter(cell, seed)), config)[2]
    assert all(one in words for one in told)
    words = judged(lambda cell, seed: record(noise=jitter(cell, seed)))[2]
    assert not any(one in words for one in told)


def test_verdict_better_everywhere():
    def make(cell, seed):
        return record(worse=-0.2 if cell.rule == "unscaled" else 0, noise=jitter(cell, seed))

    assert judged(make)[0] == FAILS


def test_sharp_attention_alone_is_no_harm():
    def make(cell, seed):
        return record(noise=jitter(cell, seed), entropy=0.1 if cell.rule == "unscaled" else 0.8)

    outcome, points, _ = judged(make)
    assert outcome == FAILS
    assert {point.part for point in points if point.outcome == HOLDS} == {training.by.ENTROPY.part}


def test_verdict_worse_from_a_head_width_on():
    def make(cell, seed):
        harmed = cell.rule == "unscaled" and cell.head_dim >= 128
        return record(worse=0.2 if harmed else 0, noise=jitter(cell, seed))

    outcome, _, words = judged(make)
    assert outcome == ONLY_IF
    assert "ends worse on text at head width 128, 256, 512, at no depth" in words
    assert "“is slower” holds in 6 of 28 comparisons and is refuted in 22" in words


def test_noise_larger_than_the_difference_decides_nothing():
    rng = np.random.default_rng(0)

    def make(cell, seed):
        return record(noise=rng.normal(0, 0.3), entropy=rng.uniform(), gap=rng.normal(0, 0.3))

    outcome, points, _ = judged(make)
    losses = [point.outcome for point in points if point.part == training.by.TRAINING.part]
    assert losses.count(OPEN) > 0.8 * len(losses)
    assert outcome == OPEN


def test_one_interval_in_many_is_no_condition():
    def make(cell, seed):
        odd = cell.rule == "unscaled" and cell.task == "text" and cell.head_dim == 32
        return record(worse=0.2 if odd else 0, noise=jitter(cell, seed))

    outcome, points, words = judged(make)
    assert {point.at for point in points if point.outcome == HOLDS} == {32}
    # Of the other parts some are refuted wherever they were measured.
    assert outcome == FAILS
    assert "ends worse on text at head width 32, " in words


def test_part_refuted_in_some_places_only_decides_nothing():
    def make(cell, seed):
        spread = 0.5 if cell.head_dim == 16 else 0.0
        return record(noise=spread * (seed % 2) * (cell.rule == "unscaled") - spread / 2 * (cell.rule == "unscaled"))

    config = training.Config(head_dim=(16, 64), depth=(2,), learning_rate=(3e-3,), initialiser=("unit",))
    _, points, _ = judged(make, config)
    losses = [point for point in points if point.part == training.by.TRAINING.part]
    assert {point.outcome for point in losses} == {OPEN, FAILS}
    assert training.by.conclude(losses) == OPEN


def test_runs_that_broke_down_count_as_having_learned_nothing():
    def make(cell, seed):
        broken = cell.rule == "unscaled" and cell.learning_rate > 3e-3
        return record(noise=jitter(cell, seed), finite=not broken)

    outcome, points, words = judged(make)
    assert outcome == ONLY_IF
    unstable = next(point for point in points if point.part == training.by.UNSTABLE)
    assert unstable.outcome == HOLDS
    assert unstable.evidence.estimate.value == 1
    assert "30 of 30 runs without √d_k and 0 of 30 with it diverged" in words


def test_steps_to_a_loss():
    curve = {"curve": [{"step": 10, "loss": 3.0}, {"step": 20, "loss": 1.0}]}
    assert steps_to(curve, 2.0) == 0.75
    assert steps_to(curve, 0.5) == 1.0
    assert steps_to(curve, 4.0) == 0.5
    assert steps_to({"curve": [{"step": 10, "loss": None}]}, 1.0) == 1.0


def test_gap_at_equal_loss_takes_the_loss_of_the_one_behind():
    ahead = {"moments": [{"training": t, "validation": t + g} for t, g in ((3.0, 0.0), (2.0, 0.2), (1.0, 0.8))]}
    behind = {"moments": [{"training": t, "validation": t + g} for t, g in ((3.0, 0.0), (1.5, 0.9))]}
    assert gap_at_equal_loss(behind, ahead) == pytest.approx(0.9 - 0.5)


def test_intervals_of_shares():
    # Newcombe 1998, table II, (a) and (e).
    found = share_difference(share_of(56, 70), share_of(48, 80))
    assert (round(found.low, 4), round(found.high, 4)) == (0.0524, 0.3339)
    found = share_difference(share_of(5, 56), share_of(0, 29))
    assert (round(found.low, 4), round(found.high, 4)) == (-0.0381, 0.1926)


def test_results_say_where_they_come_from(tiny):
    table = next(table for table in tiny.tables if table.title == "What was learned from")
    assert [row[0] for row in table.rows] == ["text", "digits"]
    assert all(len(row[2]) == 64 for row in table.rows)


def test_every_rule_is_another_scale():
    """Where two rules came to the same number, their comparison would say nothing."""
    config = training.Config()
    scales = {
        rule: _study._attention(dataclasses.replace(config.base("text"), rule=rule), config.settings()).scale_value()
        for rule in ("unscaled", "sqrt_dk", "dk", "sqrt_dmodel")
    }
    assert len(set(scales.values())) == len(scales)
    assert scales["sqrt_dmodel"] == pytest.approx(1 / math.sqrt(config.heads * config.at_head_dim))


def test_the_versions_are_those_of_the_runs():
    made = {("a cell", 0): {"torch": "9.8"}, ("a cell", 1): {"torch": "9.9"}}
    assert training._versions(Comparison(made))["torch"] == "9.8, 9.9"
