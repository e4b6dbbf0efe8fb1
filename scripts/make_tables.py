"""Fill the tables of the documentation that are made from code and data: between <!-- table: name --> and <!-- end -->.

Draws the figures of docs/lab as well, from the answers beside them.
"""

import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from attemper import Reading
from attemper._bench._row import number as _quantity
from attemper._reading import FIELDS
from attemper._vitals import field_table
from attemper.lab import CLAIMS, QUESTIONS, Result
from attemper.report._lab_view import cell_text

ROOT = Path(__file__).parent.parent


def reading_table() -> str:
    """Field and meaning, from the docstrings under the fields themselves."""
    source = (ROOT / "src/attemper/_reading.py").read_text()
    meanings = dict(re.findall(r'    (\w+): Array \| None = (?:None|_\w+\(\d?\))\n    """(.*?)"""', source))
    meanings |= {name: getattr(Reading, name).__doc__.split("\n")[0] for name in FIELDS if name not in meanings}
    return _table(("field", "meaning"), [(f"`{name}`", meanings[name]) for name in FIELDS])


def vitals_table() -> str:
    return _table(
        ("field", "meaning", "merge"), [(f"`{name}`", meaning, merge) for name, meaning, merge in field_table()]
    )


def torch_table() -> str:
    """What torch's scaled_dot_product_attention does with the battery's cases, where it is not simply right."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from attemper.testing import check_operator

    found = {}
    for title, kernel in (("math", SDPBackend.MATH), ("fused", SDPBackend.FLASH_ATTENTION)):

        def sdpa(*operands, kernel=kernel, **keywords):
            with sdpa_kernel(kernel):
                return torch.nn.functional.scaled_dot_product_attention(*operands, **keywords)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns where it finds no fused kernel
            report = check_operator(sdpa, framework="torch", allowance=2)
        for row in report.rows:
            if row.status in ("wrong", "refused"):
                found.setdefault((row.group, row.name), {}).setdefault(title, row)
    rows = []
    order = list(dict.fromkeys((row.group, row.name) for row in report.rows))
    for (group, name), by_kernel in sorted(found.items(), key=lambda item: order.index(item[0])):
        cells = []
        for title in ("math", "fused"):
            row = by_kernel.get(title)
            if row is None:
                cells.append("right")
            elif row.status == "wrong":
                cells.append(f"**wrong**: {row.detail}")
            else:
                cells.append("raises")
        rows.append((group, name, *cells))
    caption = (
        f"torch {torch.__version__.partition('+')[0]} on the CPU; what is not listed is right, or not offered.\n\n"
    )
    return caption + _table(("group", "case", "math", "fused"), rows)


def benchmark_table() -> str:
    record = json.loads((ROOT / "benchmarks/results/numpy_road.json").read_text())
    rows = [
        (row["case"], f"{row['speed']:.2f}×", f"{row['memory_mb']:.0f} MB", f"{row['plain_memory_mb']:.0f} MB")
        for row in record["rows"]
    ]
    head = (
        "float32, one entry",
        "speed against the plain formula with the same statistics",
        "memory",
        "plain formula's",
    )
    return f"{record['machine']}.\n\n" + _table(head, rows)


def memory_table() -> str:
    record = json.loads((ROOT / "benchmarks/results/torch_memory.json").read_text())
    rows = [
        (f"{r['length']:,}", f"{r['forward_mb']:.0f} MB", f"{r['backward_mb']:.0f} MB", f"{r['matrix_mb']:,.0f} MB")
        for r in record["rows"]
    ]
    return f"{record['machine']}.\n\n" + _table(("length", "forward", "with backward", "one matrix of scores"), rows)


def watch_table() -> str:
    record = json.loads((ROOT / "benchmarks/results/watch_cost.json").read_text())
    names = {
        "unwatched": "not watched",
        "between samples": "watched, a call between samples",
        "sampled": "watched, a sampled call, beside",
        "output_attentions": "Hugging Face's `output_attentions=True`, for contrast",
    }
    rows = [(names[r["way"]], f"{r['time']:.2f}×", f"{r['memory_mb']:,.0f} MB") for r in record["rows"]]
    rows.append(("watched, `every=50`, on average", f"{record['every_50']:.3f}×", ""))
    same, added = record["agreement"], record["added_between_samples_us"]
    caption = (
        f"{record['model']}, forward, {record['machine']}. Between samples a call takes "
        f"{added:.0f} µs longer, whatever the model. Beside, the logits have the same bits: "
        f"{_yes(same['same_bits'])}; the same tokens are written with a cache: {_yes(same['same_tokens'])}. "
        f"Inside, the error against float64 is {same['inside_error']:.2f} times that of the model's own kernels."
    )
    return f"{caption}\n\n" + _table(("", "time", "memory a pass adds"), rows)


def _cpu(*sections: str) -> tuple[dict, list[dict]]:
    record = json.loads((ROOT / "benchmarks/results/cpu.json").read_text())
    return record, [row for row in record["rows"] if row["section"] in sections]


def cpu_machine_table() -> str:
    """No table but the sentence on what they were all measured with."""
    record, _ = _cpu()
    versions, rows = record["versions"], record["rows"]
    disturbed, counted = sum(r["discarded"] for r in rows), sum(r["rounds"] for r in rows)
    ran = [row for row in rows if not row["skipped"]]
    hoped = [check for row in ran for check in row["checks"] if check.get("target")]
    missed = [f"{_cpu_name(row)}: {_missed(row)}" for row in ran if not row["met"]]
    told = (
        f"{record['processor']} ({record['compiled_for']}), {record['instructions']}, {record['cores']} cores, "
        f"torch {versions['torch'].partition('+')[0]}, Numba {versions['numba']}, NumPy {versions['numpy']}, "
        f"{record['date'][:10]}. {disturbed:,} of {disturbed + counted:,} rounds were disturbed and left out. "
        f"{len(ran) - len(missed)} of {len(ran)} cases meet what is required of them; of {len(hoped)} forward cases "
        f"{sum(c['found'] >= c['target'] for c in hoped)} reach the speed that was hoped for, 1.25 in float32, 1.4 "
        "where that is causal, 2 in bfloat16"
    )
    return told + (". What is missed:\n\n" + "\n".join(f"- {one}" for one in missed) if missed else ".")


def _cpu_name(row: dict) -> str:
    threads = f"{row['threads']} thread{'' if row['threads'] == 1 else 's'}"
    return f"{row['section']}, {row['case']}, {row['dtype']}, {threads}"


def _missed(row: dict) -> str:
    return "; ".join(
        f"{c['what']} {_quantity(c['found'], c['unit'], 3)}, not {_quantity(c['limit'], c['unit'])}"
        for c in row["checks"]
        if not c["met"]
    )


def _cpu_grid(section: str, cell: Callable[[dict], str]) -> str:
    """A row for each case, a column for each dtype and number of threads."""
    _, rows = _cpu(section)
    columns = sorted({(r["dtype"], r["threads"]) for r in rows}, key=lambda c: (c[0] != "float32", c[1]))
    found = {(r["case"], r["dtype"], r["threads"]): r for r in rows}
    lines = []
    for case in sorted({r["case"] for r in rows}, key=_cpu_order):
        cells = (found.get((case, *column)) for column in columns)
        lines.append((case, *("" if row is None else cell(row) for row in cells)))
    heads = (f"{dtype}, {threads} thread{'' if threads == 1 else 's'}" for dtype, threads in columns)
    return _table(("heads × length × head_dim", *heads), lines)


def _cpu_order(case: str) -> tuple[bool, list[int]]:
    """Full before causal, then by head_dim and length."""
    _, length, head_dim = map(int, re.findall(r"\d+", case))
    return "causal" in case, [head_dim, length]


def _speed_and_share(row: dict) -> str:
    return f"{row['ratio']:.2f}× ({100 * row['share']:.0f} %)"


def cpu_forward_table() -> str:
    return _cpu_grid("forward", _speed_and_share)


def cpu_backward_table() -> str:
    return _cpu_grid("backward", _speed_and_share)


def cpu_statistics_table() -> str:
    """What all statistics add to the output, and what they take alone."""

    def cell(row: dict) -> str:
        found = {check["what"]: check["found"] for check in row["checks"]}
        return f"{100 * found['statistics']:+.0f} %, {found['read']:.2f}×"

    return _cpu_grid("forward", cell)


def cpu_by_hand_table() -> str:
    """Against what one writes by hand, where the matrix of scores is built."""
    _, rows = _cpu("forward")
    most = max(row["threads"] for row in rows)
    names = {"torch eager, same statistics": "eager torch with the same statistics", "NumPy by hand": "NumPy by hand"}
    lines = []
    for row in rows:
        seconds = row["seconds"]
        if row["threads"] == most and "torch eager, same statistics" in seconds:
            cells = (f"{seconds[n] / seconds['attemper']:.1f}×" if n in seconds else "" for n in names)
            lines.append((row["case"], row["dtype"], *cells))
    return _table(("", "dtype", *names.values()), lines)


def cpu_shapes_table() -> str:
    _, rows = _cpu("shapes")
    lines = [
        (r["case"], _clock(r["seconds"]["attemper"]), _clock(r["seconds"]["torch fused"]), f"{r['ratio']:.2f}×")
        for r in rows
    ]
    return _table(("float32, heads × length × head_dim", "attemper", "torch fused", "speed"), lines)


def cpu_rest_table() -> str:
    """Models, memory and calls: what is found and what is required."""
    _, rows = _cpu("model", "inside", "memory", "watch", "calls")
    lines = []
    for row in rows:
        if row["skipped"]:
            lines.append((row["case"], "", "", f"not measured: {row['skipped']}", ""))
            continue
        seconds, sizes = row["seconds"], row["megabytes"]
        mine, theirs = ("attemper", "torch fused") if row["section"] != "watch" else ("watched", "not watched")
        cells = [_clock(seconds[name]) if name in seconds else "" for name in (mine, theirs)]
        if sizes:
            cells = [f"{sizes[name]:.0f} MB" for name in (mine, theirs)]
        check = row["checks"][0]
        sign = "≥" if check["at_least"] else "≤"
        found, limit = (_quantity(check[which], check["unit"]) for which in ("found", "limit"))
        lines.append((row["case"], *cells, f"{check['what']} {found}", f"{sign} {limit}"))
    return _table(("float32", "attemper", "torch", "", "required"), lines)


def cpu_summary_table() -> str:
    """The gist, for a reader in a hurry."""
    record, rows = _cpu("forward", "backward", "shapes", "model")
    most = max(row["threads"] for row in rows)
    wanted = {
        ("forward", "4 × 2048 × 64"): "forward, 4 × 2048 × 64",
        ("forward", "4 × 2048 × 64 causal"): "forward, 4 × 2048 × 64 causal",
        ("backward", "4 × 2048 × 64 causal"): "forward and backward, 4 × 2048 × 64 causal",
        ("shapes", "2 × 8192 × 64 window 256"): "a window of 256 in 2 × 8192 × 64 (torch: a mask)",
        ("model", "a training step of a small GPT, 1024 tokens"): "a training step of a small GPT, 1024 tokens",
    }
    found = {(r["section"], r["case"], r["dtype"]): r for r in rows if r["threads"] == most}
    lines = []
    for (section, case), told in wanted.items():
        speeds = (found.get((section, case, dtype)) for dtype in ("float32", "bfloat16"))
        lines.append((told, *("" if row is None else f"{row['ratio']:.2f}×" for row in speeds)))
    caption = f"{record['processor']}, {record['instructions']}, {most} threads, torch {_short(record, 'torch')}."
    return f"{caption}\n\n" + _table(("speed against torch's fused attention", "float32", "bfloat16"), lines)


def _cuda() -> tuple[dict, list[dict]]:
    record = json.loads((ROOT / "benchmarks/results/cuda-nvidia-h200.json").read_text())
    return record, record["rows"]


def _cuda_rows(columns: dict[str, str], peer: str = "cudnn") -> str:
    """The peer's time over ours, for each problem."""
    _, rows = _cuda()
    cells = [
        (
            f"{row['head_dim']}, {row['length']}, {'causal' if row['causal'] else 'full'}",
            *(
                f"{row['seconds'][peer] / row['seconds'][name]:.2f}" if name in row["seconds"] else ""
                for name in columns
            ),
            row["date"],
        )
        for row in rows
    ]
    return _table(("head_dim, length, keys seen", *columns.values(), "measured"), cells)


