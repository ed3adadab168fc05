/** What charts compute: ranges, ticks, medians, colours, reduction. */

export type Span = readonly [number, number];

export interface Points {
  steps: number[];
  values: number[];
}

/** Index of the newest step at or before `step`; -1 if there is none. `steps` ascend. */
export function indexAt(steps: ArrayLike<number>, step: number): number {
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle]! <= step) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** The newest value at or before a step. Of a layer, NaN only means that there was nothing to read. */
export function valueAt(points: (Points & { scope?: string }) | undefined, step: number): number | undefined {
  if (!points) return undefined;
  let index = indexAt(points.steps, step);
  while (points.scope && Number.isNaN(points.values[index])) index--;
  return points.values[index];
}

/** Lines on top of each other, the first lowest, at the steps of all of them; between its readings a line stays level. */
export function stacked(lines: Points[]): Points[] {
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const heights = steps.map(() => 0);
  return lines.map((line) => ({ steps, values: steps.map((step, index) => (heights[index]! += valueAt(line, step) || 0)) }));
}

/** Median of `width` values around each value, so that it lags nowhere and no spike moves it. */
export function centredMedian(values: number[], width: number): number[] {
  const half = width >> 1;
  const sorted: number[] = [];
  const place = (value: number) => indexAt(sorted, value) + 1;
  let end = 0;
  return values.map((_, index) => {
    for (; end < Math.min(values.length, index + half); end++) if (Number.isFinite(values[end])) sorted.splice(place(values[end]!), 0, values[end]!);
    const gone = values[index - half - 1];
    if (gone !== undefined && Number.isFinite(gone)) sorted.splice(place(gone) - 1, 1);
    const middle = sorted.length >> 1;
    if (!sorted.length) return NaN;
    return sorted.length % 2 ? sorted[middle]! : (sorted[middle - 1]! + sorted[middle]!) / 2;
  });
}

/** Value below which a share of the sorted values lies, linear between two of them. */
export function quantile(sorted: ArrayLike<number>, share: number): number {
  const place = (sorted.length - 1) * share;
  const low = Math.floor(place);
  return sorted.length ? sorted[low]! + (sorted[Math.ceil(place)]! - sorted[low]!) * (place - low) : NaN;
}

/** The points in a window, and the nearest one on either side of it. */
export function within(points: Points, [from, to]: Span): Points {
  const { steps, values } = points;
  const start = Math.max(0, indexAt(steps, from - 1e-9));
  const end = indexAt(steps, to) + 2;
  return start === 0 && end >= steps.length ? points : { steps: steps.slice(start, end), values: values.slice(start, end) };
}

/** At most two points per column, its lowest and its highest; values that are not finite are all kept. */
export function reduce(points: Points, columns: number): Points {
  const { steps, values } = points;
  if (steps.length <= 2 * columns) return points;
  const first = steps[0]!;
  const width = (steps.at(-1)! - first + 1) / columns;
  const kept: number[] = [];
  let start = 0;
  while (start < steps.length) {
    const column = Math.floor((steps[start]! - first) / width);
    let low = -1;
    let high = -1;
    let end = start;
    const odd: number[] = [];
    for (; end < steps.length && Math.floor((steps[end]! - first) / width) === column; end++) {
      if (!Number.isFinite(values[end])) odd.push(end);
      else {
        if (low < 0 || values[end]! < values[low]!) low = end;
        if (high < 0 || values[end]! > values[high]!) high = end;
      }
    }
    kept.push(...[...new Set([low, high, ...odd])].filter((index) => index >= 0).sort((a, b) => a - b));
    start = end;
  }
  if (kept.at(-1) !== steps.length - 1) kept.push(steps.length - 1);
  return { steps: kept.map((index) => steps[index]!), values: kept.map((index) => values[index]!) };
}

/** The range of an axis: the values with some air; on a log axis the air is a factor. */
export function padded(low: number, high: number, log: boolean): [number, number] {
  if (log) {
    const air = Math.max(1.1, (high / low) ** 0.08);
    return [low / air, high * air];
  }
  const air = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low < air ? 0 : low - air, high + air];
}

