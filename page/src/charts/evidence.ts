/** The series that a rule judged, with its limit, what was usual, and where it passed the limit. */

import uPlot from "uplot";
import type { Alert } from "../api";
import { colour, h, mark } from "../dom";
import { withUnit } from "../format";
import { currentRun, type Part } from "../page";
import { lineChart } from "./line";

/** A number of an alert in the unit of the judged series, unless it was computed from it. */
export function inItsUnit(alert: Alert, value: number): string {
  const judged = alert.computed === null ? alert.judged : null;
  return withUnit(value, (judged && currentRun().overview.metrics[judged.name]?.unit) ?? "");
}

function usualWords(alert: Alert, [low, high]: [number, number]): string {
  return low === high ? `usual level ${inItsUnit(alert, low)}` : `usual ${inItsUnit(alert, low)} to ${inItsUnit(alert, high)}`;
}

export const severityColour = { critical: "crit", warning: "warn-line", info: "note" } as const;

function text(self: uPlot, words: string, x: number, y: number, tone: string, align: CanvasTextAlign): void {
  const { ctx } = self;
  const ratio = uPlot.pxRatio;
  ctx.save();
  ctx.font = `600 ${11 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = align;
  ctx.textBaseline = "alphabetic";
  ctx.lineJoin = "round";
  ctx.lineWidth = 3 * ratio;
  ctx.strokeStyle = colour("surface");
  ctx.strokeText(words, x, y);
  ctx.fillStyle = colour(tone);
  ctx.fillText(words, x, y);
  ctx.restore();
}

/** An alert's evidence; small and without words as a sparkline. */
export function evidenceChart(alert: Alert, height: number, bare = false): Part {
  const run = currentRun();
  const { judged, limit, usual } = alert;
  const line = () => (judged ? run.line(judged.name, judged.scope) : undefined);

  function under(self: uPlot): void {
    if (!usual) return;
    const [low, high] = usual.map((value) => self.valToPos(value, "y", true)) as [number, number];
    self.ctx.fillStyle = colour("band");
    self.ctx.fillRect(self.bbox.left, Math.min(low, high), self.bbox.width, Math.max(1, Math.abs(low - high)));
  }

  function over(self: uPlot): void {
    const { ctx, bbox } = self;
    const ratio = uPlot.pxRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top - 4 * ratio, bbox.width, bbox.height + 8 * ratio);
    ctx.clip();
    if (limit !== null) {
      past(self);
      const y = self.valToPos(limit, "y", true);
      ctx.strokeStyle = colour("limit");
      ctx.lineWidth = (bare ? 1 : 1.5) * ratio;
      ctx.setLineDash([5 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.setLineDash([]);
      if (!bare) text(self, `limit${alert.side === "below" ? ", at least" : ""} ${inItsUnit(alert, limit)}`, bbox.left + 6 * ratio, y - 5 * ratio, "limit", "left");
    }
    if (usual && !bare) {
      const y = self.valToPos(Math.max(...usual), "y", true);
      text(self, usualWords(alert, usual), bbox.left + 6 * ratio, y - 4 * ratio, "ink-3", "left");
    }
    ctx.restore();
    if (!bare) fired(self);
  }

  /** The part of the line past the limit, from the first sight of the alert on. */
  function past(self: uPlot): void {
    const points = line();
    if (!points) return;
    const { ctx, bbox } = self;
    const y = self.valToPos(limit!, "y", true);
    ctx.save();
    ctx.beginPath();
    if (alert.side === "below") ctx.rect(bbox.left, y, bbox.width, bbox.top + bbox.height - y + 8);
    else ctx.rect(bbox.left, bbox.top - 8, bbox.width, y - bbox.top + 8);
    ctx.clip();
    ctx.beginPath();
    let broken = true;
    points.steps.forEach((step, index) => {
      const value = points.values[index]!;
      if (!Number.isFinite(value) || step < alert.since - 1 - (step - (points.steps[index - 1] ?? step))) {
        broken = true;
        return;
      }
      const [x, height] = [self.valToPos(step, "x", true), self.valToPos(value, "y", true)];
      if (broken) ctx.moveTo(x, height);
      else ctx.lineTo(x, height);
      broken = false;
    });
    ctx.strokeStyle = colour("warn-line");
    ctx.lineWidth = (bare ? 1.8 : 2.6) * uPlot.pxRatio;
    ctx.lineJoin = "round";
    ctx.stroke();
    ctx.restore();
  }

  function fired(self: uPlot): void {
    if (alert.value === null || alert.fired < self.scales.x!.min! || alert.fired > self.scales.x!.max!) return;
    const ratio = uPlot.pxRatio;
    const [x, y] = [self.valToPos(alert.fired, "x", true), self.valToPos(alert.value, "y", true)];
    mark(self.ctx, alert.severity, x, y, 12 * ratio, colour(severityColour[alert.severity]), colour("surface"));
    const isRight = x > self.bbox.left + self.bbox.width * 0.62;
    text(self, `${inItsUnit(alert, alert.value)} at step ${alert.fired}`, x + (isRight ? 6 : -6) * ratio, Math.max(y - 9 * ratio, self.bbox.top + 10 * ratio), "ink", isRight ? "right" : "left");
  }

  const chart = lineChart({
    label: `Evidence: ${alert.numbers}`,
    height,
    bare,
    exact: true,
    format: (value) => inItsUnit(alert, value),
    log: judged ? run.overview.metrics[judged.name]?.log : false,
    curves: () => [{ line: line(), width: bare ? 1.2 : 1.6 }],
    since: () => alert.since,
    include: () => [limit, ...(usual ?? []), bare ? null : alert.value].filter((value) => value !== null),
    paintUnder: under,
    paint: over,
  });
  return chart;
}

export function evidenceKey(alert: Alert): HTMLElement {
  const key = (name: string, words: string) => h("span", { class: `key ${name}` }, h("i"), words);
  return h(
    "p",
    { class: "keys" },
    key("judged", "judged value"),
    alert.limit !== null && key("past", "past the limit"),
    alert.limit !== null && key("limit", `limit ${inItsUnit(alert, alert.limit)}`),
    alert.usual && key("band", alert.usual[0] === alert.usual[1] ? "usual level" : "usual range before"),
    alert.computed && h("span", {}, alert.computed),
  );
}

export function isPastLimit(alert: Alert | undefined, value: number): boolean {
  if (alert === undefined || alert.limit === null) return false;
  return alert.side === "below" ? value < alert.limit : value > alert.limit;
}
