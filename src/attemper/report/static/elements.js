// Small helpers around the DOM. Text only ever enters as text nodes: nothing in a record is markup.

import { asJSON, asPython } from "./format.js";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

// The parser knows the namespace of SVG, so no address has to be written down here.
const SVG_NAMESPACE = (() => {
  const template = document.createElement("template");
  template.innerHTML = "<svg></svg>";
  return template.content.firstChild.namespaceURI;
})();

export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG_NAMESPACE, tag), attributes, children);

/** A sentence in which `code` between backticks is set as code. */
export function prose(text) {
  const pieces = text.split("`");
  if (pieces.length % 2 === 0) return [text];
  return pieces.map((piece, i) => (i % 2 ? el("code", {}, piece) : piece));
}

async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages opened from a disk may not have the clipboard; the selection always works.
    const area = el("textarea", { class: "offscreen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

function copyButton(label, title, text) {
  const button = el("button", { type: "button", class: "quiet", title }, label);
  let waiting = 0;
  button.addEventListener("click", async (event) => {
    event.stopPropagation();
    await toClipboard(text());
    button.textContent = "Copied";
    clearTimeout(waiting);
    waiting = setTimeout(() => (button.textContent = label), 1400);
  });
  return button;
}

/** "Copy as JSON" and "copy as Python" for what `data()` gives at the time of the click. */
export function copyButtons(data, what) {
  return el(
    "span",
    { class: "copies" },
    el("span", { class: "copies-word", "aria-hidden": "true" }, "Copy"),
    copyButton("JSON", `Copy ${what} as JSON`, () => asJSON(data())),
    copyButton("Python", `Copy ${what} as Python`, () => asPython(data())),
  );
}

/** A section with its heading, a line of explanation and copy buttons. */
export function section(id, title, lead, data, ...children) {
  return el(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    el(
      "div",
      { class: "section-head" },
      el("h2", { id: `${id}-title` }, title),
      data && copyButtons(data, title.toLowerCase()),
    ),
    lead && el("p", { class: "lead" }, lead),
    ...children,
  );
}

const tip = el("div", { class: "tip", role: "presentation", hidden: true });

/** Show the tooltip beside a point of the window, inside the window. */
export function showTip(x, y, ...children) {
  if (!tip.isConnected) {
    document.body.append(tip);
    // It stands where the window was, not where the page has gone.
    addEventListener("scroll", hideTip, { capture: true, passive: true });
  }
  tip.replaceChildren(...children.flat());
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const edge = document.documentElement.clientWidth;
  const left = x + 14 + width > edge - 8 ? x - 14 - width : x + 14;
  const top = y + 16 + height > window.innerHeight - 8 ? y - 12 - height : y + 16;
  tip.style.left = `${Math.max(8, Math.min(left, edge - width - 8))}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}

export function hideTip() {
  tip.hidden = true;
}

export const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const drawers = new Set();

/** Call `draw(width)` now and whenever the node's width or the theme changes. */
export function responsive(node, draw) {
  let last = 0;
  const run = (force) => {
    const width = Math.floor(node.clientWidth);
    if (!width || (!force && width === last)) return;
    last = width;
    draw(width);
  };
  new ResizeObserver(() => run(false)).observe(node);
  const redraw = () => run(true);
  drawers.add(redraw);
  return redraw;
}

export function redrawAll() {
  for (const redraw of drawers) redraw();
}

export const smooth = () => (matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth");
