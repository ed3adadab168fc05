/** Starts the page: opens what the address names, keeps it up to date, and reads the keys. */

import "uplot/dist/uPlot.min.css";
import "./page.css";
import type { RunRow } from "./api";
import { embedded, getJson, RunData } from "./data";
import { copy, h, setTheme, toast } from "./dom";
import { header } from "./header";
import { acceptVerdict, at, currentRun, drawAll, go, isPaused, lastShown, onRedraw, pan, pin, redraw, removeAll, show, span, state } from "./page";
import { indexAt } from "./scale";
import { parseLink } from "./state";
import { compareView } from "./views/compare";
import { drawDrawer, forgetDrawer, moveLayer } from "./views/drawer";
import { help } from "./views/help";
import { askAhead, runView } from "./views/run";
import { runsView } from "./views/runs";
import { nextSmoothing } from "./views/smoothing";
import { mainSeries, zoomToFault } from "./views/strip";
import { MAP_METRICS, mapMetrics, mapMetric } from "./views/where";

const report = embedded();
const dark = matchMedia("(prefers-color-scheme: dark)");
const dialog = help();
const place = h("div", { id: "view" });
let run: RunData | null = null;
let compared: RunData[] = [];
let rows: RunRow[] = [];
let built: string | null = null;
let refreshRuns: (() => Promise<void>) | null = null;
/** Counts openings, so that an answer that comes late does not replace what was opened after it. */
let opening = 0;
/** Whether what the address names could not be shown; it is tried again when the runs change. */
let failed = false;

const top = header({ open: (name) => void open(name), view: (view) => void openView(view), theme: toggleTheme, help: () => dialog.showModal() });

function applyTheme(): void {
  setTheme(state.theme ?? (dark.matches ? "dark" : "light"));
  redraw();
}

function toggleTheme(): void {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  go({ theme: next });
  applyTheme();
}

function clear(): void {
  forgetDrawer();
  removeAll();
  run?.close();
  compared.forEach((other) => other.close());
  [run, compared, refreshRuns, built] = [null, [], null, null];
  show(null);
}

function message(text: string, retry?: () => void): HTMLElement {
  return h("main", { class: "page" }, h("div", { class: "panel message-page", role: "status" }, h("p", {}, text), retry && h("button", { type: "button", class: "button primary", onclick: retry }, "Try again")));
}

/** Shows what `work` makes; a skeleton if that takes a while, a sentence if it fails. */
async function present(work: () => Promise<HTMLElement>): Promise<void> {
  const mine = ++opening;
  clear();
  const skeleton = setTimeout(() => mine === opening && place.replaceChildren(h("main", { class: "page skeleton", "aria-busy": "true" }, h("div"), h("div"), h("div"))), 300);
  try {
    const made = await work();
    if (mine !== opening) return;
    failed = false;
    place.replaceChildren(made);
  } catch (error) {
    if (mine !== opening) return;
    failed = true;
    place.replaceChildren(message((error as Error).message, () => void openView(state.view)));
  } finally {
    clearTimeout(skeleton);
  }
  redraw();
}

function build(): HTMLElement {
  built = metricNames();
  return runView(run!, report !== null, showNews);
}

function layOut(): void {
  forgetDrawer();
  removeAll();
  place.replaceChildren(build());
}

/** Shows what was newly found in the run. */
function showNews(): void {
  acceptVerdict();
  go({ zoom: null, step: null, alert: null });
  layOut();
  scrollTo(0, 0);
}

/** Which panels the page has: one more metric is one more panel. */
const metricNames = () => run!.overview.series.map(({ name }) => name).join();

function changed(what: "data" | "overview"): void {
  if (what === "overview" && run && built !== null && metricNames() !== built) {
    const scroll = scrollY;
    layOut();
    scrollTo(0, scroll);
  }
  redraw();
}

function open(name: string): Promise<void> {
  if (name !== state.run || state.view !== "run") go({ run: name, view: "run", step: null, zoom: null, alert: null, layer: null, metric: null });
  return present(async () => {
    const mine = opening;
    const found = await RunData.open(name, changed);
    if (mine !== opening) throw new Error("Another run was opened meanwhile.");
    run = found;
    document.title = `${name} · forewarn`;
    show(run);
    askAhead(run);
    await Promise.resolve(); // the requests go out before the page is built
    if (mine !== opening) throw new Error("Another run was opened meanwhile.");
    run.follow();
    top.choose(rows);
    return build();
  });
}

