/** What the policy did to the run: marks on the loss, and a list with the outcomes. */

import uPlot from "uplot";
import type { Action } from "../api";
import { colour, h } from "../dom";
import { currentRun, type Part, pin } from "../page";

const MARK_PIXELS = 26;

/** The actions that a chart shows: an alert that was sent changed nothing, and has its own mark. */
const shown = () => currentRun().overview.actions.filter(({ action }) => action !== "notify");

/** A dashed line at each action, and an arrow back to where a run returned to. */
export function drawActions(plot: uPlot): void {
  const { ctx, bbox } = plot;
  const ratio = uPlot.pxRatio;
  const bottom = bbox.top + bbox.height;
  const x = (step: number) => Math.min(Math.max(plot.valToPos(step, "x", true), bbox.left), bbox.left + bbox.width);
  ctx.strokeStyle = ctx.fillStyle = colour("action");
  ctx.lineWidth = ratio;
  for (const { step, to, state } of shown()) {
    if (step < plot.scales.x!.min! || step > plot.scales.x!.max! || state === "failed") continue;
    ctx.setLineDash(state === "done" ? [5 * ratio, 3 * ratio] : [ratio, 4 * ratio]);
    ctx.beginPath();
    ctx.moveTo(x(step), bbox.top);
    ctx.lineTo(x(step), bottom);
    ctx.stroke();
    if (to === null) continue;
    const [y, size] = [bottom - 6 * ratio, 4 * ratio];
    ctx.setLineDash([]);
    ctx.beginPath();
    ctx.moveTo(x(step), y);
    ctx.lineTo(x(to), y);
    ctx.stroke();
    ctx.beginPath();
    ctx.moveTo(x(to), y);
    ctx.lineTo(x(to) + size, y - size);
    ctx.lineTo(x(to) + size, y + size);
    ctx.fill();
  }
}

/** Buttons above the actions of a chart, which lead to the list; those that would overlap share one. */
export function actionMarks(): { element: HTMLElement; place: (plot: uPlot) => void } {
  const element = h("div", { class: "marks", hidden: true });
  let drawn = "";
  function place(plot: uPlot): void {
    const placed: { x: number; actions: Action[] }[] = [];
    for (const action of shown()) {
      if (action.step < plot.scales.x!.min! || action.step > plot.scales.x!.max!) continue;
      const x = plot.over.offsetLeft + plot.valToPos(action.step, "x");
      const near = placed.at(-1);
      if (near && x - near.x < MARK_PIXELS) near.actions.push(action);
      else placed.push({ x, actions: [action] });
    }
    const content = JSON.stringify(placed);
    if (content === drawn) return;
    drawn = content;
    element.hidden = !placed.length;
    element.replaceChildren(
      ...placed.map(({ x, actions }) => {
        const words = actions.map(({ step, words: deed, outcome }) => [`step ${step}: ${deed}`, outcome].filter(Boolean).join("\n")).join("\n");
        const button = h("button", { type: "button", class: "deed", title: words, "aria-label": words, onclick: () => document.getElementById("actions")?.scrollIntoView({ block: "center", behavior: "smooth" }) }, actions.length > 1 ? `↳${actions.length}` : "↳");
        button.style.left = `${x}px`;
        return button;
      }),
    );
  }
  return { element, place };
}

/** Each action with its reason and its outcome. */
export function actionList(): Part {
  const list = h("ol", { class: "panel deeds" });
  const section = h("section", { id: "actions" }, h("div", { class: "section" }, h("h2", {}, "What the policy did"), h("p", {}, "by itself, and what came of it")), list);
  const element = h("div", {}, section); // always there, so that the first action of a run is seen
  let drawn = "";

  function item({ step, words, outcome, state, worked }: Action): HTMLElement {
    const kind = state === "failed" ? "not done" : state === "dry run" ? "dry run" : worked ? "helped" : "";
    return h(
      "li",
      { class: state === "failed" ? "failed" : worked ? "worked" : "" },
      h("button", { type: "button", class: "link", onclick: () => pin(step) }, `step ${step}`),
      h("span", {}, words, outcome && h("small", {}, outcome)),
      kind && h("span", { class: "tag" }, kind),
    );
  }

  function draw(): void {
    const { actions } = currentRun().overview;
    const content = JSON.stringify(actions);
    if (content === drawn) return;
    drawn = content;
    list.replaceChildren(...actions.map(item));
    section.hidden = !actions.length;
  }

  draw();
  return { element, draw };
}
