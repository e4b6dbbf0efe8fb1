// The panel beside the map: all there is about one head, or the extremes of a vital while none is chosen.

import { known, shown, withError } from "./format.js";
import { copyButtons, el } from "./elements.js";

/** Everything the record holds about one head, under the record's own names. */
export function headRecord(record, site, head) {
  const { site: where, weights, schema, ...fields } = record.vitals[site];
  const values = {};
  for (const [name, value] of Object.entries(fields)) {
    if (Array.isArray(value) && value.length === where.heads && !name.startsWith("total_")) values[name] = value[head];
  }
  return { path: where.path, head, vitals: values, site: where };
}

const row = (label, value) =>
  el("tr", {}, el("th", { scope: "row" }, label), el("td", { class: value === "not measured" ? "missing" : null }, value));

const pick = (value, head) => (Array.isArray(value) ? value[head] ?? value[0] : value);

export class Detail {
  constructor(record, view, { onVital, onOpen, onFinding }) {
    Object.assign(this, { record, view, onVital, onOpen, onFinding });
    this.node = el("aside", { class: "detail", "aria-label": "The chosen head" });
  }

  /** What the vital ranges over, with the heads at its ends to start from. */
  overview(map) {
    const vital = map.vital;
    const heads = map.heads().sort((a, b) => a.value - b.value);
    const middle = heads.length ? heads[Math.floor((heads.length - 1) / 2)].value : null;
    const list = (title, some) => [
      el("h4", {}, title),
      el(
        "ul",
        { class: "extremes" },
        some.map(({ site, head, value }) =>
          el(
            "li",
            {},
            el(
              "button",
              { type: "button", onclick: () => this.onOpen(site, head) },
              el("span", {}, `${this.view.sites[site].title || "Attention"}, head ${head}`),
              el("b", {}, shown(value, vital.form)),
            ),
          ),
        ),
      ),
    ];
    const few = Math.min(4, Math.floor(heads.length / 2) || heads.length);
    this.node.replaceChildren(
      el("h3", {}, vital.label),
      el("table", { class: "pairs" }, el("tbody", {}, row("Median head", shown(middle, vital.form)), row("Heads measured", shown(heads.length, "count")))),
      ...(heads.length > 1 ? [...list("Highest", heads.slice(-few).reverse()), ...list("Lowest", heads.slice(0, few))] : []),
      el("p", { class: "hint" }, "Choose a head on the map for all its numbers."),
    );
  }

  open(map, site, head) {
    const where = this.view.sites[site];
    const vitals = this.record.vitals[site];
    const named = this.view.findings.filter((f) => f.heads.some(([s, heads]) => s === site && heads.includes(head)));
    const mapped = new Map(this.view.vitals.map((vital) => [vital.name, vital]));
    const rows = this.view.fields.map((field) => {
      const value = known(field, (vitals[field.name] || [])[head]);
      const plain = shown(value === Infinity ? "inf" : value === -Infinity ? "-inf" : value, field.form);
      const error = field.name === "pressure" ? (vitals.pressure_error || [])[head] : null;
      const label = mapped.has(field.name)
        ? el("button", { type: "button", class: "link", title: "Show on the map", "aria-pressed": String(map.vital.name === field.name), onclick: () => this.onVital(field.name) }, field.label)
        : field.label;
      return row(label, typeof error === "number" ? withError(value, error) : plain);
    });
    const facts = this.view.site_fields
      .map(({ name, label }) => [label, pick(vitals.site[name], head), name])
      .filter(([, value, name]) => (value !== null && value !== undefined) || name === "effective_scale")
      .map(([label, value]) => row(label, shown(value, Number.isInteger(value) ? "count" : "number")));
    facts.splice(1, 0, row("1/√d_k", shown(where.expected_scale)));
    this.node.replaceChildren(
      el(
        "div",
        { class: "detail-head" },
        el("h3", {}, `${where.title || "Attention"}, head ${head}`),
        el("button", { type: "button", class: "quiet", "aria-label": "Close", onclick: () => this.onOpen(null, null) }, "Close"),
      ),
      where.path !== where.title ? el("p", { class: "path" }, el("code", {}, where.path)) : "",
      el("div", { class: "detail-copies" }, copyButtons(() => headRecord(this.record, site, head), "this head")),
      named.length
        ? el(
            "p",
            { class: "chips" },
            named.map((f) =>
              el("button", { type: "button", class: `chip ${f.severity}`, onclick: () => this.onFinding(f) }, `${f.severity}: ${f.rule}`),
            ),
          )
        : "",
      el("table", { class: "pairs" }, el("caption", {}, "Vitals"), el("tbody", {}, rows)),
      el("table", { class: "pairs" }, el("caption", {}, "Site"), el("tbody", {}, facts)),
    );
  }
}
