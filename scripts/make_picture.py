"""Draw docs/temperature.svg, the picture of the README, from readings of random q and k."""

import sys
from pathlib import Path

import numpy as np

import attemper

WIDTHS = [4, 8, 16, 32, 64, 128, 256, 512]
KEYS = 1024
# Wong's colour-blind-safe blue and vermilion; also apart in grey.
LINES = [("sqrt_dk", "÷ √d_k", "#0072B2"), ("dk", "÷ d_k", "#8a8a8a"), ("unscaled", "not divided", "#D55E00")]
LEFT, RIGHT, TOP, BOTTOM, W, H = 60, 110, 20, 52, 720, 300


def entropies(scale: str) -> list[float]:
    rng = np.random.default_rng(0)
    means = []
    for width in WIDTHS:
        q = rng.standard_normal((4, 256, width), dtype=np.float32)
        k = rng.standard_normal((4, KEYS, width), dtype=np.float32)
        means.append(float(attemper.read(q, k, scale=scale, stats="normalized_entropy").normalized_entropy.mean()))
    return means


def main() -> int:
    def x(i: int) -> float:
        return LEFT + (W - LEFT - RIGHT) * i / (len(WIDTHS) - 1)

    def y(share: float) -> float:
        return TOP + (H - TOP - BOTTOM) * (1 - share)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {W} {H}"',
        ' font-family="system-ui, sans-serif" font-size="13">',
        f"<title>Entropy of attention over {KEYS} keys against head width, for three scales</title>",
        # A white ground, so that the picture reads the same on a dark page.
        f'<rect width="{W}" height="{H}" fill="#fff"/>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<path d="M{LEFT} {y(share):.1f}H{W - RIGHT}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(share) + 4:.1f}" text-anchor="end" fill="#555">{share:g}</text>')
    for i, width in enumerate(WIDTHS):
        parts.append(f'<text x="{x(i):.1f}" y="{H - BOTTOM + 20}" text-anchor="middle" fill="#555">{width}</text>')
    middle = LEFT + (W - LEFT - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{H - 10}" text-anchor="middle" fill="#333">head width d_k</text>')
    parts.append(
        f'<text transform="translate(16 {y(0.5):.1f}) rotate(-90)" text-anchor="middle" fill="#333">'
        "entropy ÷ ln(keys)</text>"
    )
    for scale, label, colour in LINES:
        values = entropies(scale)
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x(i):.1f}" cy="{y(v):.1f}" r="3.5" fill="{colour}"/>' for i, v in enumerate(values)]
        end = y(values[-1]) + 4 + (12 if scale == "sqrt_dk" else -4 if scale == "dk" else 0)
        parts.append(f'<text x="{W - RIGHT + 10}" y="{end:.1f}" fill="{colour}" font-weight="600">{label}</text>')
    path = Path(__file__).parent.parent / "docs" / "temperature.svg"
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")
    print(path.name, "drawn", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