def cuda_summary_table() -> str:
    """The gist, at the length in the middle."""
    record, rows = _cuda()
    ways = {
        "forward, no statistics": ("none", "cudnn"),
        "forward, maximum, logsumexp, entropy, collision": ("sums", "cudnn"),
        "forward, all statistics": ("all", "cudnn"),
        "forward and backward, all statistics and pressure": ("pressure, backward too", "cudnn, backward too"),
        "forward and backward, gradient flow too": ("flow, backward too", "cudnn, backward too"),
        "forward, all statistics, beside the matrix and statistics from it": ("all", "eager"),
    }
    rows = [row for row in rows if row["length"] == 8192]
    dates = " and ".join(sorted({row["date"] for row in rows}))
    rows = [row["seconds"] for row in rows]
    cells = []
    for told, (name, peer) in ways.items():
        ratios = (row[peer] / row[name] for row in rows)
        cells.append((told, *(f"{ratio:.0f}×" if ratio > 10 else f"{ratio:.2f}×" for ratio in ratios)))
    problems = ("16 heads of 128", "the same, causal", "32 heads of 64", "the same, causal")
    caption = f"{record['device']}, bfloat16, 2 × 8192 tokens, torch {_short(record, 'torch')}, {dates}."
    return f"{caption}\n\n" + _table(("speed against torch with cuDNN", *problems), cells)


