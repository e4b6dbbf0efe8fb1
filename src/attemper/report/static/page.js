// The page: header, findings, map, plots, tables. `start` builds it from {record, view}.

import { real } from "./format.js";
import { themeButton } from "./theme.js";
import { copyButtons, el, prose, redrawAll, section, smooth, svg } from "./elements.js";
import { HeadMap, keysOf } from "./map.js";
import { Detail } from "./detail.js";
import { pressurePlot, probePlot, scalePlots } from "./plots.js";

const FIRST_TABS = 8;

function mark() {
  return svg(
    "svg",
    { viewBox: "0 0 24 24", class: "mark", "aria-hidden": "true" },
    svg("path", { d: "M2 20 C8 20 8 4 12 4 C16 4 16 20 22 20", class: "mark-curve" }),
    svg("circle", { cx: 12, cy: 4, r: 2.4, class: "mark-dot" }),
  );
}

function header(record, view) {
  const { verdict } = view;
  return el(
    "header",
    { class: verdict.severity },
    el("div", { class: "bar" }, el("span", { class: "brand" }, mark(), "attemper"), themeButton(redrawAll)),
    el("p", { class: "eyebrow" }, "Attention checkup"),
    el("h1", {}, view.title),
    el("p", { class: "subtitle" }, view.subtitle),
    el("p", { class: "verdict" }, el("strong", {}, `${verdict.lead}: `), prose(verdict.sentence)),
    verdict.notes.map((note) => el("p", { class: "note" }, note)),
    el(
      "dl",
      { class: "numbers" },
      view.numbers.map((item) =>
        el(
          "div",
          {},
          el("dt", {}, item.label),
          el("dd", {}, el("b", { class: item.value === view.missing ? "missing" : null }, item.value), item.note && el("small", {}, item.note)),
        ),
      ),
    ),
  );
}

function findingCard(finding, original, toggle) {
  const button = finding.count
    ? el("button", { type: "button", class: "show", "aria-pressed": "false" }, "Show on the map")
    : null;
  const part = (label, ...text) => [el("dt", {}, label), el("dd", {}, ...text)];
  const card = el(
    "article",
    { class: `card ${finding.severity}` },
    el(
      "div",
      { class: "card-head" },
      el("span", { class: "severity" }, finding.severity),
      el("code", { class: "rule" }, finding.rule),
      copyButtons(() => original, "this finding"),
    ),
    el("h3", {}, prose(finding.headline)),
    el(
      "div",
      { class: "card-body" },
      el(
        "div",
        {},
        el("div", { class: "where" }, el("div", {}, finding.where_parts.map((text) => el("p", {}, text))), button),
        finding.evidence.length
          ? el("dl", { class: "evidence" }, finding.evidence.map((e) => el("div", {}, el("dt", {}, e.label), el("dd", {}, e.text))))
          : null,
      ),
      el(
        "dl",
        { class: "reasons" },
        part("Cause", prose(finding.cause)),
        part("Remedy", prose(finding.remedy)),
        finding.docs ? part("Read more", el("code", {}, finding.docs)) : [],
      ),
    ),
  );
  if (button) button.addEventListener("click", () => toggle(finding));
  return { card, button };
}

