/** The whole run in one strip that stays in sight: its alerts, the steps in view and the current step. */

import uPlot from "uplot";
import { severityColour } from "../charts/evidence";
import { lineChart, wholeRun } from "../charts/line";
import { colour, h, mark, say } from "../dom";
import { at, currentRun, faultStep, go, isWhole, type Part, span, state } from "../page";
import { label, reading } from "./lines";
import { smoothingChoice } from "./smoothing";

/** The series that stands for the run: its loss, or else the first of the whole run. */
export function mainSeries(): string {
  const run = currentRun();
  return run.records("train/loss", "") ? "train/loss" : (run.overview.series.find((series) => series.scopes.includes(""))?.name ?? "train/loss");
}

export function zoomToFault(): void {
  const since = faultStep();
  if (since !== null) go({ zoom: null, step: since });
}

export function strip(): Part {
  const run = currentRun();
  const chart = lineChart({
    label: "The whole run: drag to choose steps, or drag the window",
    height: 40,
    bare: true,
    window: wholeRun,
    pans: (step) => step >= span()[0] && step <= span()[1],
    curves: () => [{ line: run.line(mainSeries()), width: 1.2 }],
    paintUnder: (self) => {
      const { ctx, bbox } = self;
      const [from, end] = span().map((step) => self.valToPos(step, "x", true)) as [number, number];
      const to = Math.max(end, from + 4);
      ctx.fillStyle = colour("surface-2");
      ctx.fillRect(bbox.left, bbox.top - 4, bbox.width, bbox.height + 8);
      ctx.fillStyle = colour("surface");
      ctx.fillRect(from, bbox.top - 4, to - from, bbox.height + 8);
      ctx.strokeStyle = colour("line-strong");
      ctx.lineWidth = 1;
      ctx.strokeRect(from + 0.5, bbox.top - 3.5, to - from - 1, bbox.height + 7);
    },
    paint: (self) => {
      const ratio = uPlot.pxRatio;
      for (const alert of [...run.overview.alerts].reverse()) {
        mark(self.ctx, alert.severity, self.valToPos(alert.since, "x", true), self.bbox.top + 4 * ratio, 8 * ratio, colour(severityColour[alert.severity]), colour("surface"));
      }
    },
  });
  const [step, value] = [h("b"), h("small")];
  const smoothing = smoothingChoice();
  const fault = h("button", { type: "button", class: "button", onclick: zoomToFault }, "Zoom to the fault");
  const whole = h("button", { type: "button", class: "button", onclick: () => go({ zoom: "all" }) }, "Whole run");
  const element = h("div", { class: "strip" }, h("div", { class: "inside" }, h("div", { class: "at" }, step, value), chart.element, h("div", { class: "controls" }, smoothing.element, fault, whole)));
  let drawn = "";
  return {
    element,
    destroy: chart.destroy,
    draw: () => {
      say(step, `step ${at().toLocaleString("en-US")}`);
      say(value, `${label(mainSeries()).toLowerCase()} ${reading(run.line(mainSeries()))}`);
      smoothing.draw();
      fault.hidden = faultStep() === null;
      fault.disabled = state.zoom === null && (state.step === null || state.step === faultStep());
      whole.disabled = isWhole();
      chart.draw();
      const content = JSON.stringify([span(), run.overview.alerts.length]);
      if (content !== drawn) chart.plot()?.redraw(false);
      drawn = content;
    },
  };
}
