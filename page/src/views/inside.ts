/** Inside the model and around it: spread of values, heads, gains, tasks, the reader's own metrics, speed. */

import { headsChart } from "../charts/heads";
import { histogramChart } from "../charts/histogram";
import { h } from "../dom";
import { at, currentRun, go, type Part, state } from "../page";
import { panel } from "../panel";
import { label, metricPanel, stackPanel } from "./lines";

const MOST_OWN = 30;
const MOST_GAINS = 12;

/** The tensor whose values are shown: the chosen one, one that an alert names, or the first. */
function histogramScope(metric: string): string {
  const run = currentRun();
  const scopes = run.histogramScopes(metric);
  const named = [state.layer, ...run.overview.alerts.flatMap((alert) => alert.scopes)].flatMap((scope) => (scope ? [scope, `${scope}.weight`] : []));
  return named.find((scope) => scopes.includes(scope)) ?? scopes[0]!;
}

function histogramPanel(metric: string): Part {
  const run = currentRun();
  const scopes = run.histogramScopes(metric);
  let chosen: string | null = null;
  const scope = () => chosen ?? histogramScope(metric);
  const select = h("select", { "aria-label": "Tensor", onchange: () => ((chosen = select.value), go({})) }, ...scopes.map((name) => h("option", { value: name }, name)));
  const chart = histogramChart(`${label(metric)} over steps`, () => run.histograms(metric, scope()), 238);
  const title = metric.startsWith("weight") ? "Spread of the weights" : "Spread of the gradient";
  const part = panel({ title, sub: "share of the values by size, powers of two", class: "third" }, chart);
  part.element.insertBefore(select, chart.element);
  return {
    ...part,
    draw: () => {
      if (select.value !== scope()) select.value = scope();
      part.draw();
    },
  };
}

function headsPanel(metric: string): Part {
  const run = currentRun();
  return panel({ title: label(metric), sub: () => `at step ${at()} · 1: looks everywhere, 0: at one place`, class: "third" }, headsChart(() => run.map(metric), [0, 1]));
}

export function inside(): Part[] {
  const run = currentRun();
  const panels: Part[] = [];
  if (run.records("attention/entropy")) panels.push(headsPanel("attention/entropy"));
  for (const metric of ["gradient/histogram", "weight/histogram"]) if (run.histogramScopes(metric).length) panels.push(histogramPanel(metric));
  for (const metric of ["gain/block", "router/load_share"]) {
    const scopes = run.scopesOf(metric).length;
    if (scopes && scopes <= MOST_GAINS) panels.push(metricPanel(metric, 238, { class: "third" }));
  }
  return panels.slice(0, 6);
}

const recorded = (metrics: string[], height: number) =>
  metrics.filter((metric) => currentRun().records(metric)).map((metric) => metricPanel(metric, height, { class: "third" }));

export const tasks = () => recorded(["task/share", "task/remaining", "task/cosine", "task/loss", "task/weight", "eval/task_loss"], 170);

const PHASES = "speed/phase_seconds";
const RESOURCES = [
  "speed/step_seconds", "speed/tokens_per_second", "speed/samples_per_second", "system/process_memory_bytes", "system/cuda_allocated_bytes",
  "system/gpu_utilization_share", "monitor/overhead_share",
];

/** Where the time of a step goes, and what training uses. */
export function speed(): Part[] {
  const run = currentRun();
  const shares = run.overview.checklist.find(({ name }) => name === "time per step")?.detail ?? "";
  return [...(run.records(PHASES) ? [stackPanel(PHASES, 150, { class: "", sub: shares })] : []), ...recorded(RESOURCES, 150)];
}

const RANKS = ["rank/step_seconds", "rank/data_seconds", "rank/forward_seconds", "rank/update_seconds", "rank/loss"];

/** Time and loss of each rank; the ranks that alerts name come first, and the first panel says what is wrong with them. */
export function ranks(): Part[] {
  const run = currentRun();
  const alerts = run.overview.alerts.filter(({ judged }) => judged?.name.startsWith("rank/"));
  const named = alerts.flatMap(({ scopes }) => scopes);
  return RANKS.filter((metric) => run.records(metric)).map((metric, index) => {
    const all = run.scopesOf(metric);
    const scopes = [...all.filter((scope) => named.includes(scope)), ...all.filter((scope) => !named.includes(scope))];
    return metricPanel(metric, 170, { class: "third", scopes, sub: index ? undefined : alerts[0]?.headline });
  });
}

/** What the training loop recorded itself. */
export function own(): Part[] {
  const { metrics, series } = currentRun().overview;
  const names = series.filter(({ name, scopes }) => scopes.includes("") && metrics[name]?.own);
  return recorded(names.map(({ name }) => name).slice(0, MOST_OWN), 150);
}
