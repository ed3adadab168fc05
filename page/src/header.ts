/** The top of the page: which run, how it is, and the views. */

import { h, say, svg } from "./dom";
import { ago, number } from "./format";
import { currentRun, go, isLive, isPaused, state } from "./page";
import type { RunRow } from "./api";

const STALE_STEPS = 20;
const STALE_SECONDS = 10;

export interface Header {
  element: HTMLElement;
  draw: (hasRun: boolean) => void;
  choose: (rows: RunRow[]) => void;
}

export function header(actions: { open: (run: string) => void; view: (view: "run" | "runs" | "compare") => void; theme: () => void; help: () => void }): Header {
  const select = h("select", { "aria-label": "Run", onchange: () => actions.open(select.value) });
  const facts = h("span", { class: "facts" });
  const [dot, sentence] = [h("i", { class: "dot" }), h("span")];
  const status = h("button", { type: "button", class: "status", title: "Follow the run, or pause (l)", onclick: () => go({ step: null, zoom: null }) }, dot, sentence);
  const tabs = (["run", "runs", "compare"] as const).map((view) => h("button", { type: "button", "data-view": view, onclick: () => actions.view(view) }, view.charAt(0).toUpperCase() + view.slice(1)));
  const logo = svg("svg", { width: 20, height: 16, viewBox: "0 0 20 16", "aria-hidden": "true" }, svg("path", { class: "logo", d: "M1 13h3l2-4 3 5 3-13 3 12h4" }));
  const element = h(
    "header",
    { class: "top" },
    h(
      "div",
      { class: "wrap" },
      h("span", { class: "brand" }, logo, h("span", {}, "forewarn")),
      h("span", { class: "choice" }, select, facts),
      h("span", { class: "spacer" }),
      status,
      h("nav", { "aria-label": "Views" }, ...tabs),
      h("button", { type: "button", class: "icon", "aria-label": "Light or dark (t)", onclick: actions.theme }, "◐"),
      h("button", { type: "button", class: "icon", "aria-label": "Keys (?)", onclick: actions.help }, "?"),
    ),
  );

  /** Words of the server, but for what only the page knows: whether it follows, and whether the server is there. */
  function standing(): [string, string] {
    const run = currentRun();
    const { state: now } = run.overview;
    const age = Date.now() / 1000 - now.updated;
    if (run.connection === "lost") return ["lost", "Disconnected · retrying; the training is not affected"];
    if (run.error !== null) return ["lost", run.error];
    if (now.word === "failed") return ["failed", now.sentence];
    if (!isLive()) return ["over", now.sentence];
    const where = now.sentence.replace(/step [\d,]+/, `step ${now.last_step ?? 0}`);
    if (isPaused()) return ["paused", where.replace(/^[^·]+/, "Following paused ")];
    const usual = now.step_seconds ?? 0;
    if (age > Math.max(STALE_SECONDS, STALE_STEPS * usual)) return ["stale", `No new step for ${ago(age).replace(" ago", "")} · usually ${number(usual)} s`];
    return ["live", `${where} · ${ago(age)}`];
  }

  function draw(hasRun: boolean): void {
    for (const tab of tabs) tab.toggleAttribute("aria-current", tab.dataset.view === state.view);
    element.classList.toggle("no-run", !hasRun);
    if (!hasRun) return;
    const [kind, words] = standing();
    dot.className = `dot ${kind}`;
    say(sentence, words);
    status.dataset.state = kind;
    say(facts, currentRun().overview.words);
    facts.title = currentRun().overview.words;
  }

  function choose(rows: RunRow[]): void {
    const names = rows.map((row) => row.run);
    if (state.run && !names.includes(state.run)) names.unshift(state.run);
    if (names.join("\n") !== [...select.options].map((option) => option.value).join("\n")) select.replaceChildren(...names.map((name) => h("option", { value: name }, name || ".")));
    select.value = state.run;
  }

  return { element, draw, choose };
}
