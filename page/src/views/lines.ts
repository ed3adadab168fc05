/** Panels and lanes of recorded series: a metric with all its scopes, named as the catalogue names it. */

import { legend } from "../charts/legend";
import { type Curve, lineChart } from "../charts/line";
import type { Line, RunData } from "../data";
import { h, say } from "../dom";
import { withUnit } from "../format";
import { at, currentRun, faultStep, type Part } from "../page";
import { panel } from "../panel";
import { stacked, valueAt } from "../scale";

const MOST_CURVES = 12;
const MOST_NAMES = 6;
const COLOURS = ["r1", "r2", "r3", "r4", "r5", "r6"];
const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3], [4, 2], [1, 3]];

/** Colour and dash of the n-th of several lines; a line keeps both everywhere. */
export function look(index: number): Pick<Curve, "colour" | "dash"> {
  return { colour: COLOURS[index % COLOURS.length], dash: DASHES[(index + Math.floor(index / COLOURS.length)) % DASHES.length] };
}

export function label(metric: string): string {
  const words = currentRun().overview.metrics[metric]?.label ?? metric;
  return words.charAt(0).toUpperCase() + words.slice(1);
}

const unitOf = (metric: string) => currentRun().overview.metrics[metric]?.unit ?? "";

/** Tick labels in the unit, where the number alone would mislead. */
export function tickWords(unit: string): ((value: number) => string) | undefined {
  return unit === "s" || unit === "bytes" || unit === "share" ? (value) => withUnit(value, unit) : undefined;
}

/** The value of a series at the step that is looked at, in its unit. */
export function reading(line: Line | undefined): string {
  if (!line) return "";
  return withUnit(valueAt(line, at()), unitOf(line.name));
}

export function curves(run: RunData, metric: string, among = run.scopesOf(metric)): Curve[] {
  const scopes = among.slice(0, MOST_CURVES);
  if (scopes.length === 1) return [{ line: run.line(metric, scopes[0]) }];
  return scopes.map((scope, index) => ({ line: run.line(metric, scope), name: scope, ...look(index), isNamedInLegend: scopes.length > MOST_NAMES }));
}

function metricChart(metric: string, height: number, scopes?: string[]) {
  const run = currentRun();
  return lineChart({
    label: label(metric),
    height,
    log: run.overview.metrics[metric]?.log,
    format: tickWords(unitOf(metric)),
    curves: () => curves(run, metric, scopes),
    since: faultStep,
  });
}

const single = (metric: string, scopes?: string[]) => () => {
  const shown = curves(currentRun(), metric, scopes);
  return shown.length === 1 ? reading(shown[0]!.line) : "";
};

export function metricPanel(metric: string, height: number, options: { class: string; sub?: string; scopes?: string[] }): Part {
  const run = currentRun();
  const { sub = run.overview.metrics[metric]?.meaning ?? "", scopes = run.scopesOf(metric) } = options;
  const parts: Part[] = [metricChart(metric, height, scopes)];
  if (scopes.length > 1) parts.push(legend(() => curves(run, metric, scopes), (value) => withUnit(value, unitOf(metric)), scopes.length - MOST_CURVES));
  return panel({ title: label(metric), sub, out: single(metric, scopes), class: options.class }, ...parts);
}

/** The parts of a metric on top of each other, such as the phases of a step. */
export function stackPanel(metric: string, height: number, options: { class: string; sub: string }): Part {
  const run = currentRun();
  let held: { version: string; curves: Curve[] } = { version: "", curves: [] };
  const parts = () => curves(run, metric).filter(({ line }) => line?.values.some((value) => value > 0));
  const stack = (): Curve[] => {
    const shown = parts();
    const version = shown.map(({ line }) => line!.version).join();
    if (version !== held.version) {
      const lines = stacked(shown.map(({ line }) => line!));
      const piled = shown.map(({ line, name, colour }, index): Curve => ({ name, colour, fill: true, line: { ...line!, ...lines[index] } }));
      held = { version, curves: piled.reverse() };
    }
    return held.curves;
  };
  const chart = lineChart({ label: label(metric), height, exact: true, format: tickWords(unitOf(metric)), include: () => [0], curves: stack, since: faultStep });
  const rows = () => [
    ["series", "scope", "step", "value"],
    ...parts().flatMap(({ line }) => line!.steps.map((step, index) => [metric, line!.scope, step, line!.values[index]!])),
  ];
  const values = legend(() => parts().map(({ line, name, colour }) => ({ line, name, colour })), (value) => withUnit(value, unitOf(metric)));
  return panel({ title: label(metric), sub: options.sub, class: options.class }, { ...chart, changeScale: undefined, rows }, values);
}

/** A small chart without a box of its own. */
export function lane(metric: string, height: number, line?: () => Line | undefined): Part {
  const chart = line
    ? lineChart({ label: label(metric), height, log: currentRun().overview.metrics[metric]?.log, format: tickWords(unitOf(metric)), curves: () => [{ line: line() }], since: faultStep })
    : metricChart(metric, height);
  const output = h("output", { class: "out" });
  const out = line ? () => reading(line()) : single(metric);
  const element = h("div", { class: "lane" }, h("header", {}, h("b", {}, label(metric)), output), chart.element);
  return {
    ...chart,
    element,
    draw: () => {
      say(output, out());
      chart.draw();
    },
  };
}
