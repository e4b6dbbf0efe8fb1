// The plots: pressure per site, the probe's curve, scales against 1/√d_k. SVG, redrawn at the width it has.

import { labelEvery, real, shown, significant, ticks } from "./format.js";
import { el, hideTip, responsive, showTip, svg } from "./elements.js";

const line = (x1, y1, x2, y2, name) => svg("line", { x1, y1, x2, y2, class: name });
const label = (x, y, anchor, text, name = "tick") => svg("text", { x, y, "text-anchor": anchor, class: name }, text);

/** A column that shows a tooltip; the mark under it need not be hit. */
function hoverColumn(x, y, width, height, content) {
  const show = (event) => showTip(event.clientX, event.clientY, content());
  return svg("rect", {
    x, y, width, height, class: "column", onpointermove: show, onpointerdown: show, onpointerleave: hideTip,
  });
}

function frame(node, name, height, draw) {
  responsive(node, (width) => {
    const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name });
    draw(root, width, height);
    node.replaceChildren(root);
  });
}

/** Horizontal rules with their numbers; returns the height of a value. */
function vertical(root, { left, right, top, bottom }, [low, high], count) {
  const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - top);
  for (const tick of ticks(low, high, count)) {
    root.append(line(left, y(tick), right, y(tick), tick === 0 ? "zero" : "rule"));
    root.append(label(left - 8, y(tick) + 3.5, "end", significant(Math.abs(tick) < 1e-15 ? 0 : tick, 3)));
  }
  return y;
}

function bottomLabels(root, names, x, y, width, word) {
  const longest = Math.max(...names.map((name) => name.length));
  const step = labelEvery(longest * 7 + 10, width / names.length);
  names.forEach((name, i) => {
    if (i % step === 0) root.append(label(x(i), y, "middle", name));
  });
  root.append(label(x((names.length - 1) / 2), y + 17, "middle", word, "axis"));
}

const groupName = (view, group) => (view.groups.length > 1 ? group.template || "other sites" : "");
const layerWord = (view, group) => (group.template ? "layer" : "site");

/** Pressure per site with whiskers of one standard error; groups share the axis. */
export function pressurePlot(view) {
  const points = view.sites.map((site) => ({ site, value: real(site.pressure), error: real(site.pressure_error) || 0 }));
  const seen = points.filter((p) => Number.isFinite(p.value));
  const reach = Math.max(...seen.map((p) => Math.abs(p.value) + p.error)) * 1.08 || 1;
  const figures = view.groups.map((group) => {
    const node = el("div", { class: "plot" });
    const members = group.sites.map((i) => points[i]);
    frame(node, "Pressure of each site", 250, (root, width, height) => {
      const box = { left: 62, right: width - 8, top: 14, bottom: height - 44 };
      const y = vertical(root, box, [-reach, reach], 6);
      const step = (box.right - box.left - 12) / members.length;
      const x = (i) => box.left + 6 + step * (i + 0.5);
      members.forEach(({ site, value, error }, i) => {
        if (!Number.isFinite(value)) return;
        const telling = error && Math.abs(value) >= 2 * error;
        const sign = telling ? (value > 0 ? " above" : " below") : "";
        if (error) root.append(line(x(i), y(value - error), x(i), y(value + error), `whisker${sign}`));
        const r = Math.max(1.8, Math.min(4.5, step * 0.32));
        root.append(svg("circle", { cx: x(i), cy: y(value), r, class: `dot${sign}` }));
      });
      const names = group.sites.map((i) => view.sites[i].short);
      if (group.template) bottomLabels(root, names, x, box.bottom + 16, step * names.length, "layer");
      members.forEach(({ site, value, error }, i) => {
        const content = () => [
          el("strong", {}, site.pressure_text),
          el("span", {}, `pressure of ${site.label}`),
          error ? el("span", {}, `t = ${significant(value / error, 3)}`) : "",
          el("code", {}, site.label === site.path ? "" : site.path),
        ];
        root.append(hoverColumn(x(i) - step / 2, box.top, step, box.bottom - box.top, content));
      });
    });
    return figure(groupName(view, group), node);
  });
  return el("div", { class: "figures" }, figures);
}

function figure(name, node, ...rest) {
  return el("figure", {}, name && el("figcaption", {}, el("code", {}, name)), node, ...rest);
}

