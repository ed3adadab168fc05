/** Depth over steps: a row per layer in model order, the colour is the value. */

import type { Alert } from "../api";
import type { DepthMap } from "../data";
import { columnAt, type Row } from "../depth";
import { colour, mark } from "../dom";
import { number } from "../format";
import { at, go, type Part, redraw } from "../page";
import { heat } from "../scale";
import { cursorLine, heatPixels, paintColumns, picture, pixel, rgb, stepAxis, stepCanvas } from "./canvas";
import { severityColour } from "./evidence";
import { shortened } from "./line";

const TOP = 2;
const BOTTOM = 22;
const MOST_PIXELS = 660;

/** Height of a row: readable while there are few, then as many as fit. */
export function rowHeight(rows: number): number {
  return Math.min(15.5, MOST_PIXELS / Math.max(1, rows));
}

export interface HeatmapOptions {
  map: () => DepthMap | undefined;
  rows: () => Row[];
  alerts: () => Alert[];
  chosen: () => string | null;
  open: (scope: string) => void;
}

export function heatmap({ map, rows, alerts, chosen, open }: HeatmapOptions): Part & { readout: () => string } {
  let hovered: number | null = null;
  let drawn = "";
  let image: HTMLCanvasElement | null = null;
  const rowAt = (y: number) => Math.floor((y - TOP) / rowHeight(rows().length));

  const chart = stepCanvas({
    label: "Values over depth and steps",
    height: () => TOP + BOTTOM + Math.max(1, rows().length) * rowHeight(rows().length),
    left: () => (chart.element.clientWidth < 560 ? 112 : 186),
    right: 6,
    onMove: (place) => {
      hovered = place && rows()[rowAt(place.y)] ? rowAt(place.y) : null;
      redraw();
    },
    onClick: (step, y) => {
      const row = rows()[rowAt(y)];
      go({ step: Math.max(0, step) });
      if (row) open(row.scope);
    },
    draw: (frame) => {
      const data = map();
      const shown = rows();
      if (!data) return;
      const content = [data.metric, data.version, shown.map((row) => row.index).join(), document.documentElement.dataset.theme].join("|");
      if (content !== drawn) {
        const [tone, alarm, columns] = [heatPixels(), pixel(rgb(colour("crit"))), data.starts.length];
        image = picture(columns, shown.length, (row, column) => {
          const value = data.cells[shown[row]!.index * columns + column]!;
          if (Number.isNaN(value)) return 0;
          return Number.isFinite(value) ? tone(heat(value, data.low, data.high)) : alarm;
        });
        drawn = content;
      }
      const size = rowHeight(shown.length);
      const height = shown.length * size;
      paintColumns(frame, image!, data.starts, (data.ends.at(-1) ?? 0) + 1, TOP, height);
      const { context, left, right } = frame;
      if (size >= 8) {
        context.fillStyle = colour("surface");
        for (let row = 1; row < shown.length; row++) context.fillRect(left, TOP + row * size - 0.5, right - left, 1);
      }
      labels(context, shown, size, left);
      outline(chosen() === null ? -1 : shown.findIndex((row) => row.scope === chosen()), 2);
      if (hovered !== null) outline(hovered, 1);
      cursorLine(frame, TOP, TOP + height);
      marks();
      stepAxis(frame, BOTTOM);

      function outline(row: number, width: number): void {
        if (row < 0) return;
        context.strokeStyle = colour("accent");
        context.lineWidth = width;
        context.strokeRect(left, TOP + row * size, right - left, Math.max(2, size));
      }

      function marks(): void {
        if (size < 8) return;
        for (const alert of alerts()) {
          const place = frame.x(alert.fired);
          if (place < left || place > right) continue;
          shown.forEach((row, index) => {
            if (alert.scopes.includes(row.scope)) mark(context, alert.severity, place, TOP + (index + 0.5) * size, 9, colour(severityColour[alert.severity]), colour("surface"));
          });
        }
      }
    },
    rows: () => {
      const data = map();
      const columns = data?.starts.length ?? 0;
      return [["layer", "step", "value"], ...rows().flatMap((row) => (data?.starts ?? []).map((start, column) => [row.scope, start, data!.cells[row.index * columns + column]!]))];
    },
  });

  /** The value under the pointer, or of the chosen layer. */
  function readout(): string {
    const data = map();
    const row = rows()[hovered ?? rows().findIndex((candidate) => candidate.scope === chosen())];
    if (!data || !row) return "";
    const column = columnAt(data, at());
    const value = data.cells[row.index * data.starts.length + column];
    return `${row.scope} · step ${data.starts[column] ?? at()} · ${Number.isNaN(value) ? "no reading" : number(value)}`;
  }

  chart.element.tabIndex = 0;
  chart.element.setAttribute("role", "application");
  chart.element.addEventListener("keydown", (event) => {
    const move = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (move !== undefined && chosen() === null) {
      hovered = Math.max(0, Math.min(rows().length - 1, (hovered ?? (move > 0 ? -1 : rows().length)) + move));
      redraw();
    } else if (event.key === "Enter" && hovered !== null) open(rows()[hovered]!.scope);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  chart.element.addEventListener("blur", () => (hovered = null));
  return { ...chart, readout };
}

/** Names of the rows, and a bracket around the rows of a block. */
function labels(context: CanvasRenderingContext2D, rows: Row[], size: number, left: number): void {
  const bracket = 62;
  context.textBaseline = "middle";
  context.textAlign = "right";
  const hasBlocks = rows.some((row) => row.block !== null && row.block !== row.scope) && left > 150;
  if (size >= 9) {
    context.fillStyle = colour("ink-2");
    rows.forEach((row, index) => {
      const isInside = row.block !== null && hasBlocks;
      const name = !hasBlocks && row.block && row.block !== row.scope ? `${row.block.split(".").at(-1)}.${row.label}` : row.label;
      context.fillText(shortened(context, name, left - (isInside ? bracket + 14 : 8)), left - 6, TOP + (index + 0.5) * size);
    });
  }
  if (!hasBlocks) return;
  for (let start = 0; start < rows.length; ) {
    let end = start + 1;
    while (end < rows.length && rows[end]!.block === rows[start]!.block) end++;
    const block = rows[start]!.block;
    const [from, to] = [TOP + start * size + 1.5, TOP + end * size - 1.5];
    const place = size >= 9 ? bracket : left - 8;
    if (block !== null && to - from >= 9) {
      context.strokeStyle = colour("line-strong");
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(place + 4, from);
      context.lineTo(place, from);
      context.lineTo(place, to);
      context.lineTo(place + 4, to);
      context.stroke();
      context.fillStyle = colour("ink-3");
      context.fillText(shortened(context, block, place - 6), place - 4, (from + to) / 2);
    }
    start = end;
  }
}
