/** Where in the model: values over depth and steps, and over depth at one step. */

import { heatmap } from "../charts/heatmap";
import { profileChart } from "../charts/profile";
import type { DepthMap } from "../data";
import { depthRows, type Row } from "../depth";
import { h, say } from "../dom";
import { number } from "../format";
import { at, currentRun, go, lastShown, type Part, pin, redraw, state } from "../page";
import { panel } from "../panel";
import { label } from "./lines";

/** The metrics of the map, and their keys. */
export const MAP_METRICS: [string, string][] = [["gradient/norm", "g"], ["update/ratio", "u"], ["weight/norm", "w"], ["activation/abs_max", "a"], ["gain/block", "b"]];

export function mapMetrics(): string[] {
  return MAP_METRICS.map(([metric]) => metric).filter((metric) => currentRun().records(metric));
}

/** The metric of the map: the chosen one, the one that the cause is about, or the first. */
export function mapMetric(): string | undefined {
  const metrics = mapMetrics();
  if (state.metric && metrics.includes(state.metric)) return state.metric;
  const judged = currentRun().overview.alerts.find((alert) => alert.judged)?.judged?.name ?? "";
  const family = judged.includes("update_ratio") ? "update" : judged.includes("grad") ? "gradient" : judged.split("/")[0]!;
  return metrics.find((metric) => metric === judged) ?? metrics.find((metric) => metric.startsWith(`${family}/`)) ?? metrics[0];
}

let filter = "";
let all = false;
let memory: { map: DepthMap | undefined; filter: string; all: boolean; rows: Row[] } | null = null;

/** The rows that the map shows. */
export function shownRows(): Row[] {
  const metric = mapMetric();
  const map = metric ? currentRun().map(metric) : undefined;
  if (!memory || memory.map?.version !== map?.version || memory.map?.metric !== map?.metric || memory.filter !== filter || memory.all !== all) {
    memory = { map, filter, all, rows: map ? depthRows(currentRun().overview, map, filter, all) : [] };
  }
  return memory.rows;
}

export function where(openLayer: (scope: string) => void): Part | null {
  const run = currentRun();
  if (!mapMetrics().length) return null;
  [filter, all, memory] = ["", false, null];
  const map = () => (mapMetric() ? run.map(mapMetric()!) : undefined);
  const alerts = () => run.overview.alerts.filter((alert) => alert.scopes.some(Boolean));
  const rowAlert = () => alerts().find((alert) => alert.judged?.name === mapMetric() && alert.judged?.scope !== "" && alert.computed === null);

  const buttons = mapMetrics().map((metric) => h("button", { type: "button", "data-metric": metric, onclick: () => go({ metric }) }, label(metric)));
  const search = h("input", { type: "search", placeholder: "Filter layers: text or regex", "aria-label": "Filter layers by text or regular expression", oninput: () => ((filter = search.value.trim()), redraw()) });
  const everything = h("button", { type: "button", class: "button", onclick: () => ((all = !all), redraw()) });
  const sub = h("p");
  const empty = h("p", { class: "empty", hidden: true }, "No layer has a name like this.");

  const heat = heatmap({ map, rows: shownRows, alerts, chosen: () => state.layer, open: openLayer });
  const profile = profileChart({ map, rows: shownRows, alert: rowAlert });
  const [low, high, bar, legend] = [h("span"), h("span"), h("i", { class: "bar" }), h("span", {}, "log scale · a mark where an alert fired · beside it, grey: usual before")];
  const slider = h("input", { type: "range", min: 0, step: 1, "aria-label": "Step", oninput: () => pin(Number(slider.value)) });
  const chosen = h("output");
  const over = panel({ title: "Over depth", sub: () => (profile.step() === undefined || profile.step() === at() ? `at step ${at()}` : `read at step ${profile.step()}`), class: "plain" }, profile);
  over.element.append(h("label", { class: "slider" }, "step", slider, chosen));
  const left = panel({ title: "Over depth and steps", sub: () => (heat.readout() ? "" : "click a row for the layer"), out: heat.readout, class: "plain" }, heat);
  left.element.append(h("p", { class: "legend" }, low, bar, high, legend), empty);

  const element = h(
    "section",
    { id: "where" },
    h("div", { class: "section" }, h("h2", {}, "Where in the model"), sub, h("div", { class: "right" }, h("div", { class: "segments", role: "group", "aria-label": "Metric" }, ...buttons), search, everything)),
    h("div", { class: "panel depth" }, left.element, over.element),
  );
  return {
    element,
    draw: () => {
      const metric = mapMetric()!;
      const data = map();
      const shown = shownRows();
      for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.metric === metric));
      say(sub, run.overview.metrics[metric]?.meaning ?? "");
      const total = data?.scopes.length ?? 0;
      say(everything, all ? "Matrices only" : `All ${total} rows`);
      everything.hidden = total === 0 || (!all && shown.length === total) || filter !== "";
      empty.hidden = !data || shown.length > 0;
      say(low, data ? `${number(data.low)} or less` : "");
      say(high, data ? `${number(data.high)} or more` : "");
      slider.max = String(lastShown());
      if (document.activeElement !== slider || Number(slider.value) !== at()) slider.value = String(at());
      say(chosen, `step ${at()}`);
      left.draw();
      over.draw();
    },
  };
}
