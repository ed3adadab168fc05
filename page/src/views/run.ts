/** The page of one run, or the report of it. */

import type { RunData } from "../data";
import { h } from "../dom";
import { add, faultStep, go, type Part } from "../page";
import { panel } from "../panel";
import { actionList } from "./actions";
import { anySeries } from "./any";
import { course, LANES, lossCurves, VITALS, vitals } from "./course";
import { inside, own, ranks, speed, tasks } from "./inside";
import { curves } from "./lines";
import { openAlert, spread } from "./spread";
import { strip } from "./strip";
import { verdictPanel } from "./verdict";
import { mapMetric, where } from "./where";

/** Alerts whose series are on the first screen. */
const MOST_AHEAD = 8;

function grid(parts: Part[], name = ""): HTMLElement {
  return h("div", { class: `grid ${name}` }, ...parts.map((part) => add(part).element));
}

function section(id: string, title: string, sub: string, parts: Part[]): HTMLElement | null {
  if (!parts.length) return null;
  return h("section", { id }, h("div", { class: "section" }, h("h2", {}, title), h("p", {}, sub)), grid(parts, parts.length === 2 || parts.length === 4 ? "pairs" : ""));
}

function table(rows: [string, unknown][]): HTMLElement {
  const words = (value: unknown) => (typeof value === "string" ? value : JSON.stringify(value));
  return h("table", { class: "facts-table" }, h("tbody", {}, ...rows.map(([key, value]) => h("tr", {}, h("th", { scope: "row" }, key), h("td", {}, words(value))))));
}

function folded(id: string, title: string, ...children: (Node | null)[]): HTMLDetailsElement {
  return h("details", { class: "panel folded", id }, h("summary", {}, title), ...children);
}

const CHECK_SIGNS: Record<string, string> = { pass: "✓", fail: "✕", notice: "!", unknown: "?", info: "·" };

/** Asks for what the first screen shows, so that the answers are on their way while the page is built. */
export function askAhead(run: RunData): void {
  const isFaulty = faultStep() !== null;
  for (const metric of isFaulty ? LANES : VITALS) if (run.records(metric)) curves(run, metric);
  lossCurves();
  for (const { judged } of run.overview.alerts.slice(0, MOST_AHEAD)) if (judged) run.line(judged.name, judged.scope);
  const metric = mapMetric();
  if (isFaulty && metric) queueMicrotask(() => run.map(metric)); // after the lines, which stand above it
}

export function runView(run: RunData, isReport: boolean, showNews: () => void): HTMLElement {
  const { overview } = run;
  const isFaulty = faultStep() !== null;
  const openLayer = (scope: string) => go({ layer: scope });

  const checks = folded(
    "checklist",
    "Health checklist",
    h("ul", { class: "checks" }, ...overview.checklist.map((check) => h("li", { class: check.state }, h("b", {}, `${CHECK_SIGNS[check.state] ?? "·"} ${check.name}`), " ", h("small", {}, `${check.state}${check.detail ? `: ${check.detail}` : ""}`)))),
  );
  const showChecklist = () => {
    closer?.setAttribute("open", "");
    checks.open = true;
    checks.scrollIntoView({ block: "center" });
  };

  const map = where(openLayer);
  const deep = [
    map && add(map).element,
    section("inside", "Inside", "attention, spread of the values, gains", inside()),
    section("speed", "Speed", "and what watching costs", speed()),
  ];
  const facts = [
    overview.checklist.length ? checks : null,
    overview.epochs.length ? folded("epochs", "Epochs", h("ul", { class: "lines" }, ...overview.epochs.map((epoch) => h("li", {}, epoch.words)))) : null,
    folded("config", "Configuration", table(Object.entries(overview.config))),
    folded("environment", "Environment", table(Object.entries(overview.environment))),
  ];
  const closer = isFaulty || isReport ? null : h("details", { class: "closer" }, h("summary", { class: "button" }, "Look closer: layers, attention, spread, speed"), ...deep.filter((part) => part !== null));
  if (isReport) for (const fold of facts) if (fold && fold.id !== "config") fold.open = true;

  const children: (HTMLElement | null)[] = [
    isReport ? h("header", { class: "title" }, h("h1", {}, overview.path), h("p", { class: "faint" }, [overview.words, overview.state.sentence].join(" · "))) : null,
    add(verdictPanel(isReport, showChecklist, showNews)).element,
    add(strip()).element,
    isFaulty ? grid(course(openAlert), "course") : grid(vitals(), "vitals"),
    add(spread({ isReport, openLayer })).element,
    add(actionList()).element,
    section("tasks", "Task balance", "who moves the layers that the tasks share", tasks()),
    section("ranks", "Ranks", "processes that train together", ranks()),
    section("own", "Recorded by you", "values that the training loop logged", own()),
    ...(closer ? [closer] : deep),
    h("div", { class: "folds" }, isReport || !overview.series.length ? "" : add(anySeries()).element, ...facts.filter((fold) => fold !== null)),
    h("footer", { class: "foot" }, h("span", {}, overview.cost?.sentence ?? ""), isReport ? "" : h("span", {}, "Press ", h("kbd", {}, "?"), " for keys")),
  ];
  const main = h("main", { class: isReport ? "report" : "page" }, ...children.filter((child) => child !== null));
  if (!overview.series.length) main.append(add(panel({ title: "No readings yet", class: "wide" })).element);
  return main;
}
