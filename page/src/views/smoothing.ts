/** How smooth the lines are: the raw line always stays in sight, faintly. */

import { h } from "../dom";
import { go, type Part, state } from "../page";

const WIDTHS = [0, 8, 32, 128, 512];

export function smoothingChoice(): Part & { element: HTMLSelectElement } {
  const words = (width: number) => (width ? `Median of ${width}` : "No smoothing");
  const element = h("select", { "aria-label": "Smoothing of all lines", title: "Smoothing of all lines (s)", onchange: () => smooth(element.value) }, h("option", { value: "" }, "Smoothing"), ...WIDTHS.map((width) => h("option", { value: width }, words(width))));
  return {
    element,
    draw: () => {
      const value = String(state.smooth ?? "");
      if (value && !WIDTHS.includes(state.smooth!) && !element.querySelector(`[value="${value}"]`)) element.append(h("option", { value }, words(state.smooth!)));
      if (element.value !== value) element.value = value;
    },
  };
}

function smooth(width: string): void {
  go({ smooth: width === "" ? null : Number(width) });
}

/** The next width, for the key. */
export function nextSmoothing(): void {
  const next = WIDTHS[WIDTHS.indexOf(state.smooth ?? -1) + 1];
  go({ smooth: next ?? null });
}
