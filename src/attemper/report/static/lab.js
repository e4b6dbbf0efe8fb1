// What a page of the lab adds to its own text: buttons that copy and download, and the switch of colours.
// Without it the page reads the same.

import { asJSON, asPython } from "./format.js";
import { themeButton } from "./theme.js";

async function putOnClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages opened from a disk may not have the clipboard; the selection always works.
    const area = document.createElement("textarea");
    area.className = "offscreen";
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

function actButton(label, title, act, done) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.title = title;
  button.textContent = label;
  let waiting = 0;
  button.addEventListener("click", async () => {
    await act();
    button.textContent = done;
    clearTimeout(waiting);
    waiting = setTimeout(() => (button.textContent = label), 1400);
  });
  return button;
}

const copying = (label, title, text) => actButton(label, title, () => putOnClipboard(text()), "Copied");

const isEstimate = (cell) => cell !== null && typeof cell === "object";

const csvCell = (cell) => {
  const text = cell === null || cell === undefined ? "" : String(cell);
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};

/** A table as CSV: a measured column becomes three, the value and the ends of its interval. */
function asCSV({ columns, rows }) {
  const measured = columns.map((_, i) => rows.some((row) => isEstimate(row[i])));
  const heads = columns.flatMap((name, i) => (measured[i] ? [name, `${name} low`, `${name} high`] : [name]));
  const body = rows.map((row) =>
    row.flatMap((cell, i) => {
      if (!measured[i]) return [cell];
      return isEstimate(cell) ? [cell.value, cell.low, cell.high] : [cell, cell, cell];
    }),
  );
  return [heads, ...body].map((row) => row.map(csvCell).join(",")).join("\n") + "\n";
}

function downloadSVG(node, name) {
  const figure = node.closest("figure").querySelector("svg");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(figure)], { type: "image/svg+xml" }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

function toolsFor(node, path, data) {
  const [index, kind, number] = path.split(".");
  if (path === "all") return [copying("Copy all as JSON", "Copy every record as JSON", () => asJSON(data.records))];
  const record = data.records[Number(index)];
  if (kind === "command" || kind === "code") return [copying("Copy", `Copy the ${kind}`, () => record[kind])];
  const found = kind === "clock" ? data.clock[Number(index)][Number(number)] : record[kind][Number(number)];
  const value = kind === "verdicts" ? found.evidence : found;
  const buttons = [
    copying("Python", "Copy the numbers as Python", () => asPython(value)),
    copying("JSON", "Copy the numbers as JSON", () => asJSON(value)),
  ];
  if (found.columns) buttons.push(copying("CSV", "Copy the table as CSV", () => asCSV(found)));
  if (kind === "panels") {
    const name = `${record.question}-${Number(number) + 1}.svg`;
    buttons.push(actButton("Save SVG", `Save the figure as ${name}`, () => downloadSVG(node, name), "Saved"));
  }
  const word = document.createElement("span");
  word.className = "copies-word";
  word.textContent = "Copy";
  word.setAttribute("aria-hidden", "true");
  return [word, ...buttons];
}

/** A link into something folded up opens it; the contents show where one is. */
function follow(document) {
  const links = new Map([...document.querySelectorAll(".contents a")].map((a) => [a.hash.slice(1), a]));
  const seen = new Set();
  const watcher = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) seen[entry.isIntersecting ? "add" : "delete"](entry.target.id);
      const first = [...links.keys()].find((id) => seen.has(id));
      for (const [id, link] of links) link.toggleAttribute("aria-current", id === first);
    },
    { rootMargin: "-10% 0px -60% 0px" },
  );
  for (const id of links.keys()) watcher.observe(document.getElementById(id));
}

export function start(data, document) {
  for (const node of document.querySelectorAll("[data-tools]")) {
    node.classList.add("copies");
    node.append(...toolsFor(node, node.dataset.tools, data));
  }
  document.querySelector(".bar").append(themeButton());
  follow(document);
  // Paper cannot unfold: everything is open while it prints.
  let shut = [];
  addEventListener("beforeprint", () => {
    shut = [...document.querySelectorAll("details:not([open])")];
    for (const one of shut) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of shut) one.open = false;
  });
}
