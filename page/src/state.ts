/** What the reader looks at. It lives in the address, so that a link shows a colleague the same. */

import type { Span } from "./scale";

export interface State {
  view: "run" | "runs" | "compare";
  run: string;
  /** Runs that are compared. */
  runs: string[];
  step: number | null;
  /** Steps in view; null: the fault, or the whole run if there is none. */
  zoom: Span | "all" | null;
  alert: string | null;
  layer: string | null;
  metric: string | null;
  theme: "light" | "dark" | null;
  panel: string | null;
  /** What any series is searched for. */
  find: string | null;
  /** Number of readings in the median of every line; null: as each chart likes. */
  smooth: number | null;
  /** What compared runs are drawn over. */
  axis: "time" | null;
}

const VIEWS = ["run", "runs", "compare"] as const;
const THEMES = ["light", "dark"] as const;
const TEXTS = ["alert", "layer", "metric", "panel", "find"] as const;

export function parseLink(hash: string): State {
  const link = new URLSearchParams(hash.replace(/^#/, ""));
  const runs = link.getAll("run");
  const whole = (key: string) => (/^\d{1,15}$/.test(link.get(key) ?? "") ? Number(link.get(key)) : null);
  const zoom = /^(\d+)-(\d+)$/.exec(link.get("zoom") ?? "");
  const texts = Object.fromEntries(TEXTS.map((key) => [key, link.get(key)])) as Pick<State, (typeof TEXTS)[number]>;
  return {
    view: VIEWS.find((view) => view === link.get("view")) ?? (runs.length ? "run" : "runs"),
    run: runs[0] ?? "",
    runs,
    step: whole("step"),
    smooth: whole("smooth"),
    axis: link.get("axis") === "time" ? "time" : null,
    zoom: zoom && Number(zoom[2]) > Number(zoom[1]) ? [Number(zoom[1]), Number(zoom[2])] : link.get("zoom") === "all" ? "all" : null,
    theme: THEMES.find((theme) => theme === link.get("theme")) ?? null,
    ...texts,
  };
}

export function formatLink(state: State): string {
  const link = new URLSearchParams();
  for (const run of state.view === "compare" ? state.runs : [state.run]) if (run) link.append("run", run);
  if (state.view !== (state.run ? "run" : "runs")) link.set("view", state.view);
  for (const key of ["step", "smooth"] as const) if (state[key] !== null) link.set(key, String(state[key]));
  if (state.zoom !== null) link.set("zoom", state.zoom === "all" ? "all" : state.zoom.map(Math.round).join("-"));
  for (const key of [...TEXTS, "theme", "axis"] as const) if (state[key]) link.set(key, state[key]);
  return `#${link.toString()}`;
}
