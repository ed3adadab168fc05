/** Moving, clicking and dragging over steps, the same on every chart. */

import { h } from "./dom";
import { go, hover, isWhole, pan, state, zoom } from "./page";

const DRAG_PIXELS = 6;

interface Pointing {
  /** The step at a distance from the element's left edge. */
  stepAt: (x: number) => number;
  /** In place of pinning the step. */
  onClick?: (step: number, event: PointerEvent) => void;
  onMove?: (event: PointerEvent | null) => void;
  /** Whether dragging from a step moves the window in place of choosing another one; so it does with Shift. */
  pans?: (step: number) => boolean;
}

export function pointAtSteps(element: HTMLElement, { stepAt, onClick, onMove, pans }: Pointing): void {
  const brush = element.appendChild(h("div", { class: "brush", hidden: true }));
  let from: number | null = null;
  let panning: number | null = null;
  const x = (event: PointerEvent) => event.clientX - element.getBoundingClientRect().left;
  const drop = () => {
    from = panning = null;
    brush.hidden = true;
  };
  element.addEventListener("pointermove", (event) => {
    hover(Math.round(stepAt(x(event))));
    onMove?.(event);
    if (panning !== null && from !== null && Math.abs(x(event) - from) >= DRAG_PIXELS) {
      pan((stepAt(x(event)) - stepAt(panning)) * (pans ? 1 : -1)); // a window follows the pointer, and so do lines
      panning = x(event);
      return;
    }
    if (panning !== null) return;
    if (from === null || Math.abs(x(event) - from) < DRAG_PIXELS) return;
    brush.hidden = false;
    brush.style.left = `${Math.min(from, x(event))}px`;
    brush.style.width = `${Math.abs(x(event) - from)}px`;
  });
  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    from = x(event);
    if (!isWhole() && (event.shiftKey || pans?.(stepAt(from)))) panning = from;
    if (event.pointerType === "mouse") element.setPointerCapture(event.pointerId);
  });
  element.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const to = x(event);
    if (panning !== null && panning !== from) hover(null);
    else if (Math.abs(to - from) >= DRAG_PIXELS) zoom([stepAt(from), stepAt(to)]);
    else if (onClick) onClick(Math.round(stepAt(to)), event);
    else go({ step: Math.max(0, Math.round(stepAt(to))) });
    drop();
  });
  element.addEventListener("pointercancel", drop);
  element.addEventListener("pointerleave", () => {
    hover(null);
    onMove?.(null);
  });
  element.addEventListener(
    "wheel",
    (event) => {
      const sideways = event.shiftKey && !event.deltaX ? event.deltaY : event.deltaX;
      if (isWhole() || Math.abs(sideways) <= (event.shiftKey ? 0 : Math.abs(event.deltaY))) return;
      event.preventDefault();
      pan(stepAt(sideways) - stepAt(0));
    },
    { passive: false },
  );
  element.addEventListener("dblclick", () => go({ zoom: "all", step: state.view === "run" ? null : state.step }));
}
