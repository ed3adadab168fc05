/** All runs of the folder: search, state, tags and notes; the chosen ones are compared. */

import { lineChart } from "../charts/line";
import type { RunRow } from "../api";
import { getJson, type Line, linesOf, writeNote, writeToken } from "../data";
import { h, sign, toast } from "../dom";
import { matcher } from "../depth";
import { ago, count, plural } from "../format";
import { add, type Part, redraw } from "../page";
import { decode } from "../packed";

const MOST_COMPARED = 10;
const MOST_ROWS = 200;

const SEVERITIES = ["critical", "warning", "info"] as const;

const severity = (row: RunRow) => SEVERITIES.find((kind) => row.alerts[kind]) ?? "healthy";
const urgency = (row: RunRow) => (row.state === "failed" || row.alerts.critical ? 2 : row.alerts.warning ? 1 : 0);

const newest = (a: RunRow, b: RunRow) => (b.updated ?? 0) - (a.updated ?? 0);
const byLoss = (a: RunRow, b: RunRow) => (a.last_loss ?? Infinity) - (b.last_loss ?? Infinity) || 0;

/** The columns; a click on one sorts by it. */
const HEAD: { words: string; isNumber?: boolean; sort?: (a: RunRow, b: RunRow) => number }[] = [
  { words: "" },
  { words: "run", sort: (a, b) => a.run.localeCompare(b.run, "en", { numeric: true }) },
  { words: "alerts so far", sort: (a, b) => urgency(b) - urgency(a) },
  { words: "loss" },
  { words: "last loss", isNumber: true, sort: byLoss },
  { words: "steps", isNumber: true, sort: (a, b) => b.num_steps - a.num_steps },
  { words: "state", sort: newest },
  { words: "tags and notes" },
];

/** How many alerts the run has had, open or resolved: the verdict stands on its own page. */
function alerts(row: RunRow): HTMLElement {
  if (row.error) return h("span", {}, sign("waiting", "Unreadable"), h("small", {}, row.error));
  const kinds = SEVERITIES.filter((kind) => row.alerts[kind]);
  const words = kinds.map((kind) => (kind === "critical" ? `${row.alerts.critical} critical` : plural(row.alerts[kind]!, kind === "info" ? "note" : kind)));
  const [worst = "No alerts", ...others] = words;
  return h("span", {}, sign(severity(row), worst), h("small", {}, others.join(", ")));
}

/** The loss of a run, fetched when its row comes into view. */
function spark(row: RunRow): Part {
  let line: Line | undefined;
  let asked = "";
  const last = row.last_step ?? 0;
  const chart = lineChart({ label: `Loss of ${row.run}`, height: 38, bare: true, window: () => [0, Math.max(1, last)], curves: () => [{ line, width: 1.2 }] });
  chart.element.classList.add("inert");
  return {
    ...chart,
    draw: () => {
      const wanted = `${row.run}@${last}`;
      if (asked !== wanted && !row.error) {
        asked = wanted;
        fetch(`api/series?run=${encodeURIComponent(row.run)}&series=${encodeURIComponent("train/loss@")}&columns=120`)
          .then(async (response) => {
            if (response.ok) [line] = linesOf(decode(await response.arrayBuffer()));
            redraw();
          })
          .catch(() => undefined);
      }
      chart.draw();
    },
  };
}

function editor(row: RunRow, done: () => void): HTMLElement {
  const tags = h("input", { value: row.tags.join(", "), placeholder: "tags, separated by commas", "aria-label": "Tags" });
  const note = h("textarea", { rows: 2, placeholder: "note", "aria-label": "Note" }, row.note);
  const save = () =>
    writeNote(row.run, tags.value.split(",").map((tag) => tag.trim()).filter(Boolean), note.value.trim())
      .then(done)
      .catch((error: Error) => toast(error.message));
  return h("form", { class: "editor", onsubmit: (event: Event) => (event.preventDefault(), void save()) }, tags, note, h("button", { class: "button primary" }, "Save"), h("button", { type: "button", class: "button", onclick: done }, "Cancel"));
}

