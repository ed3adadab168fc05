/** Attention heads: a row per layer, a cell per head, with the value at the step and its course. */

import type { DepthMap } from "../data";
import { columnAt } from "../depth";
import { colour, h, say } from "../dom";
import { inColumn, number } from "../format";
import { at, type Part, redraw, span } from "../page";
import { ramp, type Span } from "../scale";
import { stepCanvas, stops } from "./canvas";
import { shortened } from "./line";

const TOP = 16;
const LEFT = 92;

/** The heads by layer, from names such as `blocks.0.attention.head_3`. */
export function layersOfHeads(scopes: string[]): { layer: string; heads: number[] }[] {
  const layers = new Map<string, number[]>();
  scopes.forEach((scope, index) => {
    const layer = scope.replace(/\.head_\d+$/, "");
    layers.set(layer, [...(layers.get(layer) ?? []), index]);
  });
  // What all names end with says nothing: blocks.0.attention, blocks.1.attention → blocks.0, blocks.1.
  const names = [...layers.keys()].map((name) => name.split("."));
  let same = 0;
  while (names.length > 1 && names.every((name) => name.length > same + 1 && name.at(-1 - same) === names[0]!.at(-1 - same))) same++;
  return [...layers.values()].map((heads, index) => ({ layer: names[index]!.slice(0, names[index]!.length - same).join("."), heads }));
}

export function headsChart(map: () => DepthMap | undefined, range: Span): Part {
  let place: { x: number; y: number } | null = null;
  const readout = h("p", { class: "readout" });
  const grid = () => layersOfHeads(map()?.scopes ?? []);
  const cellHeight = () => Math.max(8, Math.min(46, 440 / Math.max(1, grid().length)));

  const chart = stepCanvas({
    label: "Attention heads at one step",
    still: true,
    height: () => TOP + Math.max(1, grid().length) * cellHeight(),
    left: () => LEFT,
    right: 0,
    draw: ({ context, left, right }) => {
      const data = map();
      if (!data) return;
      const layers = grid();
      const columns = data.starts.length;
      const most = Math.max(...layers.map((layer) => layer.heads.length));
      const [width, height] = [(right - left) / most, cellHeight()];
      const tones = stops();
      const column = Math.max(0, columnAt(data, at()));
      const [from, to] = span();
      context.textBaseline = "middle";
      layers.forEach(({ layer, heads }, row) => {
        const top = TOP + row * height;
        context.fillStyle = colour("ink-3");
        context.textAlign = "left";
        if (height >= 11) context.fillText(shortened(context, layer, left - 8), 0, top + height / 2);
        heads.forEach((index, head) => {
          const values = data.cells.subarray(index * columns, (index + 1) * columns);
          const value = values[column]!;
          const [x, gap] = [left + head * width, width > 12 ? 3 : 0.5];
          const strength = Number.isFinite(value) ? 1 - (value - range[0]) / (range[1] - range[0]) : 0;
          const tone = ramp(0.08 + 0.62 * strength, tones);
          context.fillStyle = Number.isNaN(value) ? colour("surface-2") : `rgb(${tone.join()})`;
          context.beginPath();
          context.roundRect(x, top + gap / 2, width - gap, height - gap, Math.min(5, width / 4));
          context.fill();
          if (width < 44 || height < 22) return;
          context.fillStyle = contrast(tone);
          context.font = `600 ${context.font.replace(/^.*?11px/, "11px")}`;
          context.fillText(inColumn(value), x + 6, top + (height > 34 ? 12 : height / 2));
          context.font = context.font.replace(/^(600|bold) /, "");
          if (height <= 34) return;
          context.strokeStyle = context.fillStyle;
          context.globalAlpha = 0.6;
          context.lineWidth = 1.1;
          context.beginPath();
          data.starts.forEach((step, place_) => {
            if (step < from || step > to || !Number.isFinite(values[place_])) return;
            const share = (values[place_]! - range[0]) / (range[1] - range[0]);
            context.lineTo(x + 4 + ((step - from) / (to - from)) * (width - gap - 8), top + height - 6 - share * (height - 26));
          });
          context.stroke();
          context.globalAlpha = 1;
        });
      });
      context.fillStyle = colour("ink-3");
      context.textAlign = "left";
      for (let head = 0; head < most; head++) if (width >= 44 || head % Math.ceil(44 / width) === 0) context.fillText(width >= 44 ? `head ${head}` : `${head}`, left + head * width + 4, 6);
      const [layer, head] = place ? [Math.floor((place.y - TOP) / height), Math.floor((place.x - left) / width)] : [-1, -1];
      const index = layers[layer]?.heads[head];
      say(readout, index === undefined ? "" : `${data.scopes[index]!} · step ${data.starts[column]} · ${number(data.cells[index * columns + column])}`);
    },
    rows: () => {
      const data = map();
      const columns = data?.starts.length ?? 0;
      return [["head", "step", "value"], ...(data?.scopes ?? []).flatMap((scope, row) => data!.starts.map((start, column) => [scope, start, data!.cells[row * columns + column]!]))];
    },
  });
  chart.element.addEventListener("pointermove", (event) => {
    const box = chart.element.getBoundingClientRect();
    place = { x: event.clientX - box.left, y: event.clientY - box.top };
    redraw();
  });
  chart.element.addEventListener("pointerleave", () => {
    place = null;
    redraw();
  });
  return { ...chart, element: h("div", {}, chart.element, readout) };
}

/** Black or white, whichever is easier to read on a colour. */
function contrast([red, green, blue]: readonly [number, number, number]): string {
  return red * 0.299 + green * 0.587 + blue * 0.114 > 140 ? "#14181f" : "#f1f8ff";
}
