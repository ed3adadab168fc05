/** The course of the run: the loss with its alerts, and what moved beside it. */

import type uPlot from "uplot";
import { type Curve, lineChart, medianLine } from "../charts/line";
import type { Alert } from "../api";
import { h, sign } from "../dom";
import { currentRun, faultStep, type Part, state } from "../page";
import { panel } from "../panel";
import { actionMarks, drawActions } from "./actions";
import { lane, metricPanel, reading } from "./lines";
import { mainSeries } from "./strip";

export const LANES = ["train/lr", "gradient/global_norm", "weight/global_norm", "monitor/update_ratio_median", "gain/mean", "eval/loss"];
export const VITALS = ["train/loss", "gradient/global_norm", "monitor/update_ratio_median", "train/lr", "gain/mean", "speed/step_seconds", "weight/global_norm"];
const MEDIAN_WIDTH = 16;
const MARK_PIXELS = 34;

export function lossCurves(): Curve[] {
  const run = currentRun();
  const loss = run.line(mainSeries());
  const curves: Curve[] = [{ line: loss, width: 1.6 }];
  if (state.smooth === null) curves.unshift({ line: medianLine(loss, MEDIAN_WIDTH), colour: "median", width: 3.5 });
  if (run.records("train/loss_ema", "")) curves.push({ line: run.line("train/loss_ema"), colour: "r4", dash: [6, 3], width: 1.2, name: "EMA" });
  if (run.records("eval/loss", "")) curves.push({ line: run.line("eval/loss"), colour: "r3", points: true, name: "evaluation" });
  return curves;
}

function lossPanel(openAlert: (alert: Alert) => void, height: number): Part {
  const run = currentRun();
  const chart = lineChart({ label: "Loss over steps", height, curves: lossCurves, since: faultStep, paint });
  const marks = h("div", { class: "marks" });
  const deeds = actionMarks();
  const holder = h("div", { class: "marked" }, marks, deeds.element, chart.element);
  let drawn = "";

  function paint(plot: uPlot): void {
    drawActions(plot);
    drawMarks(plot);
    deeds.place(plot);
  }

  /** A button per alert above its step; those that would overlap share one. */
  function drawMarks(plot: uPlot): void {
    const [from, to] = [plot.scales.x!.min!, plot.scales.x!.max!];
    const left = plot.over.offsetLeft;
    const placed: { x: number; alerts: Alert[] }[] = [];
    for (const alert of [...run.overview.alerts].sort((a, b) => a.since - b.since)) {
      if (alert.since < from || alert.since > to) continue;
      const x = left + plot.valToPos(alert.since, "x");
      const near = placed.at(-1);
      if (near && x - near.x < MARK_PIXELS) near.alerts.push(alert);
      else placed.push({ x, alerts: [alert] });
    }
    const content = JSON.stringify(placed.map(({ x, alerts }) => [x, alerts.map((alert) => [alert.key, alert.state])]));
    if (content === drawn) return;
    drawn = content;
    marks.replaceChildren(
      ...placed.map(({ x, alerts }) => {
        const shown = alerts.find((alert) => !alert.is_symptom) ?? alerts[0]!;
        const words = alerts.map((alert) => `step ${alert.since}: ${alert.headline}`).join("\n");
        const button = h("button", { type: "button", title: words, "aria-label": words, onclick: () => openAlert(shown) }, sign(shown.state === "resolved" ? "resolved" : shown.severity, alerts.length > 1 ? `${alerts.length}` : undefined));
        button.style.left = `${x}px`;
        return button;
      }),
    );
  }

  const sub = () => {
    const lines = run.line(mainSeries())?.reduced ? "lowest and highest per pixel" : "every step";
    if (state.smooth === null) return `${lines}, not smoothed; grey: median of ${MEDIAN_WIDTH}`;
    return state.smooth ? `${lines}, faint; over it the median of ${state.smooth}` : `${lines}, not smoothed`;
  };
  const part: Part = { ...chart, element: holder, draw: withActions(chart) };
  return panel({ title: "Loss", sub, out: () => reading(run.line(mainSeries())), class: "wide", id: "loss" }, part);
}

/** Draws again when an action is new, which changes no line. */
function withActions(chart: ReturnType<typeof lineChart>): () => void {
  let drawn = "";
  return () => {
    chart.draw();
    const content = JSON.stringify(currentRun().overview.actions);
    if (content !== drawn) chart.plot()?.redraw(false);
    drawn = content;
  };
}

export function course(openAlert: (alert: Alert) => void): Part[] {
  const run = currentRun();
  const judged = run.overview.alerts[0]?.judged?.name;
  const lanes = LANES.filter((metric) => run.records(metric) && metric !== judged).slice(0, 3);
  const beside = lanes.map((metric) => lane(metric, 84));
  const column: Part = {
    element: h("section", { class: "panel lanes third" }, ...beside.map((part) => part.element)),
    draw: () => beside.forEach((part) => part.draw()),
    destroy: () => beside.forEach((part) => part.destroy?.()),
  };
  return [lossPanel(openAlert, 308), ...(beside.length ? [column] : [])];
}

function lossVital(): Part {
  const line = lineChart({ label: "Loss over steps", height: 122, curves: lossCurves, paint: drawActions });
  const chart: Part = { ...line, draw: withActions(line) };
  return panel({ title: "Loss", out: () => reading(currentRun().line("train/loss")), class: "third small" }, chart);
}

export function vitals(): Part[] {
  const run = currentRun();
  const names = VITALS.filter((metric) => run.records(metric)).slice(0, 6);
  return (names.length ? names : [mainSeries()]).map((metric) => (metric === "train/loss" ? lossVital() : metricPanel(metric, 122, { class: "third small", sub: "" })));
}
