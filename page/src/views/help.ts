/** The keys, on `?`. */

import { h } from "../dom";

const KEYS: [string, string][] = [
  ["← →", "reading before, after"],
  ["[ ]", "alert before, after"],
  ["z", "zoom to the fault"],
  ["0", "whole run"],
  ["Shift+← Shift+→", "steps before, after the window"],
  ["s", "smoother, and back"],
  ["g u w a b", "gradient, update, weight, activation, gain in the map"],
  ["↑ ↓", "layer before, after, with a layer open or the map in focus"],
  ["1 2 3", "run, runs, compare"],
  ["l", "follow the run, or pause"],
  ["c", "copy a link to what you see"],
  ["t", "light or dark"],
  ["Esc", "close"],
];

export function help(): HTMLDialogElement {
  const dialog = h(
    "dialog",
    { class: "help", "aria-label": "Keys" },
    h("h2", {}, "Keys and pointer"),
    h("dl", {}, ...KEYS.flatMap(([keys, words]) => [h("dt", {}, ...keys.split(" ").flatMap((key) => [h("kbd", {}, key), " "])), h("dd", {}, words)])),
    h("p", {}, "Move over a chart: all charts show that step. Click: pin the step. Drag: zoom all charts. Shift-drag or scroll sideways: move. Double-click: the whole run. On a map, click a row for its layer."),
    h("form", { method: "dialog" }, h("button", { class: "button primary" }, "Close")),
  );
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  return dialog;
}
