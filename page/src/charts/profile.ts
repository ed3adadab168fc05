/** The rows of the depth map at one step, each beside what was usual for it before. */

import type { Alert } from "../api";
import type { DepthMap, Profile } from "../data";
import { columnAt, profileFromMap, type Row } from "../depth";
import { colour, mark } from "../dom";
import { inColumn, number } from "../format";
import { at, currentRun, type Part, redraw, state } from "../page";
import { ticks } from "../scale";
import { stepCanvas } from "./canvas";
import { isPastLimit, severityColour } from "./evidence";
import { rowHeight } from "./heatmap";

const TOP = 2;
const BOTTOM = 22;

interface Options {
  map: () => DepthMap | undefined;
  rows: () => Row[];
  /** The alert whose limit holds for single rows. */
  alert: () => Alert | undefined;
}

export function profileChart({ map, rows, alert }: Options): Part & { step: () => number | undefined } {
  let exact: { key: string; profile: Profile | null } = { key: "", profile: null };
  let quick: { key: string; profile: Profile } | null = null;

  /** From the map at once; exactly, from the server, for a step that is pinned and that the map has merged with others. */
  function profile(): Profile | undefined {
    const data = map();
    if (!data) return undefined;
    const key = `${data.metric}@${at()}`;
    if (key === exact.key && exact.profile) return exact.profile;
    if (state.step === at() && key !== exact.key && data.starts.some((start, column) => data.ends[column] !== start)) {
      exact = { key, profile: null };
      currentRun()
        .profile(data.metric, at())
        .then((found) => {
          if (exact.key === key) exact.profile = found;
          redraw();
        })
        .catch(() => undefined);
    }
    const column = `${data.metric}@${data.version}@${columnAt(data, at())}`;
    if (quick?.key !== column) quick = { key: column, profile: profileFromMap(data, at()) };
    return quick.profile;
  }

  const chart = stepCanvas({
    label: "Values over depth at one step",
    still: true,
    height: () => TOP + BOTTOM + Math.max(1, rows().length) * rowHeight(rows().length),
    left: () => 6,
    right: 62,
    draw: ({ context, left, right, height }) => {
      const found = profile();
      if (!found) return;
      const places = new Map(found.scopes.map((scope, index) => [scope, index]));
      const shown = rows().map((row) => {
        const index = places.get(row.scope) ?? -1;
        return { value: found.values[index] ?? NaN, low: found.low[index] ?? NaN, high: found.high[index] ?? NaN };
      });
      const limit = alert()?.limit ?? NaN;
      const numbers = [...shown.flatMap(({ value, low, high }) => [value, low, high]), limit].filter(Number.isFinite);
      const positive = numbers.filter((value) => value > 0);
      const log = positive.length === numbers.length;
      const [least, most] = [Math.min(...numbers), Math.max(...numbers)];
      const size = rowHeight(shown.length);
      const scaled = (value: number) => (log ? Math.log(value / least) / Math.log(most / least || 1) : (value - least) / (most - least || 1));
      const x = (value: number) => left + 4 + (Number.isFinite(scaled(value)) ? scaled(value) : 0.5) * (right - left - 12);
      const bottom = height - BOTTOM;
      context.textAlign = "center";
      context.textBaseline = "top";
      for (const tick of numbers.length ? ticks(least, most, 4, log) : []) {
        context.fillStyle = colour("grid");
        context.fillRect(x(tick), TOP, 1, bottom - TOP);
        context.fillStyle = colour("ink-3");
        context.fillText(number(tick), x(tick), bottom + 6);
      }
      context.fillStyle = colour("usual");
      shown.forEach(({ low, high }, row) => {
        if (!Number.isFinite(low)) return;
        context.beginPath();
        context.roundRect(x(low), TOP + row * size + size * 0.2, Math.max(2, x(high) - x(low)), size * 0.6, 2);
        context.fill();
      });
      context.strokeStyle = colour("d1-soft");
      context.lineWidth = 1;
      context.beginPath();
      shown.forEach(({ value }, row) => Number.isFinite(value) && context.lineTo(x(value), TOP + (row + 0.5) * size));
      context.stroke();
      if (Number.isFinite(limit)) {
        context.strokeStyle = colour("limit");
        context.setLineDash([4, 3]);
        context.beginPath();
        context.moveTo(x(limit), TOP);
        context.lineTo(x(limit), bottom);
        context.stroke();
        context.setLineDash([]);
      }
      context.textAlign = "right";
      context.textBaseline = "middle";
      shown.forEach(({ value }, row) => {
        const y = TOP + (row + 0.5) * size;
        const past = isPastLimit(alert(), value);
        if (Number.isNaN(value)) return;
        if (past) mark(context, alert()!.severity, x(value), y, Math.min(9, size + 2), colour(severityColour[alert()!.severity]), colour("surface"));
        else if (Number.isFinite(value)) {
          context.fillStyle = colour("d1");
          context.beginPath();
          context.arc(x(value), y, Math.min(3, size / 2 + 0.5), 0, 7);
          context.fill();
        }
        if (size < 9) return;
        context.fillStyle = colour(past || !Number.isFinite(value) ? "warn" : "ink-3");
        context.fillText(inColumn(value), right + 58, y);
      });
    },
    rows: () => {
      const found = profile();
      return [["layer", "step", "value", "usual_low", "usual_high"], ...(found?.scopes ?? []).map((scope, index) => [scope, found!.step, found!.values[index]!, found!.low[index]!, found!.high[index]!])];
    },
  });
  return { ...chart, step: () => profile()?.step };
}
