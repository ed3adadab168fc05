/** The verdict on the run: one line if it is healthy, else what is wrong, what to do, and the evidence. */

import { evidenceChart, evidenceKey } from "../charts/evidence";
import type { Alert, Overview, Remedy } from "../api";
import { h, sign, type Sign } from "../dom";
import { acceptVerdict, currentRun, faultStep, isFaulty, type Part } from "../page";
import { label, reading } from "./lines";

export const SEVERITY_WORDS = { critical: "Critical", warning: "Warning", info: "Note", healthy: "Healthy" } as const;
const FIRST_REMEDIES = 3;

/** Whether the change of a value is not in the sentence already. */
function saysMore({ do: words, change }: Remedy): boolean {
  return change !== null && !change.split(" → ").every((value) => words.includes(value));
}

export function remedyList(remedies: Remedy[], most = Infinity): HTMLElement {
  const item = (remedy: Remedy, index: number) =>
    h(
      "li",
      {},
      h("span", { class: "place" }, `${index + 1}`),
      h("span", { class: "do" }, remedy.do, saysMore(remedy) && " ", saysMore(remedy) && h("span", { class: "change" }, remedy.change)),
      h("span", { class: "tag" }, remedy.safety_word),
      h("span", { class: "why" }, remedy.why),
    );
  const list = h("ol", { class: "remedies" }, ...remedies.slice(0, most).map(item));
  const rest = remedies.slice(most);
  if (!rest.length) return list;
  const more = h("button", { type: "button", class: "link", onclick: () => (more.remove(), list.append(...rest.map((remedy, index) => item(remedy, most + index)))) }, `${rest.length} more`);
  return h("div", {}, list, more);
}

/** What the layout of the page depends on. */
export function layoutKey(overview: Overview): string {
  return JSON.stringify([isFaulty(overview), overview.verdict.code]);
}

export function verdictPanel(isReport: boolean, showChecklist: () => void, showNews: () => void): Part {
  const run = currentRun();
  const built = layoutKey(run.overview);
  const element = h("section", { class: "verdict", "aria-label": "Verdict" });
  const news = h("div", { class: "news", role: "status", hidden: true });
  const say = h("div", { class: "say" });
  const faulty = faultStep() !== null;
  const first = run.overview.alerts.find((alert) => alert.code === run.overview.verdict.code);
  const proof = faulty && first?.judged ? evidence(first, isReport ? 190 : 292) : null;
  const body = h("div", { class: "body" }, say, proof && proof.element);
  let filled = "";

  function evidence(alert: Alert, height: number): { part: Part; element: HTMLElement; out: HTMLElement } {
    const part = evidenceChart(alert, height);
    const out = h("output", { class: "out" });
    const where = alert.judged!.scope ? `, ${alert.judged!.scope}` : "";
    const title = `Why: ${label(alert.judged!.name).toLowerCase()}${where}`;
    return { part, out, element: h("div", { class: "proof" }, h("header", {}, h("h2", { title }, title), out), part.element, evidenceKey(alert)) };
  }

  function fill(): void {
    const { verdict, checklist, state, remedies } = run.overview;
    const waiting = state.last_step === null;
    const kind: Sign = waiting ? "waiting" : verdict.severity;
    element.className = `verdict ${kind}${faulty ? "" : " line"}`;
    const checks = checklist.filter((check) => check.state !== "info");
    const passed = checks.filter((check) => check.state === "pass").length;
    const word = waiting ? "Waiting" : faulty ? SEVERITY_WORDS[verdict.severity] : verdict.word.charAt(0).toUpperCase() + verdict.word.slice(1);
    if (!faulty) {
      say.replaceChildren(
        sign(kind, word),
        h("p", { class: "words" }, waiting ? "No step yet. The first readings come with the first monitor.step(loss)." : [verdict.course, verdict.sentence].join(" · ")),
        checks.length > 0 && !waiting ? h("button", { type: "button", class: "link", onclick: showChecklist }, `${passed} of ${checks.length} checks pass`) : "",
      );
      return;
    }
    say.replaceChildren(
      h("p", { class: "top" }, sign(kind, word), h("span", { class: "since" }, `since step ${verdict.since} · `, h("code", {}, verdict.name ?? ""), ` (${verdict.code})`)),
      h("h1", {}, verdict.headline ?? verdict.sentence),
      verdict.numbers ? h("p", { class: "numbers" }, verdict.numbers) : "",
      verdict.cause ? h("p", {}, verdict.cause) : "",
      h("p", {}, [verdict.sentence, verdict.followed].filter(Boolean).join(" · ")),
      remedies.length ? h("div", { class: "todo" }, h("h2", {}, "What to do"), remedyList(remedies, isReport ? Infinity : FIRST_REMEDIES)) : "",
    );
  }

  function draw(): void {
    const { overview } = run;
    const isNew = layoutKey(overview) !== built;
    news.hidden = !isNew;
    body.hidden = isNew && !faulty; // the news stand in place of the line
    if (isNew && !faulty) element.className = `verdict line ${overview.verdict.severity}`;
    const content = JSON.stringify([overview.verdict, overview.remedies, overview.checklist, overview.state.last_step === null]);
    if (content !== filled) {
      filled = content;
      if (!isNew) {
        acceptVerdict();
        fill();
      }
      const { verdict } = overview;
      const words = verdict.headline && isFaulty(overview) ? `New at step ${verdict.since}: ${verdict.headline}` : verdict.sentence;
      news.replaceChildren(sign(verdict.severity, SEVERITY_WORDS[verdict.severity]), h("span", {}, words), h("button", { type: "button", class: "button primary", onclick: showNews }, "Show it"));
    }
    if (!proof) return;
    proof.out.textContent = reading(run.line(first!.judged!.name, first!.judged!.scope));
    proof.part.draw();
  }

  fill(); // at once: a verdict that comes a frame late would move the page
  element.append(news, body);
  return { element, draw, destroy: () => proof?.part.destroy?.() };
}