export function runsView(open: (run: string) => void, openCompared: (runs: string[]) => void): { element: HTMLElement; refresh: () => Promise<void> } {
  let rows: RunRow[] = [];
  let editing: string | null = null;
  const chosen = new Set<string>();
  const body = h("tbody");
  const sub = h("p");
  const search = h("input", { type: "search", placeholder: "Search runs, models, tags, notes", "aria-label": "Search runs", oninput: () => render() });
  const compare = h("button", { type: "button", class: "button primary", onclick: () => openCompared([...chosen]) });
  let root = "";
  let order = HEAD[2]!;
  const heads = HEAD.map((column) => (column.sort ? h("button", { type: "button", onclick: () => ((order = column), render()) }, column.words) : column.words));
  const empty = h("p", { class: "empty", hidden: true });
  const element = h(
    "main",
    { class: "page" },
    h("div", { class: "section" }, h("h2", {}, "Runs"), sub, h("div", { class: "right" }, search, compare)),
    h("div", { class: "panel" }, h("table", { class: "runs" }, h("thead", {}, h("tr", {}, ...HEAD.map(({ isNumber }, index) => h("th", { class: isNumber ? "number" : "" }, heads[index])))), body), empty),
  );
  const sparks = new Map<string, { key: string; part: Part }>();

  function sparkOf(row: RunRow): HTMLElement {
    const key = `${row.last_step}`;
    const known = sparks.get(row.run);
    if (known?.key === key) return known.part.element;
    const part = add(spark(row));
    sparks.set(row.run, { key, part });
    return part.element;
  }

  function render(): void {
    const matches = matcher(search.value.trim());
    const found = rows.filter((row) => matches([row.run, row.model, row.state, row.note, ...row.tags].join(" ")));
    const sorted = found.sort((a, b) => order.sort!(a, b) || newest(a, b));
    sub.textContent = `${plural(rows.length, "run")} in ${root}; ${order === HEAD[2] ? "what needs you comes first" : `by ${order.words}`}, then the newest`;
    heads.forEach((head, index) => head instanceof HTMLElement && head.setAttribute("aria-pressed", String(HEAD[index] === order)));
    compare.textContent = chosen.size < 2 ? "Choose runs to compare" : `Compare ${chosen.size} chosen`;
    compare.disabled = chosen.size < 2;
    empty.hidden = found.length > 0;
    empty.textContent = rows.length ? "No run has this in its name, model, tags or note." : "No runs here yet. This page shows them as soon as they start.";
    body.replaceChildren(
      ...sorted.slice(0, MOST_ROWS).map((row) => {
        const box = h("input", { type: "checkbox", checked: chosen.has(row.run), disabled: Boolean(row.error), "aria-label": `Choose ${row.run}`, onchange: () => toggle(row.run, box.checked) });
        const name = h("a", { href: `#run=${encodeURIComponent(row.run)}`, class: "name", onclick: (event: Event) => (event.preventDefault(), open(row.run)) }, row.run || ".");
        const notes = editing === row.run ? editor(row, () => ((editing = null), void refresh())) : h("div", { class: "notes" }, ...row.tags.map((tag) => h("span", { class: "tag" }, tag)), row.note, writeToken() && h("button", { type: "button", class: "link", onclick: () => ((editing = row.run), render()) }, row.note || row.tags.length ? "edit" : "add a note"));
        return h(
          "tr",
          { class: chosen.has(row.run) ? "chosen" : "" },
          h("td", {}, box),
          h("td", {}, name, h("small", {}, row.model)),
          h("td", {}, alerts(row)),
          h("td", { class: "spark" }, row.error ? "" : sparkOf(row)),
          h("td", { class: "number" }, row.loss_words),
          h("td", { class: "number" }, count(row.num_steps)),
          h("td", {}, row.state, !!row.updated && h("small", {}, ago(Date.now() / 1000 - row.updated))),
          h("td", {}, notes),
        );
      }),
    );
    redraw();
  }

  function toggle(run: string, on: boolean): void {
    if (on && chosen.size >= MOST_COMPARED) toast(`At most ${MOST_COMPARED} runs can be compared.`);
    else if (on) chosen.add(run);
    else chosen.delete(run);
    render();
  }

  async function refresh(): Promise<void> {
    const answer = await getJson<{ root: string; runs: RunRow[] }>("runs");
    rows = answer.runs;
    root = answer.root;
    if (editing === null) render();
  }

  return { element, refresh };
}
