/** Moving, clicking and dragging over steps, the same on every chart. */

import { h } from "./dom";
import { go, hover, state, zoom } from "./page";

const DRAG_PIXELS = 6;

interface Pointing {
  /** The step at a distance from the element's left edge. */
  stepAt: (x: number) => number;
  /** In place of pinning the step. */
  onClick?: (step: number, event: PointerEvent) => void;
  onMove?: (event: PointerEvent | null) => void;
}

export function pointAtSteps(element: HTMLElement, { stepAt, onClick, onMove }: Pointing): void {
  const brush = element.appendChild(h("div", { class: "brush", hidden: true }));
  let from: number | null = null;
  const x = (event: PointerEvent) => event.clientX - element.getBoundingClientRect().left;
  const drop = () => {
    from = null;
    brush.hidden = true;
  };
  element.addEventListener("pointermove", (event) => {
    hover(Math.round(stepAt(x(event))));
    onMove?.(event);
    if (from === null || Math.abs(x(event) - from) < DRAG_PIXELS) return;
    brush.hidden = false;
    brush.style.left = `${Math.min(from, x(event))}px`;
    brush.style.width = `${Math.abs(x(event) - from)}px`;
  });
  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    from = x(event);
    if (event.pointerType === "mouse") element.setPointerCapture(event.pointerId);
  });
  element.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const to = x(event);
    if (Math.abs(to - from) >= DRAG_PIXELS) zoom([stepAt(from), stepAt(to)]);
    else if (onClick) onClick(Math.round(stepAt(to)), event);
    else go({ step: Math.max(0, Math.round(stepAt(to))) });
    drop();
  });
  element.addEventListener("pointercancel", drop);
  element.addEventListener("pointerleave", () => {
    hover(null);
    onMove?.(null);
  });
  element.addEventListener("dblclick", () => go({ zoom: "all", step: state.view === "run" ? null : state.step }));
}