function mapSection(record, view, marker) {
  const tabs = el("div", { class: "tabs", role: "group", "aria-label": "Vital" });
  const option = (vital) => el("option", { value: vital.name }, vital.label);
  const all = el("select", { class: "all-vitals", "aria-label": "Vital" }, view.vitals.map(option));
  const rest = view.vitals.slice(FIRST_TABS);
  const more = rest.length
    ? el("select", { class: "more-vitals", "aria-label": "More vitals" }, el("option", { value: "" }, "More vitals…"), rest.map(option))
    : null;
  const banner = el("p", { class: "banner", hidden: true });
  const meaning = el("p", { class: "lead" });
  const stretch = el("input", { type: "checkbox", id: "stretch" });
  const stretchLabel = el("label", { for: "stretch", class: "stretch" }, stretch, "Stretch colours to the data");
  const open = (site, head) => {
    map.select(site, head);
    if (site === null) detail.overview(map);
    else detail.open(map, site, head);
  };
  const map = new HeadMap(record, view, open);
  const choose = (name) => {
    const vital = view.vitals.find((v) => v.name === name);
    map.show(vital);
    meaning.textContent = vital.meaning;
    for (const tab of tabs.querySelectorAll("button")) tab.setAttribute("aria-pressed", String(tab.value === name));
    all.value = name;
    if (more) more.value = rest.some((v) => v.name === name) ? name : "";
    stretchLabel.hidden = String(vital.data) === String(vital.domain);
    if (map.opened) detail.open(map, map.opened.site, map.opened.head);
    else detail.overview(map);
  };
  const detail = new Detail(record, view, { onVital: choose, onOpen: open, onFinding: (finding) => marker.toggle(finding, false) });
  marker.listeners.push((finding) => {
    map.mark(finding ? keysOf(finding) : null);
    banner.hidden = !finding;
    if (!finding) return;
    const clear = el("button", { type: "button", class: "quiet", onclick: () => marker.toggle(null) }, "Clear");
    banner.className = `banner ${finding.severity}`;
    banner.replaceChildren(el("span", {}, el("b", {}, finding.rule), ` ${finding.where}`), clear);
  });
  for (const vital of view.vitals.slice(0, FIRST_TABS)) {
    tabs.append(el("button", { type: "button", value: vital.name, onclick: () => choose(vital.name) }, vital.label));
  }
  all.addEventListener("change", () => choose(all.value));
  if (more) more.addEventListener("change", () => more.value && choose(more.value));
  stretch.addEventListener("change", () => map.stretch(stretch.checked));
  const data = () => ({
    vital: map.vital.name,
    sites: record.vitals.map((v) => ({ path: v.site.path, values: v[map.vital.name] })),
  });
  const node = section(
    "heads", "Heads", null, data,
    el("div", { class: "chooser" }, tabs, more, all),
    meaning, banner,
    el("div", { class: "map-and-detail" }, el("div", { class: "map-side" }, map.node, el("div", { class: "legend-row" }, map.legend, stretchLabel)), detail.node),
  );
  choose(view.vitals[0].name);
  return node;
}

