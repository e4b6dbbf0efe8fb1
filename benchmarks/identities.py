"""Statistics from somebody else's fused kernel, by the identities of the softmax, against tiles of torch operations.

logsumexp at once and twice the scale gives Σp² = Z(2β)/Z(β)²; attention over v = k gives
E_p[s] = scale·q·Attn(q, k, k), and entropy = logsumexp − E_p[s]. Needs a CUDA device; writes
benchmarks/results/identities-<device>.json.
"""

import json
import sys
from pathlib import Path

import torch

import attemper

ROUNDS = 7


def identities(q, k, is_causal):
    scale = q.shape[-1] ** -0.5
    flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001
    mixed, lse, *_ = flash(q, k, k, 0.0, is_causal, scale=scale)
    _, lse_twice, *_ = flash(q, k, k, 0.0, is_causal, scale=2 * scale)
    expected = scale * (q.float() * mixed.float()).sum(-1)
    return {"entropy": lse - expected, "collision": torch.exp(lse_twice - 2 * lse), "logsumexp": lse}


def tiles(q, k, is_causal):
    reading = attemper.read(q, k, is_causal=is_causal, backend="torch")
    return {"entropy": reading.entropy, "collision": reading.collision, "logsumexp": reading.logsumexp}


def exact(q, k, is_causal, rows):
    """Some rows of the first head, in float64."""
    s = q[0, 0, rows].double() @ k[0, 0].double().T * q.shape[-1] ** -0.5
    if is_causal:
        s = s.masked_fill(torch.arange(k.shape[-2], device=q.device) > rows[:, None], -torch.inf)
    lse = s.logsumexp(-1)
    p = (s - lse[:, None]).exp()
    entropy = -(p * torch.where(p > 0, s - lse[:, None], 0)).sum(-1)
    return {"entropy": entropy, "collision": p.square().sum(-1), "logsumexp": lse}


def milliseconds(way):
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    way()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def main() -> int:
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device.", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name()
    rows = []
    for dtype, heads, head_dim, length, sharpness in (
        (torch.bfloat16, 16, 128, 8192, 1),
        (torch.bfloat16, 32, 64, 8192, 1),
        (torch.bfloat16, 16, 128, 8192, 6),
        (torch.float16, 16, 128, 8192, 6),
    ):
        torch.manual_seed(0)
        q, k = (torch.randn(2, heads, length, head_dim, device="cuda", dtype=dtype) for _ in range(2))
        q = q * sharpness
        for is_causal in (False, True):
            ways = {"identities": identities, "tiles": tiles}
            found = {way: fn(q, k, is_causal) for way, fn in ways.items()}
            sample = torch.arange(17, length, 97, device="cuda")
            truth = exact(q, k, is_causal, sample)
            times = {way: [] for way in ways}
            for _ in range(ROUNDS):
                for way, fn in ways.items():
                    times[way].append(milliseconds(lambda fn=fn: fn(q, k, is_causal)))  # noqa: B023
            ratios = torch.tensor(times["tiles"]) / torch.tensor(times["identities"])
            row = {
                "case": f"{str(dtype)[6:]}, 2 × {heads} × {length} × {head_dim}, score std {sharpness}"
                + (", causal" if is_causal else ""),
                "identities_times_as_fast": float(ratios.median()),
                "milliseconds": {way: float(torch.tensor(t).median()) for way, t in times.items()},
                "largest_error": {
                    way: {f: float((found[way][f][0, 0, sample].double() - truth[f]).abs().max()) for f in truth}
                    for way in ways
                },
            }
            rows.append(row)
            print(json.dumps(row), file=sys.stderr)
    record = {"device": name, "torch": torch.__version__, "rounds": ROUNDS, "rows": rows}
    slug = name.lower().replace(" ", "-")
    path = Path(__file__).parent / "results" / f"identities-{slug}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
