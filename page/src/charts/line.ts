/** Lines over steps, by uPlot. All of them share the steps in view and the cursor. */

import uPlot from "uplot";
import type { Line } from "../data";
import { colour, h } from "../dom";
import { number, stepWords } from "../format";
import { at, lastShown, type Part, redraw, span, state } from "../page";
import { pointAtSteps } from "../pointer";
import { centredMedian, indexAt, padded, reduce, type Span, stepTicks, ticks, timeTicks, timeUnit, within } from "../scale";

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
  /** There are too many names for the ends of the lines. */
  isNamedInLegend?: boolean;
  /** Drawn faintly, behind its median. */
  faint?: boolean;
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
  /** Dragging from a step moves the window. */
  pans?: (step: number) => boolean;
  /** Never smoothed: what a rule judged, or a stack. */
  exact?: boolean;
  /** The window is in milliseconds, not in steps. */
  isTime?: () => boolean;
}

const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", Arial, sans-serif';
const MOST_NAME_PIXELS = 120;
const LARGE_PIXELS = 460;
/** Opacity of a line behind its median. */
const FAINT = "55";

/** Each curve faintly, and its median over it, if the reader asks for smooth lines. */
function smoothed(curves: Curve[]): Curve[] {
  const width = state.smooth ?? 0;
  const isLong = ({ line, points }: Curve) => width > 1 && !points && line !== undefined && line.steps.length > width;
  return [...curves.map((curve) => (isLong(curve) ? { ...curve, faint: true, name: undefined } : curve)), ...curves.filter(isLong).map((curve) => ({ ...curve, line: medianLine(curve.line, width) }))];
}

/** Whether a curve has more points in the window than pixels can show: a thin line is clearer, and drawn several times faster. */
function isDense({ line }: Curve, [from, to]: Span, pixels: number): boolean {
  return line !== undefined && indexAt(line.steps, to) - indexAt(line.steps, from) > 2 * pixels;
}

/** The curves as uPlot wants them: one column of steps, gaps where a value is not finite, no more than pixels can show. */
function aligned(curves: Curve[], window: Span, pixels: number): uPlot.AlignedData {
  const tables = curves.map(({ line }): uPlot.AlignedData => {
    const { steps, values } = line ? reduce(within(line, window), pixels) : { steps: [], values: [] };
    return [steps, values.map((value) => (Number.isFinite(value) ? value : null))];
  });
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
  const shown = () => (options.bare || options.exact ? options.curves() : smoothed(options.curves()));
  const height = () => (element.closest(".large") ? Math.max(LARGE_PIXELS, options.height) : options.height);

  const data = (curves: Curve[]) => aligned(curves, window(), element.clientWidth * uPlot.pxRatio);

  function build(curves: Curve[], log: boolean): uPlot {
    plot?.destroy();
    nameWidth = options.bare ? 0 : Math.min(MOST_NAME_PIXELS, Math.max(0, ...curves.map(({ name, isNamedInLegend }) => textWidth(isNamedInLegend ? "" : (name ?? "")))));
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
        height: height(),
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
            splits: (self, _, low, high) => (options.isTime?.() ? timeTicks(low, high, self.width) : stepTicks(low, high, self.width)),
            values: (self, splits) => (options.isTime?.() ? splits.map(timeWords(self.scales.x!.min!, self.scales.x!.max!)) : splits.map(stepWords)),
          },
          {
            ...axis,
            size: 48,
            gap: 4,
            splits: (_self, _, low, high) => ticks(low, high, Math.max(2, height() / 48), log),
            filter: (_, splits) => splits,
            values: (_, splits) => splits.map(options.format ?? number),
          },
        ],
        series: [
          {},
          ...curves.map(
            (curve): uPlot.Series => ({
              stroke: () => colour(curve.colour ?? "d1") + (curve.faint ? FAINT : ""),
              width: isDense(curve, window(), element.clientWidth) ? 1 : (curve.width ?? 1.5),
              dash: curve.dash,
              fill: curve.fill ? () => colour(curve.colour ?? "d1") : undefined,
              points: curve.points ? { size: 5, fill: () => colour(curve.colour ?? "d1") } : { show: lonely },
              spanGaps: false,
            }),
          ),
        ],
        hooks: { drawClear: [painted(shade), painted(options.paintUnder)], draw: [painted(gaps), painted(options.paint), painted(names)] },
      },
      data(curves),
      element,
    );
    pointAtSteps(made.over, { stepAt: (x) => made.posToVal(x, "x"), onClick: options.onClick, pans: options.pans });
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
    const labels = shown().flatMap(({ line, name, colour: tone }, index) => {
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
    const curves = shown();
    const looks = curves.map((curve) => [curve.colour, curve.dash, curve.name, curve.points, curve.faint, isDense(curve, window(), width)]);
    const content = JSON.stringify([looks, curves.map(({ line }) => line?.version), window(), width, height(), include(), options.since?.(), wantsLog, document.documentElement.dataset.theme]);
    if (content !== drawn) {
      const log = wantsLog && curves.every(({ line }) => line?.values.every((value) => !(value <= 0) || value === -Infinity) ?? true) && include().every((value) => value > 0);
      const signature = JSON.stringify([log, looks]);
      element.style.height = `${height()}px`;
      if (!plot || signature !== built) plot = build(curves, log);
      else {
        if (plot.width !== width || plot.height !== height()) plot.setSize({ width, height: height() });
        plot.setData(data(curves));
      }
      [built, drawn] = [signature, content];
    }
    const [from, to] = window();
    const step = at();
    plot!.setCursor({ left: step >= from && step <= to ? plot!.valToPos(step, "x") : -10, top: 1 }, false);
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

/** Times below an axis; the first says in what unit they are. */
const timeWords = (low: number, high: number) => (time: number, index: number) => {
  const { size, unit } = timeUnit(low, high);
  return `${number(time / size)}${index ? "" : ` ${unit}`}`;
};

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

const medians = new WeakMap<Line, { of: string; line: Line }>();
let versions = 0;

/** The centred median of a line, as a line; computed once per version of its data and width. */
export function medianLine(line: Line | undefined, width: number): Line | undefined {
  if (!line) return undefined;
  const known = medians.get(line);
  const of = `${line.version}:${width}`;
  if (known?.of === of) return known.line;
  const every = Math.max(1, width >> 3); // it changes slowly: fewer points look the same
  const isKept = (_: number, index: number) => index % every === 0 || index === line.steps.length - 1;
  const smooth = { ...line, name: `${line.name}, median of ${width}`, steps: line.steps.filter(isKept), values: centredMedian(line.values, width).filter(isKept), version: --versions };
  medians.set(line, { of, line: smooth });
  return smooth;
}

/** The whole run. */
export function wholeRun(): Span {
  return [0, lastShown()];
}