/** Round numbers between two ends, at most about `most` of them. */
export function ticks(low: number, high: number, most: number, log = false): number[] {
  if (!(high > low) || !Number.isFinite(high - low)) return [];
  if (log && high / low > 8) {
    const from = Math.floor(Math.log10(low));
    const to = Math.ceil(Math.log10(high));
    const every = Math.max(1, Math.ceil((Math.log10(high) - Math.log10(low)) / most));
    const factors = high / low < 300 ? [1, 3] : [1];
    const found: number[] = [];
    for (let power = from; power <= to; power++) {
      if ((power - from) % every === 0) found.push(...factors.map((factor) => Number(`${factor}e${power}`)));
    }
    return found.filter((tick) => tick >= low && tick <= high);
  }
  const rough = (high - low) / Math.max(1, most);
  const base = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * base).find((size) => size >= rough * 0.999)!;
  const found: number[] = [];
  for (let index = Math.ceil(low / step); index * step <= high; index++) found.push(Number((index * step).toPrecision(12)));
  return found;
}

/** Steps below an axis of a width in pixels; none so near its end that its label would be cut. */
export function stepTicks(low: number, high: number, width: number): number[] {
  return ticks(low, high, Math.max(2.5, width / 80)).filter((step) => Number.isInteger(step) && step <= high - 0.03 * (high - low));
}

const TIME_UNITS = [{ size: 86_400_000, unit: "days" }, { size: 3_600_000, unit: "h" }, { size: 60_000, unit: "min" }, { size: 1000, unit: "s" }];

/** The largest unit, in milliseconds, that fits a range at least twice. */
export function timeUnit(low: number, high: number): { size: number; unit: string } {
  return TIME_UNITS.find(({ size }) => high - low >= 2 * size) ?? TIME_UNITS.at(-1)!;
}

/** Milliseconds below an axis, at round numbers of their unit. */
export function timeTicks(low: number, high: number, width: number): number[] {
  const { size } = timeUnit(low, high);
  const places = ticks(low / size, high / size, Math.max(2.5, width / 80)).map((tick) => tick * size);
  return places.filter((tick) => tick <= high - 0.03 * (high - low));
}

/** The time of each step, straight between the known ones. */
export function timed(points: Points, clock: { steps: number[]; times: number[] }): Points {
  const { steps, times } = clock;
  const time = (step: number) => {
    const index = Math.max(0, Math.min(steps.length - 2, indexAt(steps, step)));
    const [from, to] = [steps[index]!, steps[index + 1] ?? steps[index]! + 1];
    const share = Math.max(0, Math.min(1, (step - from) / (to - from)));
    return times[index]! + share * ((times[index + 1] ?? times[index]!) - times[index]!);
  };
  return { steps: points.steps.map(time), values: points.values };
}

/** Place of a value on the colour scale, 0 to 1, logarithmic where the ends allow it. */
export function heat(value: number, low: number, high: number): number {
  const log = low > 0;
  const place = log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
  if (Number.isNaN(place)) return value > low ? 1 : 0;
  return Math.min(1, Math.max(0, place));
}

export type Colour = readonly [number, number, number];

/** The colour at a place between 0 and 1 of evenly spaced stops. */
export function ramp(place: number, stops: readonly Colour[]): Colour {
  const exact = Math.min(1, Math.max(0, place)) * (stops.length - 1);
  const index = Math.min(stops.length - 2, Math.floor(exact));
  const [from, to] = [stops[index]!, stops[index + 1]!];
  return [0, 1, 2].map((part) => Math.round(from[part]! + (to[part]! - from[part]!) * (exact - index))) as unknown as Colour;
}

/** The steps to look at first: the fault with 1.5 times its length before it, at least 40 steps. */
export function faultWindow(since: number, last: number): Span {
  const before = Math.max(40, 1.5 * (last - since));
  return [Math.max(0, Math.round(since - before)), Math.max(last, since + 1)];
}

/** The span moved, not resized, but for the ends of the run. */
export function moved([from, to]: Span, by: number, last: number): Span {
  const start = Math.max(0, Math.min(last - (to - from), Math.round(from + by)));
  return [start, start + to - from];
}

/** The span moved so that a step is inside. */
export function shifted(span: Span, step: number, last: number): Span {
  const [from, to] = span;
  return step >= from && step <= to ? span : moved(span, step - (to - from) * 0.4 - from, last);
}
