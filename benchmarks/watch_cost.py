"""What watching costs: SmolLM2's forward pass, watched and not, interleaved in one process.

Beside it what people do today, output_attentions=True, with its memory. Writes benchmarks/results/watch_cost.json.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

WAYS = ("unwatched", "between samples", "sampled", "output_attentions")
CALLS = 2
"""Calls of which the faster counts: what disturbs a machine only ever adds."""


def build(tokens):
    import torch

    from attemper._models import load

    torch.set_num_threads(os.cpu_count() or 1)
    loaded = load("demo", tokens=tokens, sequences=1)
    return torch, loaded.model, {"input_ids": loaded.kwargs["input_ids"]}


def passes(torch, model, inputs, way):
    """The seconds of one forward pass, done in one of the ways."""
    import attemper

    def seconds(**more):
        found = []
        for _ in range(CALLS):
            start = time.perf_counter()
            with torch.no_grad():
                model(**inputs, **more)
            found.append(time.perf_counter() - start)
        return min(found)

    if way == "unwatched":
        return seconds()
    if way == "between samples":
        # The first call is a sample; those after it are what a run consists of.
        with attemper.watch(model, every=10**9), torch.no_grad():
            model(input_ids=inputs["input_ids"][:, :8])
            return seconds()
    if way == "sampled":
        with attemper.watch(model, every=1) as monitor:
            took = seconds()
            assert len(monitor.vitals) == model.config.num_hidden_layers
        return took
    was = model.config._attn_implementation  # noqa: SLF001
    model.set_attn_implementation("eager")
    try:
        return seconds(output_attentions=True)
    finally:
        model.set_attn_implementation(was)


def seconds_between_samples(torch, calls=20_000):
    """What watching adds to a call between samples.

    It is the same for every model, and too little to be seen against a forward pass of seconds on a busy machine: so it
    is measured on a module that does nothing.
    """
    import attemper

    def seconds(module):
        start = time.perf_counter()
        for _ in range(calls):
            module(None)
        return (time.perf_counter() - start) / calls

    watched, plain = torch.nn.Identity(), torch.nn.Identity()
    with attemper.watch(watched, every=10**9):
        watched(None)  # the sample
        rounds = [(seconds(watched), seconds(plain)) for _ in range(5)]
    return statistics.median(mine - theirs for mine, theirs in rounds)


def agreement(torch, model, inputs):
    """Whether watching changes what the model says: beside not a bit, nor while it writes; inside, by how much."""
    import attemper

    ids = inputs["input_ids"][:, :192]
    with torch.no_grad():
        plain = model(ids).logits
        written = model.generate(ids[:, :32], max_new_tokens=24, do_sample=False)
        with attemper.watch(model, every=1):
            beside = torch.equal(model(ids).logits, plain)
            again = torch.equal(model.generate(ids[:, :32], max_new_tokens=24, do_sample=False), written)
        with attemper.watch(model, every=1, observe="inside"):
            inside = model(ids).logits
        exact = model.double()(ids).logits
        model.float()
    # The error of one way against that of the other, both against float64.
    ratio = float((inside - exact).abs().max() / (plain - exact).abs().max())
    return {"same_bits": beside, "same_tokens": again, "inside_error": ratio}


def resident_kb(field):
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def peak_mb(way, tokens):
    """The memory one pass adds to a process of its own, as its high-water mark tells."""
    command = [sys.executable, __file__, "--tokens", str(tokens), "--memory", way]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", choices=WAYS, help="print the megabytes that one pass adds, and nothing else")
    given = parser.parse_args()
    torch, model, inputs = build(given.tokens)
    if given.memory:
        with torch.no_grad():
            model(input_ids=inputs["input_ids"][:, :8])
        before = resident_kb("VmRSS")
        # Sets the high-water mark, which loading the model has left above, back to where we are.
        Path("/proc/self/clear_refs").write_text("5")
        passes(torch, model, inputs, given.memory)
        print((resident_kb("VmHWM") - before) / 1024)
        return 0
    same = agreement(torch, model, inputs)
    print(same, file=sys.stderr)
    for way in WAYS:
        passes(torch, model, inputs, way)
    seconds = {way: [] for way in WAYS}
    for done in range(given.rounds):
        # In turn from either end, so that none always comes first.
        for way in WAYS if done % 2 else WAYS[::-1]:
            if way != "between samples":
                seconds[way].append(passes(torch, model, inputs, way))
        print(f"round {done + 1} of {given.rounds}", file=sys.stderr)
    rows = []
    for way in WAYS:
        if way == "between samples":
            added = seconds_between_samples(torch)
            print(f"{added * 1e6:.1f} µs are added to a call between samples", file=sys.stderr)
            ratios = [1 + added / plain for plain in seconds["unwatched"]]
        else:
            ratios = [mine / plain for mine, plain in zip(seconds[way], seconds["unwatched"], strict=True)]
        rows.append({"way": way, "time": statistics.median(ratios), "memory_mb": peak_mb(way, given.tokens)})
        print(f"{way:<18} {rows[-1]['time']:6.3f}×  {rows[-1]['memory_mb']:8.0f} MB", file=sys.stderr)
    record = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "model": f"SmolLM2-135M, {given.tokens} tokens, float32",
        "rounds": given.rounds,
        "agreement": same,
        "added_between_samples_us": added * 1e6,
        "rows": rows,
        # One step in fifty is a sample.
        "every_50": 1 + (rows[1]["time"] - 1) * 49 / 50 + (rows[2]["time"] - 1) / 50,
    }
    path = Path(__file__).parent / "results" / "watch_cost.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
