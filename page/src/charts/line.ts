/** Lines over steps, by uPlot. All of them share the steps in view and the cursor. */

import uPlot from "uplot";
import type { Line } from "../data";
import { colour, h } from "../dom";
import { number, stepWords } from "../format";
import { at, lastShown, type Part, redraw, span } from "../page";
import { pointAtSteps } from "../pointer";
import { centredMedian, padded, type Span, stepTicks, ticks } from "../scale";

export interface Curve {
  line: Line | undefined;
  /** Stands at the end of the line. */
  name?: string;
  /** Name of a colour of the theme. */
  colour?: string;
  width?: number;
  dash?: number[];
  /** The curve as points, for readings that are far apart. */
  points?: boolean;
  /** The space below the curve has its colour; what comes later is drawn over it. */
  fill?: boolean;
}

export interface LineOptions {
  label: string;
  height: number;
  curves: () => Curve[];
  log?: boolean;
  /** No axes: a sparkline. */
  bare?: boolean;
  /** Tick labels of the values, such as in milliseconds. */
  format?: (value: number) => string;
  window?: () => Span;
  /** Steps from here on are shaded. */
  since?: () => number | null | undefined;
  /** Values that must be in view. */
  include?: () => number[];
  paint?: (plot: uPlot) => void;
  paintUnder?: (plot: uPlot) => void;
  onClick?: (step: number) => void;
}

const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", Arial, sans-serif';
const MOST_NAME_PIXELS = 120;

/** The curves as uPlot wants them: one column of steps, gaps where a value is not finite. */
function aligned(curves: Curve[]): uPlot.AlignedData {
  const tables = curves.map(({ line }): uPlot.AlignedData => [line?.steps ?? [], (line?.values ?? []).map((value) => (Number.isFinite(value) ? value : null))]);
  return tables.length > 1 ? uPlot.join(tables) : (tables[0] ?? [[]]);
}

