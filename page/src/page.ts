/** What all parts of the page share: the state, the step under the cursor, the steps in view, and one redraw per frame. */

import type { Overview } from "./api";
import type { RunData } from "./data";
import { faultWindow, moved, shifted, type Span } from "./scale";
import { formatLink, parseLink, type State } from "./state";

export interface Part {
  readonly element: HTMLElement;
  /** Called on every frame in which something changed and the part is on screen. */
  draw(): void;
  destroy?(): void;
  /** For "PNG" and "CSV". */
  canvas?(): HTMLCanvasElement | null;
  rows?(): (string | number)[][];
  /** Changes between a linear and a logarithmic scale. */
  changeScale?(): void;
}

export const state: State = parseLink(location.hash);

let run: RunData | null = null;
let hovered: number | null = null;
let fault: number | null = null;
let shown = 0;
let extent = 0;
let queued = false;
const parts = new Map<Element, { part: Part; visible: boolean }>();
let redrawn: (() => void) | null = null;

const sight = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const seen = parts.get(entry.target);
      if (seen) seen.visible = entry.isIntersecting;
    }
    redraw();
  },
  { rootMargin: "400px" },
);

export function currentRun(): RunData {
  return run!;
}

/** Chooses the run whose steps the page shows; `last` is the last step where there are several runs. */
export function show(next: RunData | null, last = 0): void {
  run = next;
  extent = last;
  shown = next?.last ?? last;
  hovered = null;
  acceptVerdict();
}

export function isLive(): boolean {
  return run !== null && run.connection !== "over" && run.overview.state.word === "running";
}

/** Whether the reader looks at something that new steps must not move. */
export function isPaused(): boolean {
  return isLive() && (hovered !== null || state.step !== null || Array.isArray(state.zoom));
}

export function lastShown(): number {
  if (run && !isPaused()) shown = run.last;
  return Math.max(1, run ? shown : extent);
}

/** The first step of what is wrong; null if nothing is, or if it is so new that the reader has not asked to see it. */
export function faultStep(): number | null {
  return fault;
}

export function isFaulty({ verdict }: Overview): boolean {
  return (verdict.severity === "warning" || verdict.severity === "critical") && verdict.since !== null;
}

/** Takes over the present verdict: what is in view may move to it. */
export function acceptVerdict(): void {
  fault = run && isFaulty(run.overview) ? run.overview.verdict.since : null;
}

export function span(): Span {
  const last = lastShown();
  if (Array.isArray(state.zoom)) return state.zoom as unknown as Span;
  const since = faultStep();
  return since === null || state.zoom === "all" ? [0, last] : faultWindow(since, last);
}

/** The step that is looked at: under the cursor, pinned, or the first that shows the fault. */
export function at(): number {
  return hovered ?? state.step ?? faultStep() ?? (run || extent ? Math.min(lastShown(), span()[1]) : NaN);
}

export function hover(step: number | null): void {
  if (step === hovered) return;
  hovered = step === null ? null : Math.max(0, Math.min(lastShown(), step));
  redraw();
}

/** Changes the state and the address; drawn with the next frame. */
export function go(change: Partial<State>): void {
  Object.assign(state, change);
  try {
    history.replaceState(null, "", formatLink(state));
  } catch {
    // In the frame of a notebook there is no address to write to.
  }
  redraw();
}

/** Pins a step and moves the window so that it is in view. */
export function pin(step: number): void {
  const window = span();
  const next = shifted(window, step, lastShown());
  go(next === window ? { step } : { step, zoom: next });
}

/** Moves the window by a number of steps. */
export function pan(by: number): void {
  if (!isWhole()) go({ zoom: moved(span(), by, lastShown()) });
}

export function zoom(window: Span): void {
  const [from, to] = [Math.max(0, Math.round(Math.min(...window))), Math.min(lastShown(), Math.round(Math.max(...window)))];
  if (to - from >= 2) go({ zoom: [from, to] });
}

export function isWhole(): boolean {
  const [from, to] = span();
  return from <= 0 && to >= lastShown();
}

export function add<P extends Part>(part: P): P {
  parts.set(part.element, { part, visible: false });
  sight.observe(part.element);
  return part;
}

export function remove(part: Part): void {
  sight.unobserve(part.element);
  parts.delete(part.element);
  part.destroy?.();
  part.element.remove();
}

export function removeAll(): void {
  for (const { part } of [...parts.values()]) remove(part);
}

export function onRedraw(call: () => void): void {
  redrawn = call;
}

export function redraw(): void {
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => {
    queued = false;
    run?.look(span());
    redrawn?.();
    for (const { part, visible } of [...parts.values()]) if (visible) part.draw();
  });
}

/** Draws everything, on screen or not: for a printer. */
export function drawAll(): void {
  for (const { part } of [...parts.values()]) part.draw();
}
