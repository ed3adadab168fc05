/** The answers of the server in JSON. Words that a person reads come from there and are never re-worded here. */

export type Severity = "healthy" | "info" | "warning" | "critical";

export interface Remedy {
  do: string;
  change: string | null;
  why: string;
  safety: string;
  safety_word: string;
}

export interface Alert {
  key: string;
  code: string;
  name: string;
  severity: Exclude<Severity, "healthy">;
  state: "firing" | "resolved";
  headline: string;
  numbers: string;
  cause: string | null;
  place: string;
  scope: string;
  places: string[];
  scopes: string[];
  since: number;
  fired: number;
  last: number;
  follows: string;
  is_symptom: boolean;
  remedies: Remedy[];
  explanation: string;
  limit: number | null;
  side: "above" | "below" | null;
  value: number | null;
  judged: { name: string; scope: string } | null;
  usual: [number, number] | null;
  computed: string | null;
}

/** Something that the policy did to the run. */
export interface Action {
  step: number;
  action: string;
  code: string;
  words: string;
  outcome: string;
  state: "done" | "dry run" | "failed";
  /** Whether the alert was resolved and the loss came back. */
  worked: boolean;
  /** The step to which the run returned. */
  to: number | null;
}

export interface Metric {
  label: string;
  unit: string;
  meaning: string;
  /** Whether the training loop recorded it, not forewarn. */
  own: boolean;
  log: boolean;
}

export interface Overview {
  run: string;
  path: string;
  words: string;
  state: {
    word: string;
    sentence: string;
    end: { reason: string; time: number } | null;
    last_step: number | null;
    num_steps: number;
    updated: number;
    step_seconds: number | null;
  };
  verdict: {
    severity: Severity;
    word: string;
    sentence: string;
    headline: string | null;
    numbers: string | null;
    cause: string | null;
    since: number | null;
    code: string | null;
    name: string | null;
    followed: string | null;
    course: string;
  };
  remedies: Remedy[];
  alerts: Alert[];
  actions: Action[];
  checklist: { name: string; state: string; detail: string }[];
  epochs: { words: string }[];
  metrics: Record<string, Metric>;
  series: { name: string; scopes: string[]; count: number }[];
  layers: { scope: string; label: string; block: string | null; shape: number[] }[];
  blocks: string[];
  histograms: Record<string, string[]>;
  config: Record<string, unknown>;
  environment: Record<string, unknown>;
  cost: { sentence: string } | null;
}

export interface RunRow {
  run: string;
  model: string;
  state: string;
  num_steps: number;
  last_step: number | null;
  last_loss: number | null;
  /** The last loss as text, such as NaN. */
  loss_words: string;
  updated: number | null;
  /** How many are open of each severity; a severity without any may be missing. */
  alerts: Partial<Record<"critical" | "warning" | "info", number>>;
  tags: string[];
  note: string;
  error?: string;
}

export interface Comparison {
  runs: { run: string; words: string }[];
  config: { key: string; values: unknown[] }[];
  environment: { key: string; values: unknown[] }[];
  part: { step: number; metric: string; words: string } | null;
  layers: { scope: string; metric: string; values: (number | null)[]; ratio: number | null }[];
  alerts: { code: string; name: string; headline: string; fired: (number | null)[] }[];
  losses: { first: number | null; last: number | null; best: number | null }[];
  words: string[];
}
