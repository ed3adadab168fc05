/** A canvas over steps, for what uPlot does not draw. It shares the cursor and the steps in view with the line charts. */

import { colour, h } from "../dom";
import { stepWords } from "../format";
import { at, currentRun, type Part, span } from "../page";
import { pointAtSteps } from "../pointer";
import { type Colour, ramp, stepTicks } from "../scale";

export interface Frame {
  context: CanvasRenderingContext2D;
  width: number;
  height: number;
  left: number;
  right: number;
  x: (step: number) => number;
}

export interface CanvasOptions {
  label: string;
  height: () => number;
  left: () => number;
  right: number;
  draw: (frame: Frame) => void;
  /** No steps: only drawn. */
  still?: boolean;
  onClick?: (step: number, y: number) => void;
  onMove?: (place: { x: number; y: number } | null) => void;
  rows?: Part["rows"];
}

export function stepCanvas(options: CanvasOptions): Part & { stepAt: (x: number) => number } {
  const canvas = h("canvas");
  const element = h("div", { class: "chart", role: "img", "aria-label": options.label }, canvas);
  const stepAt = (x: number) => {
    const [from, to] = span();
    const left = options.left();
    return from + ((x - left) / (element.clientWidth - left - options.right)) * (to - from);
  };
  const place = (event: PointerEvent) => ({ x: event.clientX - element.getBoundingClientRect().left, y: event.clientY - element.getBoundingClientRect().top });
  if (!options.still) {
    pointAtSteps(element, {
      stepAt,
      onClick: options.onClick && ((step, event) => options.onClick!(step, place(event).y)),
      onMove: (event) => options.onMove?.(event && place(event)),
    });
  }

  function draw(): void {
    const width = element.clientWidth;
    const height = options.height();
    if (!width) return;
    const ratio = Math.max(1, window.devicePixelRatio || 1);
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      element.style.height = canvas.style.height = `${height}px`;
      canvas.style.width = `${width}px`;
    }
    const context = canvas.getContext("2d")!;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = FONT;
    const [left, right] = [options.left(), width - options.right];
    const [from, to] = span();
    options.draw({ context, width, height, left, right, x: (step) => left + ((step - from) / (to - from)) * (right - left) });
  }

  return { element, draw, stepAt, canvas: () => canvas, rows: options.rows };
}

export const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", Arial, sans-serif';

/** The steps below a chart, and the line of the cursor over it. */
export function stepAxis({ context, left, right, x, height }: Frame, bottom: number): void {
  const [from, to] = span();
  context.fillStyle = colour("ink-3");
  context.textAlign = "center";
  context.textBaseline = "top";
  stepTicks(from, to, right - left).forEach((step, index) => context.fillText(stepWords(step, index), x(step), height - bottom + 6));
}

export function cursorLine({ context, left, right, x }: Frame, top: number, bottom: number): void {
  const place = x(at());
  if (place < left || place > right) return;
  context.fillStyle = colour("cursor");
  context.globalAlpha = 0.55;
  context.fillRect(place - 0.5, top, 1, bottom - top);
  context.globalAlpha = 1;
}

/** The colours of heat, from little to much. */
export function stops(): Colour[] {
  return [0, 1, 2, 3, 4, 5, 6, 7].map((index) => rgb(colour(`h${index}`)));
}

export function rgb(hex: string): Colour {
  return [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16)) as unknown as Colour;
}

/** Columns of the picture that are in view, with where each begins and ends. */
export function columnsInView(starts: number[], end: number, frame: Frame): { column: number; from: number; to: number }[] {
  const last = Math.min(end, currentRun().last + 1);
  return starts.flatMap((start, column) => {
    const from = Math.max(frame.left, frame.x(start));
    const to = Math.min(frame.right, frame.x(starts[column + 1] ?? Math.max(last, start + 1)));
    return to > from ? [{ column, from, to }] : [];
  });
}

/** Draws a picture of one pixel per cell with each column at its steps. */
export function paintColumns(frame: Frame, picture: HTMLCanvasElement, starts: number[], end: number, top: number, height: number): void {
  frame.context.imageSmoothingEnabled = false;
  for (const { column, from, to } of columnsInView(starts, end, frame)) {
    frame.context.drawImage(picture, column, 0, 1, picture.height, from, top, to - from + 0.4, height);
  }
}

/** A colour as a pixel of a picture; 0 is no pixel. */
export function pixel([red, green, blue]: Colour): number {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/** The colours of heat as pixels, by their place between 0 and 1. */
export function heatPixels(): (place: number) => number {
  const tones = stops();
  const pixels = Uint32Array.from({ length: 256 }, (_, index) => pixel(ramp(index / 255, tones)));
  return (place) => pixels[Math.round(Math.min(1, Math.max(0, place)) * 255)]!;
}

/** A picture with one pixel per cell. */
export function picture(columns: number, rows: number, cell: (row: number, column: number) => number): HTMLCanvasElement {
  const canvas = h("canvas", { width: Math.max(1, columns), height: Math.max(1, rows) });
  const context = canvas.getContext("2d")!;
  const image = context.createImageData(canvas.width, canvas.height);
  const pixels = new Uint32Array(image.data.buffer);
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) pixels[row * columns + column] = cell(row, column);
  }
  context.putImageData(image, 0, 0);
  return canvas;
}