function openView(view: "run" | "runs" | "compare"): Promise<void> {
  if (view === "run" && (state.run || rows[0])) return open(state.run || rows[0]!.run);
  if (view === "compare" && state.runs.length > 1) {
    go({ view });
    return present(() =>
      compareView(state.runs, (runs) => (compared = runs)),
    );
  }
  if (view === "compare") toast("Choose two or more runs to compare.");
  go({ view: "runs", step: null, zoom: null, alert: null, layer: null });
  document.title = "forewarn";
  return present(async () => {
    const list = runsView(
      (name) => void open(name),
      (runs) => {
        go({ runs, run: runs[0], step: null, zoom: null });
        void openView("compare");
      },
    );
    refreshRuns = list.refresh;
    await list.refresh();
    return list.element;
  });
}

async function readRuns(): Promise<void> {
  rows = (await getJson<{ runs: RunRow[] }>("runs")).runs;
  top.choose(rows);
}

function follow(): void {
  const events = new EventSource("api/events");
  events.addEventListener("runs", () => {
    void readRuns().catch(() => undefined);
    void refreshRuns?.().catch(() => undefined);
    if (failed) void openView(state.view);
  });
  events.onerror = () => events.readyState === EventSource.CLOSED && setTimeout(follow, 3000);
}

/** The steps at which there are readings, for the arrow keys. */
function readingSteps(): ArrayLike<number> {
  const metric = mapMetric();
  return (metric && currentRun().map(metric)?.starts) || currentRun().line(mainSeries())?.steps || [];
}

const KEYS: Record<string, () => void> = {
  ArrowLeft: () => {
    const steps = readingSteps();
    pin(steps[Math.max(0, indexAt(steps, at() - 1))] ?? at());
  },
  ArrowRight: () => {
    const steps = readingSteps();
    pin(steps[indexAt(steps, at()) + 1] ?? at());
  },
  "[": () => nextAlert(-1),
  "]": () => nextAlert(1),
  z: zoomToFault,
  "0": () => go({ zoom: "all" }),
  l: () => go(isPaused() ? { step: null, zoom: null } : { step: lastShown() }),
};

function nextAlert(direction: number): void {
  const steps = currentRun().overview.alerts.map((alert) => alert.since).sort((a, b) => (a - b) * direction);
  const next = steps.find((step) => (step - at()) * direction > 0);
  if (next !== undefined) pin(next);
}

function key(event: KeyboardEvent): void {
  const target = event.target as HTMLElement;
  if (event.ctrlKey || event.metaKey || event.altKey || target.matches("input, select, textarea") || dialog.open) return;
  const views = ["run", "runs", "compare"] as const;
  const metric = MAP_METRICS.find(([, letter]) => letter === event.key)?.[0];
  if (event.key === "?") dialog.showModal();
  else if (event.key === "t") toggleTheme();
  else if (event.key === "c") void copy(location.href, "Link copied: run, step, zoom, alert and layer");
  else if (event.key === "s") nextSmoothing();
  else if (event.shiftKey && event.key.startsWith("Arrow")) pan(((span()[1] - span()[0]) / 4) * (event.key === "ArrowLeft" ? -1 : 1));
  else if (!report && "123".includes(event.key)) void openView(views[Number(event.key) - 1]!);
  else if (!run) return;
  else if (event.key === "Escape") go(state.layer ? { layer: null } : state.alert ? { alert: null } : { step: null });
  else if (state.layer && event.key === "ArrowUp") moveLayer(-1);
  else if (state.layer && event.key === "ArrowDown") moveLayer(1);
  else if (metric && mapMetrics().includes(metric)) go({ metric });
  else if (KEYS[event.key]) KEYS[event.key]!();
  else return;
  event.preventDefault();
}

onRedraw(() => {
  top.draw(run !== null);
  if (run) drawDrawer();
});
document.addEventListener("keydown", key);
dark.addEventListener("change", applyTheme);
addEventListener("resize", redraw);
addEventListener("beforeprint", () => {
  document.body.classList.add("printing"); // charts are drawn for the width of the paper
  drawAll();
});
addEventListener("afterprint", () => {
  document.body.classList.remove("printing");
  redraw();
});
addEventListener("hashchange", () => {
  const { run: before, view, runs } = state;
  Object.assign(state, parseLink(location.hash));
  applyTheme();
  if (report) return;
  if (state.run !== before || state.view !== view || state.runs.join("\n") !== runs.join("\n")) void openView(state.view);
});

applyTheme();
document.body.append(...(report ? [] : [top.element]), place, dialog);
if (report) {
  document.body.classList.add("in-report");
  run = new RunData(report.overview, changed, report.blobs);
  go({ view: "run", run: run.id });
  show(run);
  place.append(build());
} else {
  follow(); // which says at once which runs there are
  setInterval(redraw, 1000);
  void openView(state.view).then(() => state.panel && document.getElementById(state.panel)?.scrollIntoView());
}
