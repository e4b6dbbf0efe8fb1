// The layers × heads map: one canvas per group of sites, one vital at a time.

import { colour, css } from "./colours.js";
import { known, labelEvery, shown } from "./format.js";
import { theme } from "./theme.js";
import { el, hideTip, responsive, showTip, svg, variable } from "./elements.js";

const LARGEST_CELL = 40;
const TALLEST = { across: 400, down: 620 };
const NARROW = 520;

const cellKey = (site, head) => `${site}:${head}`;

/** Every (site, head) of a finding, as keys. */
export const keysOf = (finding) =>
  new Set(finding.heads.flatMap(([site, heads]) => heads.map((head) => cellKey(site, head))));

export class HeadMap {
  /** `onOpen(site, head)` is told of clicks and the Enter key. */
  constructor(record, view, onOpen) {
    this.record = record;
    this.view = view;
    this.onOpen = onOpen;
    this.vital = view.vitals[0];
    this.stretched = false;
    this.marked = null;
    // Where the keyboard is, and the head beside the map, which a click or Enter chose.
    this.cursor = null;
    this.opened = null;
    this.announcer = el("p", { class: "offscreen", "aria-live": "polite" });
    this.legend = el("div", { class: "legend" });
    this.charts = view.groups.map((group) => this.chart(group));
    this.node = el(
      "div",
      { class: "map" },
      this.charts.map((chart) => chart.figure),
      this.announcer,
    );
  }

  value(site, head) {
    const values = this.record.vitals[site][this.vital.name] || [];
    return known(this.vital, values[head]);
  }

  /** The head that the map points at. */
  get pointed() {
    return this.charts.some(({ canvas }) => canvas === document.activeElement) ? this.cursor : this.opened;
  }

  get domain() {
    return this.stretched ? this.vital.data : this.vital.domain;
  }

  show(vital) {
    this.vital = vital;
    this.draw();
  }

  stretch(on) {
    this.stretched = on;
    this.draw();
  }

  mark(keys) {
    this.marked = keys;
    this.draw();
  }

  select(site, head) {
    this.opened = site === null ? null : { site, head };
    this.cursor = this.opened ?? this.cursor;
    this.draw();
  }

  draw() {
    for (const chart of this.charts) chart.redraw();
    this.drawLegend();
  }

  chart(group) {
    const canvas = el("canvas", {
      tabindex: 0,
      role: "application",
      "aria-roledescription": "map of heads",
      "aria-label": `Layers by heads, ${group.template || "all sites"}. Arrow keys move, Enter opens a head.`,
    });
    const holder = el("div", { class: "canvas-holder" }, canvas);
    const name = this.view.groups.length > 1 ? group.template || "other sites" : "";
    const chart = { group, canvas, figure: el("figure", {}, name && el("figcaption", {}, el("code", {}, name)), holder) };
    chart.redraw = responsive(holder, (width) => this.paint(chart, width));
    const at = (event) => this.hit(chart, event);
    canvas.addEventListener("pointermove", (event) => {
      const found = event.pointerType === "touch" ? null : at(event);
      canvas.style.cursor = found ? "pointer" : "default";
      // All there is about the opened head stands beside the map.
      if (found && !same(found, this.opened)) this.tell(found, event.clientX, event.clientY);
      else hideTip();
    });
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("click", (event) => {
      const found = at(event);
      hideTip();
      if (found) this.onOpen(found.site, found.head);
    });
    canvas.addEventListener("keydown", (event) => this.key(chart, event));
    canvas.addEventListener("focus", () => {
      // A click focuses too, and then selects what it hit; only the keyboard needs a place to start.
      if (canvas.matches(":focus-visible")) this.move(chart, 0, 0);
    });
    canvas.addEventListener("blur", () => {
      hideTip();
      this.draw();
    });
    return chart;
  }

