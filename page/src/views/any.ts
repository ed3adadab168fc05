/** Any series that was recorded, found by its name: what has no panel of its own can still be looked at. */

import { findSeries } from "../depth";
import { h, say } from "../dom";
import { count, plural } from "../format";
import { add, currentRun, go, type Part, redraw, remove, state } from "../page";
import { label, metricPanel } from "./lines";

const MOST_PANELS = 12;
const SETTLE_MILLISECONDS = 200;

export function anySeries(): Part {
  const run = currentRun();
  let shown: Part[] = [];
  let drawn: string | null = null;
  const titleWords = () => `Any series: ${count(run.overview.series.reduce((sum, { scopes }) => sum + scopes.length, 0))} recorded`;
  let settling: ReturnType<typeof setTimeout> | undefined;
  const search = h("input", {
    type: "search",
    value: state.find,
    placeholder: "Name or layer: text or regex",
    "aria-label": "Find series by text or regular expression",
    oninput: () => {
      clearTimeout(settling);
      settling = setTimeout(() => find(search.value.trim()), SETTLE_MILLISECONDS);
    },
  });
  const find = (text: string) => go({ find: text || null, panel: text ? element.id : null }); // a link leads to it
  const grid = h("div", { class: "grid" });
  const names = h("p", { class: "places" });
  const said = h("p", { class: "faint" });
  const title = h("summary", {}, titleWords());
  const element = h("details", { class: "panel folded any", id: "any", open: state.find !== null, ontoggle: redraw }, title, search, said, names, grid);

  function fill(): void {
    const { series } = run.overview;
    shown.forEach(remove);
    const found = state.find === null ? [] : findSeries(series, state.find, label);
    const total = found.reduce((sum, { scopes }) => sum + scopes.length, 0);
    shown = found.slice(0, MOST_PANELS).map(({ name, scopes }) => metricPanel(name, 170, { class: "third", sub: name, scopes }));
    grid.replaceChildren(...shown.map((part) => add(part).element));
    const rest = found.length > MOST_PANELS ? `; the first ${MOST_PANELS} metrics are drawn` : "";
    say(said, state.find === null ? "Choose a metric, or type a part of its name or of a layer's." : `${count(total)} series of ${plural(found.length, "metric")}${rest}`);
    names.replaceChildren(...(state.find === null ? series.map(({ name }) => h("button", { type: "button", class: "chip", onclick: () => ((search.value = `^${name}@`), find(search.value)) }, name)) : []));
  }

  return {
    element,
    draw: () => {
      const { series } = run.overview;
      say(title, titleWords());
      const content = JSON.stringify([state.find, series.length]);
      if (!element.open || content === drawn) return;
      drawn = content;
      fill();
    },
    destroy: () => clearTimeout(settling),
  };
}