def cuda_machine_table() -> str:
    record, rows = _cuda()
    versions, rounds = record["versions"], [row["rounds"] for row in rows]
    return (
        f"{record['device']}, torch {versions['torch']}, Triton {versions['triton']}, cuDNN {versions['cudnn']}; "
        f"medians of {min(rounds)}{f' to {max(rounds)}' if max(rounds) > min(rounds) else ''} rounds."
    )


def cuda_forward_table() -> str:
    """How many times as fast as cuDNN's forward pass."""
    columns = {"none": "no statistics", "sums": "sums over weights", "all": "all", "read": "`read`"}
    columns |= {"portable none": "Triton kernel, none", "portable all": "the same, all"}
    columns |= {"flash": "torch's flash", "flex": "FlexAttention + max"}
    return _cuda_rows(columns)


def cuda_backward_table() -> str:
    """How many times as fast as cuDNN, forward and backward."""
    columns = {"pressure": "with pressure", "flow": "and gradient flow"}
    columns = {f"{name}, backward too": title for name, title in columns.items()}
    columns["flow, backward too, own"] = "the same, deterministic"
    return _cuda_rows(columns, "cudnn, backward too")


def cuda_eager_table() -> str:
    """Against the matrix of scores and statistics from it."""
    _, rows = _cuda()
    cells = [
        (
            f"{row['head_dim']}, {row['length']}, {'causal' if row['causal'] else 'full'}",
            f"{row['seconds']['eager'] / row['seconds']['all']:.0f}×",
            f"{row['bytes']['eager'] / 2**30:.1f} GiB",
            f"{row['bytes']['all'] / 2**30:.2f} GiB",
        )
        for row in rows
        if "eager" in row["seconds"]
    ]
    return _table(("head_dim, length, keys seen", "times as fast", "memory it takes", "`attend` takes"), cells)