/** Loss against the factor on every scale; the least is ringed. Nothing where no loss was finite. */
export function probePlot(view) {
  const node = el("div", { class: "plot" });
  const points = view.probe.points.map((p) => ({ ...p, value: real(p.loss) }));
  const seen = points.filter((p) => Number.isFinite(p.value));
  if (!seen.length) return null; // the section's first line says so
  const losses = seen.map((p) => p.value);
  const [low, high] = [Math.min(...losses), Math.max(...losses)];
  const room = (high - low || Math.abs(high) || 1) * 0.14;
  frame(node, "Loss against the factor on every scale", 270, (root, width, height) => {
    const box = { left: 56, right: width - 22, top: 14, bottom: height - 44 };
    const y = vertical(root, box, [low - room, high + room], 6);
    const ends = [Math.log(points[0].factor), Math.log(points[points.length - 1].factor)];
    const x = (factor) =>
      ends[1] > ends[0]
        ? box.left + 14 + ((Math.log(factor) - ends[0]) / (ends[1] - ends[0])) * (box.right - box.left - 28)
        : (box.left + box.right) / 2;
    if (ends[0] <= 0 && ends[1] >= 0) root.append(line(x(1), box.top, x(1), box.bottom, "own"));
    let last = -Infinity;
    points.forEach((p) => {
      root.append(line(x(p.factor), box.bottom, x(p.factor), box.bottom + 4, "rule"));
      if (x(p.factor) - last < 44 && p.factor !== 1) return;
      root.append(label(x(p.factor), box.bottom + 17, "middle", `×${p.text}`));
      last = x(p.factor);
    });
    root.append(label((box.left + box.right) / 2, box.bottom + 34, "middle", "factor on every scale, log axis", "axis"));
    const path = seen.map((p, i) => `${i ? "L" : "M"}${x(p.factor)} ${y(p.value)}`).join("");
    root.append(svg("path", { d: path, class: "curve" }));
    const least = points[view.probe.least];
    seen.forEach((p) => {
      if (p === least) root.append(svg("circle", { cx: x(p.factor), cy: y(p.value), r: 9, class: "ring" }));
      root.append(svg("circle", { cx: x(p.factor), cy: y(p.value), r: 4, class: p === least ? "dot least" : "dot point" }));
    });
    for (const p of points.filter((q) => q.value === Infinity)) root.append(label(x(p.factor), box.top + 8, "middle", "∞", "mark"));
    if (least) {
      const side = x(least.factor) > (box.left + box.right) / 2 + 20 ? "end" : "start";
      const shift = side === "end" ? -15 : 15;
      root.append(label(x(least.factor) + shift, y(least.value) + 16, side, `least: ${least.loss_text}`, "mark"));
    }
    points.forEach((p, i) => {
      const from = i ? (x(points[i - 1].factor) + x(p.factor)) / 2 : box.left;
      const to = i < points.length - 1 ? (x(points[i + 1].factor) + x(p.factor)) / 2 : box.right;
      const content = () => [el("strong", {}, p.loss_text), el("span", {}, `loss at ×${p.text}`)];
      root.append(hoverColumn(from, box.top, to - from, box.bottom - box.top, content));
    });
  });
  return figure("", node);
}

/** Effective scale of each site, against 1/√d_k and what the model declares. */
export function scalePlots(view, record) {
  const many = (value) => (Array.isArray(value) ? value : [value]).map(real).filter((x) => Number.isFinite(x));
  const figures = view.groups.map((group) => {
    const node = el("div", { class: "plot" });
    const members = group.sites.map((i) => {
      const site = record.vitals[i].site;
      return {
        shown: view.sites[i],
        effective: many(site.effective_scale),
        expected: many(view.sites[i].expected_scale),
        declared: many(site.declared_scale),
        text: view.sites[i].effective_text,
      };
    });
    const all = members.flatMap((m) => [...m.effective, ...m.expected, ...m.declared]);
    if (!all.length) return null;
    const top = Math.max(...all) * 1.12;
    const bottom = Math.min(0, ...all);
    frame(node, "Effective scale of each site", 220, (root, width, height) => {
      const box = { left: 56, right: width - 8, top: 12, bottom: height - 44 };
      const y = vertical(root, box, [bottom, top > bottom ? top : bottom + 1], 4);
      const step = (box.right - box.left - 12) / members.length;
      const x = (i) => box.left + 6 + step * (i + 0.5);
      const half = Math.max(1.5, Math.min(16, step * 0.36));
      members.forEach((m, i) => {
        for (const value of m.expected) root.append(line(x(i) - half, y(value), x(i) + half, y(value), "reference"));
        for (const value of m.declared) root.append(line(x(i) - half, y(value), x(i) + half, y(value), "declared"));
        const r = Math.max(1.8, Math.min(4, step * 0.3));
        for (const value of m.effective) {
          root.append(svg("circle", { cx: x(i), cy: y(value), r, class: m.shown.differs ? "dot above" : "dot" }));
        }
      });
      const names = group.sites.map((i) => view.sites[i].short);
      if (group.template) bottomLabels(root, names, x, box.bottom + 16, step * names.length, layerWord(view, group));
      members.forEach((m, i) => {
        const content = () => [
          el("strong", {}, m.text),
          el("span", {}, `effective scale of ${m.shown.label}`),
          el("span", {}, `1/√d_k: ${shown(m.shown.expected_scale)}`),
          m.declared.length ? el("span", {}, `declared: ${m.declared.map((d) => significant(d)).join(", ")}`) : "",
          el("code", {}, m.shown.label === m.shown.path ? "" : m.shown.path),
        ];
        root.append(hoverColumn(x(i) - step / 2, box.top, step, box.bottom - box.top, content));
      });
    });
    return figure(groupName(view, group), node);
  });
  const declared = record.vitals.some((v) => v.site.declared_scale !== null && v.site.declared_scale !== undefined);
  const key = (name, text) => el("span", { class: "key" }, el("i", { class: name }), text);
  return el(
    "div",
    {},
    el("p", { class: "keys" }, key("key-dot", "effective scale"), key("key-off", "differs"), key("key-line", "1/√d_k"), declared && key("key-dash", "declared")),
    el("div", { class: "figures" }, figures),
  );
}