  /** Cell sizes and margins, alike in every group. Layers run across where there is room, and down on a phone. */
  layout(group, width) {
    const short = (i) => this.view.sites[i].short;
    const most = (count) => Math.max(1, ...this.view.groups.map(count));
    const layers = most(({ sites }) => sites.length);
    const heads = Math.max(1, ...this.view.sites.map((site) => site.heads));
    const longest = Math.max(...this.view.sites.map((site) => site.short.length));
    const named = this.view.groups.some(({ template }) => !template) || longest > 6;
    const down = named || (width < NARROW ? heads < layers * 2 : (width - 40) / layers < 5);
    const left = down ? Math.min(width * 0.35, Math.max(34, longest * 7 + 14)) : 34;
    const [columns, rows] = down ? [heads, layers] : [layers, heads];
    const tallest = down ? TALLEST.down : TALLEST.across;
    const ratio = window.devicePixelRatio || 1;
    const snap = (size) => (size >= 6 ? Math.floor(size) : Math.max(1, Math.floor(size * ratio)) / ratio);
    const across = snap(Math.min(LARGEST_CELL, (width - left - 2) / columns));
    const tall = snap(Math.min(LARGEST_CELL, Math.max(4, tallest / rows), Math.max(across * 1.35, 7)));
    const gap = Math.min(across, tall) >= 8 ? 1 : 0;
    const own = Math.max(1, ...group.sites.map((i) => this.view.sites[i].heads));
    const size = down ? { columns: own, rows: group.sites.length } : { columns: group.sites.length, rows: own };
    return { down, left, top: 4, ...size, across, tall, gap, names: group.sites.map(short), heads: own, ratio };
  }

  position(box, layer, head) {
    const [column, row] = box.down ? [head, layer] : [layer, head];
    return [box.left + column * box.across, box.top + row * box.tall];
  }

