// Numbers and values as text. The Python side (_numbers.py) follows the same rules, digit for digit.

export const MINUS = "\u2212";

/** The number behind a plain value; null where there is none. Infinities travel as strings. */
export function real(value) {
  if (value === "inf") return Infinity;
  if (value === "-inf") return -Infinity;
  return typeof value === "number" ? value : null;
}

/** The number of one head, or null where it was not measured: a maximum over nothing is -inf. */
export function known(vital, value) {
  return value === vital.unmeasured ? null : real(value);
}

const minus = (text) => (text.startsWith("-") ? MINUS + text.slice(1) : text);

/** To so many significant digits, without trailing zeros. */
export function significant(value, digits = 4) {
  if (value === Infinity) return "\u221e";
  if (value === -Infinity) return MINUS + "\u221e";
  if (value === 0) return "0";
  const rounded = value.toExponential(digits - 1);
  const [mantissa, exponent] = rounded.split("e").map(Number);
  return minus(exponent >= -4 && exponent < 6 ? String(Number(rounded)) : `${mantissa}e${exponent}`);
}

/** `value ± error`, both to the second digit of the error. */
export function withError(value, error) {
  if (!Number.isFinite(value)) return shown(value);
  if (!Number.isFinite(error) || error === 0) return significant(value);
  const exponent = Number(error.toExponential(1).split("e")[1]);
  if (exponent <= -5 || exponent >= 3) return `${significant(value, 3)} ± ${significant(error, 2)}`;
  const decimals = Math.max(0, 1 - exponent);
  const text = value.toFixed(decimals);
  return `${Number(text) === 0 ? text.replace("-", "") : minus(text)} ± ${error.toFixed(decimals)}`;
}

/** Any plain value as text. Forms: "number", "share" (three decimals), "count", "text". */
export function shown(value, form = "number") {
  if (value === null || value === undefined || value === "") return "not measured";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (Array.isArray(value)) return value.map((v) => shown(v, form)).join(", ");
  const x = form === "text" ? null : real(value);
  if (x === null) return String(value);
  if (Number.isInteger(x) && form === "count") return minus(x.toLocaleString("en-US"));
  const size = Math.abs(x);
  if (form === "share" && (x === 0 || (size >= 1e-3 && size < 1e3))) return minus(x.toFixed(3));
  return significant(x);
}

export const asJSON = (value) => JSON.stringify(value, null, 1);

/** A Python literal that equals the value; short lists stay on one line. */
export function asPython(value, indent = "") {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === "inf" || value === "-inf" || value === "nan") return `float("${value}")`;
  if (typeof value !== "object") return JSON.stringify(value);
  const list = Array.isArray(value);
  const inner = `${indent}    `;
  const items = list
    ? value.map((v) => asPython(v, inner))
    : Object.entries(value).map(([key, v]) => `${JSON.stringify(key)}: ${asPython(v, inner)}`);
  const [open, close] = list ? "[]" : "{}";
  const line = `${open}${items.join(", ")}${close}`;
  if (line.length + indent.length <= 100 && !line.includes("\n")) return line;
  return `${open}\n${items.map((item) => `${inner}${item},\n`).join("")}${indent}${close}`;
}

/** About `count` round numbers that cover [low, high]. */
export function ticks(low, high, count = 5) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(i * step);
  return found;
}

/** Every how many of evenly spaced labels fit, `room` pixels each, at `step` pixels between them: a power of two. */
export function labelEvery(room, step) {
  let n = 1;
  while (n * step < room) n *= 2;
  return n;
}
