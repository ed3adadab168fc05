/** One layer: its alerts, its readings and the spread of its values. */

import { inItsUnit } from "../charts/evidence";
import { histogramChart } from "../charts/histogram";
import { h, sign } from "../dom";
import { add, currentRun, go, type Part, remove, state } from "../page";
import { label, lane } from "./lines";
import { openAlert } from "./spread";
import { shownRows } from "./where";

const PARAMETER = ["gradient/norm", "update/ratio", "weight/norm"];
const MODULE = ["activation/abs_max", "activation/std", "attention/layer_max_logit", "attention/layer_entropy", "gain/block"];

/** The module of a parameter, and the block around it: what is recorded for them concerns the layer too. */
function scopesAround(layer: string): string[] {
  const parts = layer.split(".");
  return parts.map((_, index) => parts.slice(0, parts.length - index).join("."));
}

let shown: { layer: string; part: Part } | null = null;

function build(layer: string): Part {
  const run = currentRun();
  const around = scopesAround(layer);
  const shape = run.overview.layers.find((candidate) => candidate.scope === layer)?.shape;
  const alerts = run.overview.alerts.filter((alert) => alert.scopes.some((scope) => around.slice(0, 3).includes(scope)));
  const lines = [...PARAMETER, ...MODULE].flatMap((metric) => {
    const scope = [layer, `${layer}.weight`, ...around.slice(1)].find((candidate) => candidate && run.records(metric, candidate));
    return scope === undefined ? [] : [lane(metric, 104, () => run.line(metric, scope))];
  });
  const parts = [...lines];
  for (const metric of ["gradient/histogram", "weight/histogram"]) {
    const scope = [layer, `${layer}.weight`].find((candidate) => run.histogramScopes(metric).includes(candidate));
    if (scope === undefined) continue;
    const chart = histogramChart(label(metric), () => run.histograms(metric, scope), 130);
    parts.push({ ...chart, element: h("div", { class: "lane" }, h("header", {}, h("b", {}, label(metric)), h("span", { class: "out faint" }, "share by size")), chart.element) });
  }
  const name = h("h2");
  layer.split(".").forEach((word, index) => name.append(...(index ? [".", h("wbr")] : []), word));
  const element = h(
    "aside",
    { class: "drawer", role: "dialog", "aria-label": `Layer ${layer}`, tabindex: -1 },
    h(
      "header",
      {},
      name,
      h("button", { type: "button", class: "icon", "aria-label": "Layer before (↑)", onclick: () => moveLayer(-1) }, "↑"),
      h("button", { type: "button", class: "icon", "aria-label": "Layer after (↓)", onclick: () => moveLayer(1) }, "↓"),
      h("button", { type: "button", class: "icon", "aria-label": "Close (Esc)", onclick: () => go({ layer: null }) }, "✕"),
    ),
    h("p", { class: "faint" }, shape?.length ? `${shape.join(" × ")} values` : ""),
    ...alerts.map((alert) =>
      h(
        "button",
        { type: "button", class: `message ${alert.severity}`, onclick: () => openAlert(alert) },
        sign(alert.state === "resolved" ? "resolved" : alert.severity),
        h("span", {}, h("b", {}, alert.headline), alert.value === null ? "" : `: ${inItsUnit(alert, alert.value)}`, `, step ${alert.since}`),
      ),
    ),
    ...parts.map((part) => part.element),
    !parts.length && h("p", {}, "Nothing is recorded for this layer."),
  );
  return { element, draw: () => parts.forEach((part) => part.draw()), destroy: () => parts.forEach((part) => part.destroy?.()) };
}

export function moveLayer(by: number): void {
  const scopes = shownRows().map((row) => row.scope);
  const next = scopes[Math.max(0, Math.min(scopes.length - 1, scopes.indexOf(state.layer ?? "") + by))];
  if (next) go({ layer: next });
}

/** Shows the layer in the state, or nothing. */
export function drawDrawer(): void {
  const layer = state.view === "run" ? state.layer : null;
  if ((shown?.layer ?? null) === layer) return;
  const scroll = shown?.part.element.scrollTop ?? 0;
  if (shown) remove(shown.part);
  shown = layer === null ? null : { layer, part: add(build(layer)) };
  document.body.classList.toggle("has-drawer", shown !== null);
  if (!shown) return;
  document.body.append(shown.part.element);
  shown.part.element.scrollTop = scroll;
}

export function forgetDrawer(): void {
  if (shown) remove(shown.part);
  shown = null;
  document.body.classList.remove("has-drawer");
}