/** A table whose columns sort at a click on their heading. */
function siteTable(view) {
  const { columns, rows, texts } = view.table;
  const body = el("tbody");
  const order = rows.map((_, i) => i);
  let sorted = { column: -1, down: false };
  const rank = (row, name) => {
    const numbers = [row[name]].flat().map(real).filter((x) => x !== null);
    return numbers.length ? Math.max(...numbers) : null;
  };
  const cells = (i) =>
    texts[i].map((text, c) =>
      c === 0
        ? el("th", { scope: "row" }, el("code", {}, text))
        : el("td", { class: text === view.missing ? "missing" : null }, text),
    );
  const fillBody = () => body.replaceChildren(...order.map((i) => el("tr", {}, cells(i))));
  const heads = columns.map((column, c) => {
    // Headings break between words only, never inside 1/√d_k or first-key.
    const words = column.label.split(" ").map((word) => [el("span", {}, word), " "]);
    const button = el("button", { type: "button" }, words);
    button.addEventListener("click", () => {
      sorted = { column: c, down: sorted.column === c ? !sorted.down : c !== 0 };
      const sign = sorted.down ? -1 : 1;
      order.sort((a, b) => {
        // Sites come in the order of their calls, which is what sorting by name would have to mean.
        if (c === 0) return sign * (a - b);
        const [x, y] = [rank(rows[a], column.name), rank(rows[b], column.name)];
        if (x === null || y === null) return (x === null) - (y === null);
        return sign * (x - y) || a - b;
      });
      heads.forEach((h, i) => h.setAttribute("aria-sort", i === c ? (sorted.down ? "descending" : "ascending") : "none"));
      fillBody();
    });
    return el("th", { scope: "col", "aria-sort": "none" }, button);
  });
  fillBody();
  const box = el(
    "div",
    { class: "table-box", tabindex: 0, role: "region", "aria-label": "Table of sites" },
    el("table", { class: "sites" }, el("thead", {}, el("tr", {}, heads)), body),
  );
  const frame = el("div", { class: "table-frame" }, box);
  // The edge may fall between two rows, or two columns: a shadow says that there are more behind it.
  const shade = () => {
    frame.classList.toggle("more-below", box.scrollTop + box.clientHeight < box.scrollHeight - 1);
    frame.classList.toggle("more-beside", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  };
  box.addEventListener("scroll", shade, { passive: true });
  new ResizeObserver(shade).observe(box);
  return frame;
}

/** Which finding is shown on the map, for the cards and the map alike. */
function makeMarker() {
  const marker = { current: null, listeners: [] };
  marker.toggle = (finding, scroll = true) => {
    marker.current = finding === marker.current ? null : finding;
    for (const listener of marker.listeners) listener(marker.current);
    if (marker.current && scroll) document.getElementById("heads")?.scrollIntoView({ behavior: smooth(), block: "start" });
  };
  return marker;
}

function findingsSection(record, view, marker) {
  if (!view.findings.length) {
    return section("findings", "Findings", "None: no rule had anything to say.", null);
  }
  const cards = view.findings.map((finding, i) => ({ finding, ...findingCard(finding, record.findings[i], marker.toggle) }));
  marker.listeners.push((current) => {
    for (const { finding, card, button } of cards) {
      card.classList.toggle("current", finding === current);
      if (!button) continue;
      button.setAttribute("aria-pressed", String(finding === current));
      button.textContent = finding === current ? "Shown on the map" : "Show on the map";
    }
  });
  return section("findings", "Findings", null, () => record.findings, el("div", { class: "cards" }, cards.map(({ card }) => card)));
}

function plotSections(record, view) {
  const parts = [];
  if (view.sites.some((site) => typeof site.pressure === "number")) {
    const total = view.pressure ? `All sites together: ${view.pressure.text}${view.pressure.t_text ? `, ${view.pressure.t_text}` : ""}; ${view.pressure.reading}.` : null;
    const data = () => ({
      pressure: record.pressure,
      pressure_error: record.pressure_error,
      sequence_pressure: record.sequence_pressure,
      sites: view.sites.map(({ path, pressure, pressure_error: error }) => ({ path, pressure, pressure_error: error })),
    });
    parts.push(section("pressure", "Pressure", total, data, pressurePlot(view), el("p", { class: "small" }, "Each site, with one standard error either way. Coloured: two or more errors from zero.")));
  }
  if (view.probe) parts.push(section("probe", "Probe", view.probe.reading, () => record.probe, probePlot(view)));
  if (view.sites.some((site) => site.differs)) {
    const data = () => record.vitals.map((v, i) => ({
      path: v.site.path, effective_scale: v.site.effective_scale, expected_scale: view.sites[i].expected_scale, declared_scale: v.site.declared_scale,
    }));
    parts.push(section("scales", "Scales", "What multiplies q·k in all, against 1/√d_k.", data, scalePlots(view, record)));
  }
  return parts;
}

export function start({ record, view }, root) {
  const marker = makeMarker();
  const plots = plotSections(record, view);
  const sites = `${view.table.rows.length} ${view.table.rows.length === 1 ? "site" : "sites"}`;
  matchMedia("print").addEventListener("change", redrawAll);
  root.append(
    header(record, view),
    el(
      "main",
      {},
      findingsSection(record, view, marker),
      view.vitals.length ? mapSection(record, view, marker) : null,
      plots.length ? el("div", { class: plots.length > 1 && view.groups.length < 2 ? "pair" : null }, plots) : null,
      view.table.rows.length
        ? section("sites", "Sites", `${sites}. Vitals are means over the heads; the largest logit is the largest of them.`, () => view.table.rows, siteTable(view))
        : null,
      view.unseen.length
        ? section("unseen", "Not read", "These look like attention and could not be read.", () => record.unseen, el("dl", { class: "unseen" }, view.unseen.map((u) => [el("dt", {}, el("code", {}, u.path)), el("dd", {}, prose(u.why))])))
        : null,
      view.glossary.length
        ? section("glossary", "Glossary", null, null, el("dl", { class: "glossary" }, view.glossary.map((g) => el("div", {}, el("dt", {}, g.label, " ", el("code", {}, g.name)), el("dd", {}, g.meaning)))))
        : null,
    ),
    el(
      "footer",
      {},
      el("span", {}, `attemper ${record.version || ""}`.trim(), el("span", { class: "schema" }, record.schema)),
      copyButtons(() => record, "the whole record"),
    ),
  );
}
