/** Several runs beside each other: their lines overlaid, what differs, and where they part. */

import uPlot from "uplot";
import { legend, swatch } from "../charts/legend";
import { type Curve, lineChart } from "../charts/line";
import type { Comparison } from "../api";
import { getJson, RunData } from "../data";
import { colour, h } from "../dom";
import { inColumn, number, withUnit } from "../format";
import { add, go, isWhole, type Part, redraw, show, span, state } from "../page";
import { panel } from "../panel";
import { look, tickWords } from "./lines";
import { smoothingChoice } from "./smoothing";

/** The series that tells when each step was. */
const CLOCK = "train/loss";
const METRICS = ["train/lr", "monitor/update_ratio_median", "gradient/global_norm", "eval/loss", "weight/global_norm", "speed/step_seconds"];

function words(value: unknown): string {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return number(value);
  return typeof value === "string" ? value : JSON.stringify(value);
}

export async function compareView(names: string[], opened: (runs: RunData[]) => void): Promise<HTMLElement> {
  const [comparison, ...runs] = await Promise.all([getJson<Comparison>("compare", names.map((name) => ["run", name])), ...names.map((name) => RunData.open(name, redraw))]);
  opened(runs);
  const { part } = comparison;
  const isTime = () => state.axis === "time";

  /** Draws over steps, or over the time since the first of them. */
  async function choose(axis: "time" | null): Promise<void> {
    if (axis) await Promise.all(runs.map((run) => run.readClock(CLOCK)));
    if (axis !== state.axis) go({ zoom: null, step: null });
    show(null, Math.max(...runs.map((run) => (axis ? run.duration : run.last))));
    go({ axis });
  }
  await choose(state.axis);
  const head = (first: string) => h("thead", {}, h("tr", {}, h("th", {}, first), ...names.map((name) => h("th", { class: "number" }, name))));
  const rows = (items: { key: string; values: unknown[] }[]) => h("tbody", {}, ...items.map(({ key, values }) => h("tr", {}, h("th", { scope: "row" }, key), ...values.map((value) => h("td", { class: "number" }, words(value))))));
  const fold = (title: string, open: boolean, ...children: Node[]) => h("details", { class: "panel folded", open }, h("summary", {}, title), ...children);

  const curves = (metric: string): Curve[] =>
    runs.flatMap((run, index) => {
      if (!run.records(metric)) return [];
      const line = run.line(metric, run.scopesOf(metric)[0]);
      return [{ line: isTime() ? run.timed(line) : line, name: metric === "train/loss" ? run.id : undefined, ...look(index) }];
    });

  const chart = (metric: string, height: number) => {
    const { label = metric, log = false, unit = "" } = runs.find((run) => run.overview.metrics[metric])?.overview.metrics[metric] ?? {};
    const title = label.charAt(0).toUpperCase() + label.slice(1);
    const plot = lineChart({
      label: title,
      height,
      log,
      isTime,
      format: tickWords(unit),
      curves: () => curves(metric),
      paint: (self) => {
        if (!part || isTime() || part.step < span()[0] || part.step > span()[1]) return;
        self.ctx.fillStyle = colour("warn-line");
        self.ctx.fillRect(self.valToPos(part.step, "x", true), self.bbox.top, uPlot.pxRatio, self.bbox.height);
      },
    });
    return { title, parts: [plot, legend(() => curves(metric), (value) => withUnit(value, unit))] };
  };

  const loss = chart("train/loss", 270);
  const others = METRICS.filter((metric) => runs.some((run) => run.records(metric))).map((metric) => chart(metric, 150));
  const losses = (["first", "best", "last"] as const).map((key) => ({ key: `${key === "best" ? "lowest" : key} loss`, values: comparison.losses.map((row) => inColumn(row[key])) }));
  const cards = comparison.runs.map(({ run, words: said }, index) => {
    return h("a", { class: "panel", href: `#run=${encodeURIComponent(run)}` }, h("b", {}, swatch(look(index)), run), h("p", {}, said));
  });
  const axes = ([[null, "Steps"], ["time", "Time"]] as const).map(([axis, text]) => ({ axis, button: h("button", { type: "button", onclick: () => void choose(axis) }, text) }));
  const smoothing = smoothingChoice();
  const whole = h("button", { type: "button", class: "button", onclick: () => go({ zoom: "all" }) }, "Whole run");
  const controls: Part = {
    element: h("div", { class: "right" }, h("div", { class: "segments", role: "group", "aria-label": "Axis" }, ...axes.map(({ button }) => button)), smoothing.element, whole),
    draw: () => {
      for (const { axis, button } of axes) button.setAttribute("aria-pressed", String(axis === state.axis));
      whole.disabled = isWhole();
      smoothing.draw();
    },
  };
  const place = (panelPart: Part) => add(panelPart).element;

  return h(
    "main",
    { class: "page compare" },
    h("div", { class: "section" }, h("h2", {}, "Compare"), h("p", {}, "a run keeps its colour and dash everywhere"), place(controls)),
    h("div", { class: "cards" }, ...cards),
    h("ul", { class: "panel lines said" }, ...comparison.words.map((sentence) => h("li", {}, sentence))),
    h(
      "div",
      { class: "grid" },
      place(panel({ title: "Loss", sub: part ? `they part at step ${part.step}` : "they do not part", class: "wide" }, ...loss.parts)),
      h("section", { class: "panel third scroll" }, h("header", {}, h("h3", {}, "What differs")), h("table", {}, head(""), rows([...losses, ...comparison.config]))),
      ...others.map(({ title, parts }) => place(panel({ title, class: "third" }, ...parts))),
    ),
    h("div", { class: "folds" },
      comparison.alerts.length
        ? h(
            "section",
            { class: "panel scroll", id: "alerts" },
            h("header", {}, h("h3", {}, "Alerts"), h("span", { class: "sub" }, "the step at which each fired")),
            h("table", {}, head("what is wrong"), h("tbody", {}, ...comparison.alerts.map((alert) => h("tr", {}, h("th", { scope: "row" }, alert.headline || alert.name, " ", h("small", {}, alert.code)), ...alert.fired.map((step) => h("td", { class: "number" }, step === null ? "none" : `step ${step}`)))))),
          )
        : h("p", { class: "panel" }, "None of these runs has an alert."),
      comparison.layers.length
        ? fold("Layers that differ most", true, h("table", {}, head("layer"), rows(comparison.layers.map(({ scope, metric, values }) => ({ key: `${scope} · ${metric}`, values: values.map((value) => (value === null ? null : inColumn(value))) })))))
        : h("span"),
      comparison.environment.length ? fold("Environment", false, h("table", {}, head(""), rows(comparison.environment))) : h("span"),
    ),
  );
}