export function lineChart(options: LineOptions): Part & { plot: () => uPlot | null } {
  const element = h("div", { class: `chart${options.bare ? " bare" : ""}`, role: "img", "aria-label": options.label });
  element.style.height = `${options.height}px`;
  const window = options.window ?? span;
  let wantsLog = options.log === true;
  let plot: uPlot | null = null;
  let built = "";
  let drawn = "";
  let nameWidth = 0;

  const include = () => options.include?.() ?? [];

  function build(curves: Curve[], log: boolean): uPlot {
    plot?.destroy();
    nameWidth = options.bare ? 0 : Math.min(MOST_NAME_PIXELS, Math.max(0, ...curves.map((curve) => textWidth(curve.name ?? ""))));
    const axis: uPlot.Axis = {
      stroke: () => colour("ink-3"),
      grid: { stroke: () => colour("grid"), width: 1 },
      ticks: { show: false },
      font: FONT,
      show: !options.bare,
    };
    const air = options.bare ? 4 : 8;
    const made = new uPlot(
      {
        width: element.clientWidth,
        height: options.height,
        padding: [air, options.bare ? 2 : nameWidth + 12, options.bare ? 4 : 0, options.bare ? 2 : 0],
        legend: { show: false },
        cursor: {
          y: false,
          drag: { x: false, y: false },
          points: { size: 7, width: 1.6, fill: () => colour("surface"), stroke: () => colour("ink"), ...(options.bare && { show: false }) },
          bind: { mousedown: none, mouseup: none, mousemove: none, mouseenter: none, mouseleave: none, dblclick: none, click: none },
        },
        scales: {
          x: { time: false, range: () => [...window()] },
          y: {
            distr: log ? 3 : 1,
            range: (_, low, high) => {
              const values = [low, high, ...include()].filter((value) => value != null && Number.isFinite(value) && (!log || value > 0));
              return values.length ? padded(Math.min(...values), Math.max(...values), log) : [log ? 0.1 : 0, 1];
            },
          },
        },
        axes: [
          {
            ...axis,
            grid: { show: false },
            size: 24,
            gap: 4,
            splits: (self, _, low, high) => stepTicks(low, high, self.width),
            values: (_, splits) => splits.map(stepWords),
          },
          {
            ...axis,
            size: 48,
            gap: 4,
            splits: (_self, _, low, high) => ticks(low, high, Math.max(2, options.height / 48), log),
            filter: (_, splits) => splits,
            values: (_, splits) => splits.map(options.format ?? number),
          },
        ],
        series: [
          {},
          ...curves.map(
            (curve): uPlot.Series => ({
              stroke: () => colour(curve.colour ?? "d1"),
              width: curve.width ?? 1.5,
              dash: curve.dash,
              fill: curve.fill ? () => colour(curve.colour ?? "d1") : undefined,
              points: curve.points ? { size: 5, fill: () => colour(curve.colour ?? "d1") } : { show: lonely },
              spanGaps: false,
            }),
          ),
        ],
        hooks: { drawClear: [painted(shade), painted(options.paintUnder)], draw: [painted(gaps), painted(options.paint), painted(names)] },
      },
      aligned(curves),
      element,
    );
    pointAtSteps(made.over, { stepAt: (x) => made.posToVal(x, "x"), onClick: options.onClick });
    return made;
  }

  function shade(self: uPlot): void {
    const since = options.since?.();
    if (since == null || since > self.scales.x!.max!) return;
    const left = Math.max(self.bbox.left, self.valToPos(since, "x", true));
    self.ctx.fillStyle = colour("since");
    self.ctx.fillRect(left, self.bbox.top, self.bbox.left + self.bbox.width - left, self.bbox.height);
  }

  /** Marks at the top where a reading is not finite; of a layer, NaN only means that there was nothing to read. */
  function gaps(self: uPlot): void {
    const ratio = uPlot.pxRatio;
    self.ctx.fillStyle = colour("crit");
    for (const { line } of options.curves()) {
      if (!line) continue;
      for (let index = 0; index < line.steps.length; index++) {
        const [step, value] = [line.steps[index]!, line.values[index]!];
        if (Number.isFinite(value) || (Number.isNaN(value) && line.scope) || step < self.scales.x!.min! || step > self.scales.x!.max!) continue;
        self.ctx.fillRect(self.valToPos(step, "x", true) - ratio, self.bbox.top, 2 * ratio, 8 * ratio);
      }
    }
  }

  /** Names at the ends of the lines, moved apart. */
  function names(self: uPlot): void {
    if (!nameWidth) return;
    const ratio = uPlot.pxRatio;
    const right = (self.bbox.left + self.bbox.width) / ratio + 6;
    const labels = options.curves().flatMap(({ line, name, colour: tone }, index) => {
      const last = line?.steps.findLastIndex((step, place) => step <= self.scales.x!.max! && Number.isFinite(line.values[place])) ?? -1;
      if (!name || last < 0) return [];
      return [{ name, tone: tone ?? "d1", y: self.valToPos(line!.values[last]!, "y", true) / ratio, index }];
    });
    labels.sort((a, b) => a.y - b.y);
    labels.forEach((label, index) => (label.y = Math.max(label.y, index ? labels[index - 1]!.y + 13 : 6)));
    const { ctx } = self;
    ctx.scale(ratio, ratio);
    ctx.font = `600 ${FONT}`;
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    for (const { name, tone, y } of labels) {
      ctx.fillStyle = colour(tone);
      ctx.fillText(shortened(ctx, name, nameWidth), right, Math.min(y, self.height - 6));
    }
  }

  function draw(): void {
    const width = element.clientWidth;
    if (!width) return;
    const curves = options.curves();
    const values = [...curves.flatMap(({ line }) => line?.values ?? []).filter(Number.isFinite), ...include()];
    const log = wantsLog && values.every((value) => value > 0);
    const signature = JSON.stringify([log, curves.map(({ colour: tone, dash, name, points }) => [tone, dash, name, points])]);
    const content = JSON.stringify([curves.map(({ line }) => line?.version ?? 0), window(), width, include(), options.since?.(), document.documentElement.dataset.theme]);
    if (!plot || signature !== built) plot = build(curves, log);
    else if (content !== drawn) {
      if (plot.width !== width) plot.setSize({ width, height: options.height });
      plot.setData(aligned(curves));
    }
    [built, drawn] = [signature, content];
    const [from, to] = window();
    const step = at();
    plot.setCursor({ left: step >= from && step <= to ? plot.valToPos(step, "x") : -10, top: 1 }, false);
  }

  return {
    element,
    draw,
    plot: () => plot,
    destroy: () => plot?.destroy(),
    canvas: () => plot?.ctx.canvas ?? null,
    changeScale: () => {
      wantsLog = !wantsLog;
      redraw();
    },
    rows: () => [
      ["series", "scope", "step", "value"],
      ...options.curves().flatMap(({ line, name }) => (line ? line.steps.map((step, index) => [name ?? line.name, line.scope, step, line.values[index]!]) : [])),
    ],
  };
}

const none = () => null;

/** Leaves the context as it was: uPlot remembers what it set. */
const painted = (paint: ((plot: uPlot) => void) | undefined) => (self: uPlot) => {
  self.ctx.save();
  paint?.(self);
  self.ctx.restore();
};

let ruler: CanvasRenderingContext2D | null = null;

/** Width of a name at the end of a line. */
function textWidth(text: string): number {
  ruler ??= h("canvas").getContext("2d")!;
  ruler.font = `600 ${FONT}`;
  return text ? Math.ceil(ruler.measureText(text).width) + 1 : 0;
}

/** A point for a reading without neighbours, which a line would not show. */
const lonely = (self: uPlot, index: number) => Array.from(self.data[index]!).filter((value) => value != null).length === 1;

export function shortened(context: CanvasRenderingContext2D, text: string, pixels: number): string {
  if (context.measureText(text).width <= pixels) return text;
  let kept = text;
  while (kept.length > 1 && context.measureText(`…${kept}`).width > pixels) kept = kept.slice(1);
  return `…${kept}`;
}

const medians = new WeakMap<Line, { version: number; line: Line }>();

/** The centred median of a line, as a line; computed once per version of its data. */
export function medianLine(line: Line | undefined, width: number): Line | undefined {
  if (!line) return undefined;
  const known = medians.get(line);
  if (known?.version === line.version) return known.line;
  const smooth = { ...line, name: `${line.name}, median of ${width}`, values: centredMedian(line.values, width) };
  medians.set(line, { version: line.version, line: smooth });
  return smooth;
}

/** The whole run. */
export function wholeRun(): Span {
  return [0, lastShown()];
}
