"""What watching adds to a training step of a compiled GPT: not watched, read every step, read every 50 steps.

The shape is that of the smallest GPT-2, 124 million parameters. All ways run in one process, in turn, a block of steps
at a time; a number is the median over rounds of a way's time over that of the unwatched block beside it. Nobody looks
at the Vitals while the clock runs; that they came, and from compiled passes, is checked afterwards. Writes
benchmarks/results/training_step-DEVICE.json.

    python benchmarks/training_step.py                                              # on a GPU: minutes
    python benchmarks/training_step.py --device cpu --layers 2 --width 128 --heads 4 --vocabulary 512
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

if __name__ != "__main__":
    # torch asks for a package of this name, and the scripts beside this one would have it find this file.
    raise ImportError(f"{__name__} is a program")

HERE = Path(__file__).resolve().parent
sys.path = [place for place in sys.path if Path(place).resolve() != HERE]

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import attemper  # noqa: E402

RESULTS = HERE / "results"
WAYS = {"unwatched": None, "every step": 1, "every 50 steps": 50}
BARS = {"every step": 1.05, "every 50 steps": 1.005}


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.between = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class GPT(nn.Module):
    def __init__(self, layers, width, heads, vocabulary, length):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.after, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._initialise)

    def _initialise(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.after(x)).flatten(0, 1).float(), targets.flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in {"layers": 12, "heads": 12, "width": 768, "vocabulary": 50304, "length": 1024}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--steps", type=int, default=50, help="in a block; with fewer than 50, that one has a sample too"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--to", type=Path, help="where to write instead")
    given = parser.parse_args()
    device = torch.device(given.device)
    on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = GPT(given.layers, given.width, given.heads, given.vocabulary, given.length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)
    ids = torch.randint(given.vocabulary, (given.batch, given.length + 1), device=device)
    fast = torch.compile(model, backend=given.backend)

    def wait():
        if on_gpu:
            torch.cuda.synchronize()

    def train(steps):
        for _ in range(steps):
            with torch.autocast(device.type, torch.bfloat16):
                loss = fast(ids[:, :-1], ids[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def block(way, steps):
        """(seconds per step, bytes at most) of a block of steps, with half as many before the clock starts.

        So that a sample is in the middle of the block, where the host is ahead of the GPU, as it is in training.
        """
        before = steps // 2
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        monitor = None if WAYS[way] is None else attemper.watch(fast, every=WAYS[way])
        train(before)
        wait()
        start = time.perf_counter()
        train(steps)
        wait()
        seconds = (time.perf_counter() - start) / steps
        if monitor is not None:
            monitor.stop()
            assert monitor.uncompiled is None, monitor.uncompiled
            assert len(monitor.history) == -(-(before + steps) // WAYS[way])
            assert len(monitor.vitals) == given.layers
            assert all((vitals.weights["pressure"] > 0).all() for vitals in monitor.vitals.values())
        return seconds, torch.cuda.max_memory_allocated() if on_gpu else 0

    name = torch.cuda.get_device_name(device) if on_gpu else f"{platform.machine()}, {os.cpu_count()} cores"
    sizes = {key: getattr(given, key) for key in ("layers", "heads", "width", "vocabulary", "length", "batch")}
    sizes["parameters"] = sum(p.numel() for p in model.parameters())
    for way in WAYS:
        print(f"compiling: {way}", file=sys.stderr, flush=True)
        block(way, 2)
    found = {way: [] for way in WAYS}
    memory = dict.fromkeys(WAYS, 0)
    for done in range(given.rounds):
        # In turn from either end, so that none always comes first.
        for way in list(WAYS)[:: 1 if done % 2 else -1]:
            seconds, most = block(way, given.steps)
            found[way].append(seconds)
            memory[way] = max(memory[way], most)
        shown = "  ".join(f"{way} {found[way][-1] * 1e3:.2f} ms" for way in WAYS)
        print(f"round {done + 1} of {given.rounds}: {shown}", file=sys.stderr, flush=True)
    rows = []
    for way in WAYS:
        ratios = [mine / plain for mine, plain in zip(found[way], found["unwatched"], strict=True)]
        row = {"way": way, "seconds": statistics.median(found[way]), "ratio": statistics.median(ratios)}
        rows.append(row | {"ratios": ratios, "bytes": memory[way], "bar": BARS.get(way)})
        bar = f"  (bar {BARS[way]})" if way in BARS else ""
        print(f"{way:<15} {row['seconds'] * 1e3:8.2f} ms  {row['ratio']:.4f}×{bar}", file=sys.stderr)
    record = {
        "device": name,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "model": sizes,
        "backend": given.backend,
        "steps": given.steps,
        "rounds": given.rounds,
        "rows": rows,
    }
    slug = name.lower().replace(",", "").replace(" ", "-")
    path = given.to or RESULTS / f"training_step-{slug}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}", file=sys.stderr)


main()