  paint(chart, width) {
    const box = this.layout(chart.group, width);
    chart.box = box;
    const height = box.top + box.rows * box.tall + 38;
    const { canvas } = chart;
    canvas.width = Math.round(width * box.ratio);
    canvas.height = Math.round(height * box.ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(box.ratio, box.ratio);
    const mood = theme();
    const ink = variable("--ink");
    const hatch = variable("--hatch");
    const wrong = variable("--error");
    const [w, h] = [box.across - box.gap, box.tall - box.gap];
    chart.group.sites.forEach((site, layer) => {
      for (let head = 0; head < this.view.sites[site].heads; head += 1) {
        const [x, y] = this.position(box, layer, head);
        const value = this.value(site, head);
        pen.globalAlpha = this.marked && !this.marked.has(cellKey(site, head)) ? 0.16 : 1;
        if (value === null) {
          pen.strokeStyle = hatch;
          pen.lineWidth = 1;
          pen.strokeRect(x + 0.5, y + 0.5, Math.max(0, w - 1), Math.max(0, h - 1));
          stroke(pen, [[x, y + h, x + w, y]]);
        } else if (!Number.isFinite(value)) {
          pen.fillStyle = wrong;
          pen.fillRect(x, y, w, h);
          pen.strokeStyle = variable("--paper");
          pen.lineWidth = 1.5;
          if (w > 7) stroke(pen, [[x + 3, y + 3, x + w - 3, y + h - 3], [x + w - 3, y + 3, x + 3, y + h - 3]]);
        } else {
          pen.fillStyle = css(colour(value, this.vital.scale, this.domain, mood));
          pen.beginPath();
          if (pen.roundRect && box.gap) pen.roundRect(x, y, w, h, Math.min(3, w / 6));
          else pen.rect(x, y, w, h);
          pen.fill();
        }
      }
    });
    pen.globalAlpha = 1;
    // On cells this small a line would hide what it points at; the dimmed rest says enough.
    if (this.marked && box.gap) this.outline(pen, chart, ink);
    this.axes(pen, box, variable("--soft"));
    const { pointed } = this;
    const index = pointed ? chart.group.sites.indexOf(pointed.site) : -1;
    if (index >= 0) {
      const [x, y] = this.position(box, index, pointed.head);
      pen.lineWidth = 2;
      pen.strokeStyle = variable("--paper");
      pen.strokeRect(x - 1, y - 1, w + 2, h + 2);
      pen.strokeStyle = ink;
      pen.strokeRect(x - 2.5, y - 2.5, w + 5, h + 5);
    }
  }

  /** A line around the marked heads, along the edges they do not share. */
  outline(pen, chart, ink) {
    const { box, group } = chart;
    const has = (layer, head) => group.sites[layer] !== undefined && this.marked.has(cellKey(group.sites[layer], head));
    const lines = [];
    group.sites.forEach((site, layer) => {
      for (let head = 0; head < this.view.sites[site].heads; head += 1) {
        if (!has(layer, head)) continue;
        const [x0, y0] = this.position(box, layer, head);
        const [x, y] = [x0 - box.gap / 2, y0 - box.gap / 2];
        const step = box.down ? [[0, -1], [0, 1], [-1, 0], [1, 0]] : [[-1, 0], [1, 0], [0, -1], [0, 1]];
        const [west, east, north, south] = step.map(([l, n]) => has(layer + l, head + n));
        if (!west) lines.push([x, y, x, y + box.tall]);
        if (!east) lines.push([x + box.across, y, x + box.across, y + box.tall]);
        if (!north) lines.push([x, y, x + box.across, y]);
        if (!south) lines.push([x, y + box.tall, x + box.across, y + box.tall]);
      }
    });
    pen.strokeStyle = ink;
    pen.lineWidth = 1.5;
    pen.lineCap = "square";
    stroke(pen, lines);
  }

  axes(pen, box, ink) {
    pen.fillStyle = ink;
    pen.font = `11px ${variable("--sans")}`;
    const headNames = Array.from({ length: box.heads }, (_, i) => String(i));
    const [bottomNames, sideNames] = box.down ? [headNames, box.names] : [box.names, headNames];
    const widest = Math.max(...bottomNames.map((name) => pen.measureText(name).width));
    const stepX = labelEvery(widest + 8, box.across);
    const stepY = labelEvery(15, box.tall);
    const base = box.top + box.rows * box.tall;
    pen.textAlign = "center";
    pen.textBaseline = "alphabetic";
    bottomNames.forEach((name, i) => {
      if (i % stepX === 0) pen.fillText(name, box.left + (i + 0.5) * box.across, base + 14);
    });
    const middle = box.left + Math.max(20, (box.columns * box.across) / 2);
    pen.fillText(box.down ? "head" : "layer", middle, base + 31);
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    sideNames.forEach((name, i) => {
      if (i % stepY === 0) pen.fillText(fit(pen, name, box.left - 10), box.left - 7, box.top + (i + 0.5) * box.tall);
    });
    pen.textAlign = "left";
    pen.textBaseline = "alphabetic";
    pen.fillText(box.down ? (sideNames.every((n) => /^[\d.]+$/.test(n)) ? "layer" : "site") : "head", 0, base + 14);
  }

  hit(chart, event) {
    const { box, group, canvas } = chart;
    if (!box) return null;
    const bounds = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - bounds.left - box.left) / box.across);
    const row = Math.floor((event.clientY - bounds.top - box.top) / box.tall);
    const [layer, head] = box.down ? [row, column] : [column, row];
    const site = group.sites[layer];
    return site === undefined || head < 0 || head >= this.view.sites[site].heads ? null : { site, head };
  }

  sentence({ site, head }) {
    const value = this.value(site, head);
    return { value: shown(plainly(value), this.vital.form), place: `${this.view.sites[site].title || "Attention"}, head ${head}` };
  }

  tell(found, x, y) {
    const { value, place } = this.sentence(found);
    const { path, title } = this.view.sites[found.site];
    showTip(
      x, y,
      el("strong", {}, value), el("span", {}, this.vital.label.toLowerCase()),
      el("span", {}, place), path !== title ? el("code", {}, path) : "",
    );
  }

  key(chart, event) {
    const { box } = chart;
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key in moves && box) {
      const [dx, dy] = moves[event.key];
      this.move(chart, box.down ? dy : dx, box.down ? dx : dy);
    } else if ((event.key === "Enter" || event.key === " ") && this.cursor) {
      hideTip();
      this.onOpen(this.cursor.site, this.cursor.head);
    } else if (event.key === "Escape") {
      this.onOpen(null, null);
      hideTip();
    } else {
      return;
    }
    event.preventDefault();
  }

  move(chart, layers, heads) {
    const { group } = chart;
    const here = this.cursor ? group.sites.indexOf(this.cursor.site) : -1;
    const layer = here < 0 ? 0 : Math.min(group.sites.length - 1, Math.max(0, here + layers));
    const site = group.sites[layer];
    const last = this.view.sites[site].heads - 1;
    if (last < 0) return;
    const head = here < 0 ? 0 : Math.min(last, Math.max(0, this.cursor.head + heads));
    this.cursor = { site, head };
    this.draw();
    const { value, place } = this.sentence(this.cursor);
    this.announcer.textContent = `${place}: ${this.vital.label} ${value}`;
    hideTip();
    // The browser may scroll to what gets the focus, and does so first.
    requestAnimationFrame(() => this.tellCursor(chart));
  }

  /** The tooltip of the keyboard: beside its cell. */
  tellCursor({ box, canvas, group }) {
    if (!box || !this.cursor || same(this.cursor, this.opened) || document.activeElement !== canvas) return;
    const bounds = canvas.getBoundingClientRect();
    const [x, y] = this.position(box, group.sites.indexOf(this.cursor.site), this.cursor.head);
    this.tell(this.cursor, bounds.left + x + box.across - 8, bounds.top + y + box.tall - 8);
  }

  /** Every head's value; `finite` leaves out the missing and the infinite. */
  heads({ finite = true } = {}) {
    const all = this.view.sites.flatMap((site, i) =>
      Array.from({ length: site.heads }, (_, head) => ({ site: i, head, value: this.value(i, head) })),
    );
    return finite ? all.filter(({ value }) => Number.isFinite(value)) : all;
  }

  drawLegend() {
    const [low, high] = this.domain;
    const bins = new Array(48).fill(0);
    const slot = (value) => Math.min(47, Math.max(0, Math.floor(((value - low) / (high - low || 1)) * 48)));
    const everyone = this.heads({ finite: false });
    for (const { value } of everyone) if (Number.isFinite(value)) bins[slot(value)] += 1;
    const most = Math.max(1, ...bins);
    const mood = theme();
    const bars = bins.map((count, i) => {
      const tall = count ? Math.max(1.5, (count / most) * 30) : 0;
      return svg("rect", { x: i, y: 31 - tall, width: 0.86, height: tall, class: "histogram" });
    });
    for (let i = 0; i < 192; i += 1) {
      const fill = css(colour(low + ((i + 0.5) / 192) * (high - low), this.vital.scale, [low, high], mood));
      bars.push(svg("rect", { x: i / 4, y: 33, width: i < 191 ? 0.5 : 0.25, height: 9, fill }));
    }
    const missing = everyone.filter(({ value }) => value === null).length;
    const infinite = everyone.filter(({ value }) => value !== null && !Number.isFinite(value)).length;
    const here = this.pointed ? this.value(this.pointed.site, this.pointed.head) : null;
    const marker = Number.isFinite(here) &&
      svg("rect", { x: ((here - low) / (high - low || 1)) * 48 - 0.2, y: 31, width: 0.4, height: 13, class: "marker" });
    this.legend.replaceChildren(
      svg("svg", { viewBox: "0 0 48 44", preserveAspectRatio: "none", role: "img", "aria-label": "Heads by value" }, bars, marker),
      el(
        "div",
        { class: "legend-numbers" },
        [low, (low + high) / 2, high].map((x) => el("span", {}, shown(x, this.vital.form === "count" ? "number" : this.vital.form))),
      ),
      missing ? el("p", { class: "legend-note" }, `Hatched: not measured (${missing}).`) : "",
      infinite ? el("p", { class: "legend-note" }, `Crossed: not finite (${infinite}).`) : "",
    );
  }
}

const same = (one, two) => one?.site === two?.site && one?.head === two?.head;

const plainly = (value) => (value === Infinity ? "inf" : value === -Infinity ? "-inf" : value);

function stroke(pen, lines) {
  pen.beginPath();
  for (const [x1, y1, x2, y2] of lines) {
    pen.moveTo(x1, y1);
    pen.lineTo(x2, y2);
  }
  pen.stroke();
}

/** The end of a name that is too long says more than its beginning. */
function fit(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let cut = 1;
  while (cut < text.length && pen.measureText(`…${text.slice(cut)}`).width > room) cut += 1;
  return `…${text.slice(cut)}`;
}