def cuda_special_table() -> str:
    """Windows, grouped heads and decoding, each against its own bar."""
    record, _ = _cuda()
    cells = []
    for row in record["special"]:
        if "of a copy" in row:
            rate = row["bytes per second"] / 1e12
            found = f"{rate:.1f} TB/s of keys and values, {row['of a copy']:.2f} of a copy in memory"
        else:
            found = f"{row['times as fast']:.2f}× as fast"
        cells.append((row["what"], str(row["head_dim"]), found, row["date"]))
    return _table(("what", "head_dim", "found", "measured"), cells)


def training_step_table() -> str:
    """What watching adds to a training step on a GPU."""
    record = json.loads((ROOT / "benchmarks/results/training_step-nvidia-h200.json").read_text())
    model = record["model"]
    cells = [(row["way"], f"{1e3 * row['seconds']:.1f} ms", f"{row['ratio']:.3f}×") for row in record["rows"]]
    caption = (
        f"{record['device']}, torch {_short(record, 'torch')}: {model['layers']} layers of {model['heads']} heads, "
        f"{model['parameters'] / 1e6:.0f} million parameters, {model['batch']} × {model['length']} tokens, bfloat16, "
        f"compiled; medians of {record['rounds']} blocks of {record['steps']} steps."
    )
    return f"{caption}\n\n" + _table(("watched", "a step", "of unwatched"), cells)


