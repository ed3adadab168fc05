/** Which line is which, and its value at the step that is looked at. */

import { h, say } from "../dom";
import { at, type Part } from "../page";
import { valueAt } from "../scale";
import type { Curve } from "./line";

export function legend(curves: () => Curve[], words: (value: number | undefined) => string, missing = 0): Part {
  const element = h("p", { class: "keys values" });
  let built = "";
  let values: HTMLElement[] = [];
  return {
    element,
    draw: () => {
      const shown = curves();
      const content = JSON.stringify(shown.map(({ name, colour, dash }) => [name, colour, dash]));
      if (content !== built) {
        built = content;
        values = shown.map(() => h("b"));
        element.replaceChildren(...shown.map(({ name, ...look }, index) => h("span", { class: "key" }, swatch(look), name, values[index])), missing > 0 ? `${missing} more are not drawn` : "");
      }
      shown.forEach(({ line }, index) => say(values[index]!, line ? words(valueAt(line, at())) : ""));
    },
  };
}

/** The colour and the dash of a line. */
export function swatch({ colour, dash }: Pick<Curve, "colour" | "dash">): HTMLElement {
  const element = h("i", { class: "swatch" });
  element.style.borderTopColor = `var(--${colour ?? "d1"})`;
  element.style.borderTopStyle = dash?.length ? (dash[0]! <= 2 ? "dotted" : "dashed") : "solid";
  return element;
}
