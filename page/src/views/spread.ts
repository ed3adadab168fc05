/** How the fault spread: the cause first, then its symptoms in the order of first sight; a row opens the alert's card. */

import { evidenceChart, evidenceKey, inItsUnit } from "../charts/evidence";
import type { Alert } from "../api";
import { copy, h, sign } from "../dom";
import { currentRun, go, type Part, pin, redraw, state } from "../page";
import { label } from "./lines";
import { remedyList, SEVERITY_WORDS } from "./verdict";

const MOST_PLACES = 40;

interface Options {
  isReport: boolean;
  openLayer: (scope: string) => void;
}

export function placeWords(alert: Alert): string {
  const [first, ...rest] = alert.places;
  return `${first || "the whole run"}${rest.length ? ` and ${rest.length} more` : ""}`;
}

function limitWords(alert: Alert): string {
  return alert.limit === null ? "" : `limit${alert.side === "below" ? ": at least" : ""} ${inItsUnit(alert, alert.limit)}`;
}

function card(alert: Alert, { openLayer }: Options): Part {
  const run = currentRun();
  const chart = alert.judged ? evidenceChart(alert, 210) : null;
  const cause = run.overview.alerts.find((other) => other.code === alert.follows);
  const judged = alert.judged && `Judged: ${label(alert.judged.name).toLowerCase()}${alert.judged.scope ? ` of ${alert.judged.scope}` : ""}.`;
  const fact = (name: string, value: string, where?: string) => h("div", {}, h("dt", {}, name), h("dd", {}, value, where && h("small", {}, ` ${where}`)));
  const element = h(
    "div",
    { class: "card" },
    h(
      "div",
      {},
      h("h3", {}, alert.headline),
      h("p", {}, [alert.numbers, alert.cause].filter(Boolean).join(" · ")),
      h("p", { class: "faint" }, judged, cause && " Follows from ", cause && h("code", {}, cause.name), cause && "."),
      chart?.element,
      chart && evidenceKey(alert),
      h(
        "dl",
        { class: "facts" },
        alert.value !== null && fact("when it fired", inItsUnit(alert, alert.value), `at step ${alert.fired}`),
        alert.limit !== null && fact("limit", limitWords(alert).replace(/^limit:? ?/, "")),
        fact("since", `step ${alert.since}`, alert.state === "resolved" ? `to ${alert.last}` : "still firing"),
      ),
      alert.scopes.some(Boolean) &&
        h(
          "div",
          { class: "places" },
          h("h4", {}, `Where: ${alert.scopes.length === 1 ? "1 place" : `${alert.scopes.length} places`}`),
          ...alert.scopes.slice(0, MOST_PLACES).map((scope, index) => h("button", { type: "button", class: "chip", disabled: !scope, onclick: () => openLayer(scope) }, scope || alert.places[index] || "the whole run")),
        ),
    ),
    h(
      "div",
      {},
      alert.remedies.length > 0 && h("h4", {}, alert.is_symptom ? "If it stays after the cause is dealt with" : "What to do"),
      alert.remedies.length > 0 && remedyList(alert.remedies),
      alert.explanation && h("details", { class: "explanation" }, h("summary", {}, "What this means"), ...alert.explanation.split("\n\n").map((paragraph) => h("p", {}, paragraph))),
      h(
        "p",
        { class: "buttons" },
        h("button", { type: "button", class: "button", onclick: () => pin(alert.fired) }, `Go to step ${alert.fired}`),
        h("button", { type: "button", class: "button", onclick: () => void copy(location.href, "Link copied: run, step, zoom and alert") }, "Copy link"),
      ),
    ),
  );
  return { element, draw: () => chart?.draw(), destroy: () => chart?.destroy?.() };
}

function row(alert: Alert, isCause: boolean, options: Options): Part {
  const spark = alert.judged ? evidenceChart(alert, 40, true) : null;
  const kind = alert.state === "resolved" ? "resolved" : alert.severity;
  const words = `${alert.state === "resolved" ? "Resolved" : SEVERITY_WORDS[alert.severity]}${isCause ? ", the cause" : ""} · ${placeWords(alert)}`;
  const button = h(
    "button",
    { type: "button", class: `row ${kind}${isCause ? " cause" : ""}`, "aria-expanded": "false", onclick: () => toggle(state.alert === alert.key ? null : alert.key) },
    sign(kind),
    h("span", { class: "what" }, h("b", {}, alert.headline), h("small", { title: alert.places.join("\n") }, words)),
    h("span", { class: "step" }, h("b", {}, `step ${alert.since}`), h("small", {}, alert.state === "resolved" ? `to ${alert.last}` : "still firing")),
    h("span", { class: "value" }, alert.value === null ? "" : inItsUnit(alert, alert.value), h("small", {}, limitWords(alert))),
    h("span", { class: "spark" }, spark?.element),
    h("span", { class: "chevron", "aria-hidden": "true" }, "›"),
  );
  // A sparkline inside a button: the button decides what a click does.
  spark?.element.classList.add("inert");
  const element = h("div", { class: "entry", id: `alert-${alert.code}` }, button);
  let open: Part | null = null;
  return {
    element,
    draw: () => {
      spark?.draw();
      const isOpen = options.isReport || state.alert === alert.key;
      button.setAttribute("aria-expanded", String(isOpen));
      if (isOpen && !open) element.append((open = card(alert, options)).element);
      else if (!isOpen && open) {
        open.destroy?.();
        open.element.remove();
        open = null;
      }
      open?.draw();
    },
    destroy: () => (spark?.destroy?.(), open?.destroy?.()),
  };
}

/** Opens or closes the card of an alert, with its step in view. */
export function toggle(key: string | null): void {
  const alert = currentRun().overview.alerts.find((candidate) => candidate.key === key);
  go({ alert: alert?.key ?? null });
  if (alert) pin(alert.fired);
}

export function openAlert(alert: Alert): void {
  toggle(alert.key);
  redraw();
  requestAnimationFrame(() => requestAnimationFrame(() => document.getElementById(`alert-${alert.code}`)?.scrollIntoView({ block: "center", behavior: "smooth" })));
}

export function spread(options: Options): Part {
  const run = currentRun();
  const list = h("div", { class: "panel spread" });
  const title = h("h2");
  const sub = h("p");
  const section = h("section", { id: "spread" }, h("div", { class: "section" }, title, sub), list);
  const element = h("div", {}, section); // always there, so that the first alert of a run is seen

  let drawn = "";
  let rows: Part[] = [];

  function fill(): void {
    const { alerts } = run.overview;
    const content = JSON.stringify(alerts);
    if (content === drawn) return;
    drawn = content;
    rows.forEach((part) => part.destroy?.());
    const hasSymptoms = alerts.some((alert) => alert.is_symptom);
    rows = alerts.map((alert) => row(alert, alerts.some((other) => other.follows === alert.code), options));
    const isOver = alerts.every((alert) => alert.state === "resolved");
    title.textContent = hasSymptoms ? "How it spread" : isOver ? "What was wrong" : "What is wrong";
    sub.textContent = `Each line is the judged value with its limit.${hasSymptoms ? " What followed from a cause stands below it, in the order of first sight." : ""}`;
    const head = ["", "what, and where", "since", "when it fired", "judged value and limit", ""];
    list.replaceChildren(h("div", { class: "row head" }, ...head.map((words) => h("span", {}, words))), ...rows.map((part) => part.element));
    section.hidden = !alerts.length;
  }

  fill();
  return {
    element,
    draw: () => {
      fill();
      rows.forEach((part) => part.draw());
    },
    destroy: () => rows.forEach((part) => part.destroy?.()),
  };
}