def _short(record: dict, package: str) -> str:
    return record["versions"][package].partition("+")[0]


def _clock(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _zoo() -> tuple[dict, list[dict]]:
    record = json.loads((ROOT / "benchmarks/results/planted_faults.json").read_text())
    return record, record["specimens"]


HALVES = {"tune": "tuned on", "holdout": "held out"}


def zoo_table() -> str:
    """Fault, rule, and how many were found in either half."""
    record, specimens = _zoo()
    rows = []
    for fault in record["table"]:
        mine = [(s["half"], f) for s in specimens for f in s["faults"] if f["fault"] == fault["fault"]]
        cells = []
        for half in HALVES:
            planted = [f for h, f in mine if h == half and "found" in f]
            cells.append(f"{sum(f['found'] for f in planted)} of {len(planted)}")
        hidden = sum(f.get("skipped") == "not identifiable" for _, f in mine)
        rules = " or ".join(f"`{rule}` ({severity})" for rule, severity in fault["rules"].items())
        rows.append((fault["fault"], fault["where"], rules, *cells, str(hidden)))
    head = ("planted", "where", "found as (at least)", *HALVES.values(), "not identifiable")
    return _table(head, rows)


def zoo_summary_table() -> str:
    """What the zoo says in three lines."""
    _, specimens = _zoo()
    rows = []
    for half, title in HALVES.items():
        mine = [s for s in specimens if s["half"] == half]
        planted = [f for s in mine for f in s["faults"] if "found" in f]
        alarms = sum(bool(s["healthy"]["alarms"]) for s in mine)
        same = [s["identical"]["output"] for s in mine if s.get("identical", {}).get("output") is not None]
        rows.append(
            (
                title,
                f"{len(mine)}",
                f"{sum(f['found'] for f in planted):,} of {len(planted):,} ({_percent(planted)})",
                f"{alarms} of {len(mine)}",
                f"{sum(x is True for x in same)} of {len(same)}",
            )
        )
    head = ("half", "healthy models", "planted faults found", "false alarms", "same bits when watched")
    return _table(head, rows)


LAB = ROOT / "docs/lab"
FIGURES = ("rules", "training")
"""Questions of which a page shows the figure."""


def _answer(question: str) -> dict:
    return json.loads((LAB / f"{question}.json").read_text())


def claims_table() -> str:
    """Every claim, its verdict and what was measured."""
    found: dict[int, list[tuple[str, dict]]] = {claim: [] for claim in CLAIMS}
    for question in QUESTIONS:
        for verdict in _answer(question)["verdicts"]:
            if verdict["claim"] is not None:
                found[verdict["claim"]].append((question, verdict))
    rows = []
    for claim, verdicts in found.items():
        outcomes = " / ".join(dict.fromkeys(f"**{verdict['outcome']}**" for _, verdict in verdicts))
        measured = "; ".join(verdict["measured"] for _, verdict in verdicts)
        asked = ", ".join(f"`{question}`" for question, _ in verdicts)
        rows.append((str(claim), CLAIMS[claim], outcomes, measured, asked))
    return _table(("", "claim", "verdict", "measured", "question"), [_escaped(row) for row in rows])


def claims_summary_table() -> str:
    """How many claims came out how."""
    outcomes: dict[str, list[int]] = {}
    for question in QUESTIONS:
        for verdict in _answer(question)["verdicts"]:
            if verdict["claim"] is not None and verdict["claim"] not in outcomes.setdefault(verdict["outcome"], []):
                outcomes[verdict["outcome"]].append(verdict["claim"])
    rows = [
        (outcome, str(len(outcomes[outcome])), ", ".join(map(str, sorted(outcomes[outcome]))))
        for outcome in ("holds", "holds only if", "does not hold", "not decided")
        if outcome in outcomes
    ]
    return _table(("of 25 claims", "", "which"), rows)


def training_table() -> str:
    """The verdict, what it rests on, and the tables of the full study."""
    record = _answer("training")
    verdict = record["verdicts"][0]
    parts = [
        f"**Claim 23 {verdict['outcome'].replace('if', 'under conditions')}.** {verdict['reason']}",
        record["summary"],
    ]
    for table in record["tables"]:
        head = tuple(table["columns"])
        rows = [tuple("" if cell is None else cell_text(cell) for cell in row) for row in table["rows"]]
        parts += [f"**{table['title']}**", _table(head, [_escaped(row) for row in rows])]
        if table["note"]:
            parts.append(table["note"])
    return "\n\n".join(parts)


def _escaped(row: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(cell.replace("|", "\\|") for cell in row)


def _percent(planted: list[dict]) -> str:
    return f"{100 * sum(f['found'] for f in planted) / max(len(planted), 1):.1f} %"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [" | ".join(cells) for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


QUICK = {
    "reading": reading_table,
    "vitals": vitals_table,
    "benchmark": benchmark_table,
    "memory": memory_table,
    "watch": watch_table,
    "cpu_machine": cpu_machine_table,
    "cpu_forward": cpu_forward_table,
    "cpu_backward": cpu_backward_table,
    "cpu_statistics": cpu_statistics_table,
    "cpu_by_hand": cpu_by_hand_table,
    "cpu_shapes": cpu_shapes_table,
    "cpu_rest": cpu_rest_table,
    "cpu_summary": cpu_summary_table,
    "cuda_summary": cuda_summary_table,
    "cuda_machine": cuda_machine_table,
    "cuda_forward": cuda_forward_table,
    "cuda_backward": cuda_backward_table,
    "cuda_eager": cuda_eager_table,
    "cuda_special": cuda_special_table,
    "training_step": training_step_table,
    "zoo": zoo_table,
    "zoo_summary": zoo_summary_table,
    "claims": claims_table,
    "claims_summary": claims_summary_table,
    "training_study": training_table,
}
TABLES = {**QUICK, "torch": torch_table}


def filled(text: str, only: dict = TABLES) -> str:
    """The text with each of its tables made anew."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        body = only[name]() if name in only else match[2]
        return f"<!-- table: {name} -->\n{body}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n(.*?)\n?<!-- end -->", fill, text, flags=re.DOTALL)


def main() -> int:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text()
        new = filled(text)
        if new != text:
            page.write_text(new)
            print(f"{page.relative_to(ROOT)} rewritten")
    for question in FIGURES:
        Result.from_dict(_answer(question)).save(LAB / f"{question}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
