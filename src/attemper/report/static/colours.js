// Colour maps: viridis for quantities, blue to orange through the paper's own grey for what has a sign.
// Both are ordered by lightness, so they hold for the colour-blind and in grey.

const VIRIDIS = [
  [68, 1, 84], [72, 40, 120], [62, 73, 137], [49, 104, 142], [38, 130, 142],
  [31, 158, 137], [53, 183, 121], [110, 206, 88], [181, 222, 43], [253, 231, 37],
];

const clamp01 = (x) => Math.min(1, Math.max(0, x));

function viridis(t) {
  const at = clamp01(t) * (VIRIDIS.length - 1);
  const low = Math.min(Math.floor(at), VIRIDIS.length - 2);
  return VIRIDIS[low].map((a, i) => Math.round(a + (VIRIDIS[low + 1][i] - a) * (at - low)));
}

/** OKLab to sRGB: equal steps in it look equal. */
function oklab([L, a, b]) {
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((c) => {
    const x = clamp01(c);
    return Math.round(255 * (x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055));
  });
}

// Lightness, then the two hues; the middle is near the paper of the theme.
const ENDS = {
  light: { below: [0.42, -0.045, -0.13], middle: [0.945, 0, 0.006], above: [0.52, 0.115, 0.105] },
  dark: { below: [0.78, -0.05, -0.105], middle: [0.3, 0, 0.002], above: [0.78, 0.075, 0.125] },
};

function diverging(t, theme) {
  const { below, middle, above } = ENDS[theme];
  const x = clamp01(t) * 2 - 1;
  const end = x < 0 ? below : above;
  return oklab(middle.map((m, i) => m + (end[i] - m) * Math.abs(x)));
}

/** The colour of `value` on a scale over `domain`, as [red, green, blue]. */
export function colour(value, scale, domain, theme) {
  const [low, high] = domain;
  const t = high > low ? (value - low) / (high - low) : 0.5;
  return scale === "diverging" ? diverging(t, theme) : viridis(t);
}

export const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;
