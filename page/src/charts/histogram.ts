/** How the values of a tensor are spread, over steps: a column per measured step, a row per power of two. */

import type { Histograms } from "../data";
import { colour } from "../dom";
import { number } from "../format";
import type { Part } from "../page";
import { ticks } from "../scale";
import { cursorLine, heatPixels, paintColumns, picture, stepAxis, stepCanvas } from "./canvas";

const BOTTOM = 22;
const TOP = 4;
const ZERO_PIXELS = 10;

export function histogramChart(label: string, data: () => Histograms | undefined, height: number): Part {
  let drawn = "";
  let image: HTMLCanvasElement | null = null;
  let zeros: HTMLCanvasElement | null = null;
  return stepCanvas({
    label,
    height: () => height,
    left: () => 50,
    right: 8,
    draw: (frame) => {
      const found = data();
      if (!found) return;
      if (!found.steps.length) {
        frame.context.fillStyle = colour("ink-3");
        frame.context.fillText("There is no reading of this tensor.", 0, TOP + 12);
        return;
      }
      const bins = found.exponents.length;
      const used = found.exponents.map((_, bin) => bin).filter((bin) => found.steps.some((_, column) => found.shares[column * bins + bin]! > 0));
      const [lowest, highest] = [used[0] ?? 0, used.at(-1) ?? 0];
      const rows = highest - lowest + 1;
      const hasZeros = found.zeros?.some((share) => share > 0) ?? false;
      const content = `${found.version}|${document.documentElement.dataset.theme}`;
      if (content !== drawn) {
        const pixels = heatPixels();
        const tone = (share: number) => (share > 0 ? pixels(0.12 + 0.88 * Math.sqrt(share / 0.3)) : 0);
        image = picture(found.steps.length, rows, (row, column) => tone(found.shares[column * bins + highest - row]!));
        zeros = hasZeros ? picture(found.steps.length, 1, (_, column) => tone(found.zeros[column]!)) : null;
        drawn = content;
      }
      const bottom = height - BOTTOM - (hasZeros ? ZERO_PIXELS + 4 : 0);
      const end = found.steps.at(-1)! + (found.steps.at(-1)! - (found.steps.at(-2) ?? 0));
      paintColumns(frame, image!, found.steps, end, TOP, bottom - TOP);
      const { context, left } = frame;
      context.fillStyle = colour("ink-3");
      context.textAlign = "right";
      context.textBaseline = "middle";
      const [least, most] = [found.exponents[lowest]!, found.exponents[highest]! + 1];
      for (const tick of ticks(2 ** least, 2 ** most, 5, true)) {
        context.fillText(number(tick), left - 6, TOP + ((most - Math.log2(tick)) / (most - least)) * (bottom - TOP));
      }
      if (zeros) {
        paintColumns(frame, zeros, found.steps, end, bottom + 4, ZERO_PIXELS);
        context.fillText("zero", left - 6, bottom + 4 + ZERO_PIXELS / 2);
      }
      cursorLine(frame, TOP, height - BOTTOM);
      stepAxis(frame, BOTTOM);
    },
    rows: () => {
      const found = data();
      const bins = found?.exponents.length ?? 0;
      return [["step", "size", "share"], ...(found?.steps ?? []).flatMap((step, column) => found!.exponents.map((exponent, bin) => [step, 2 ** exponent, found!.shares[column * bins + bin]!]))];
    },
  });
}
