/**
 * Everything that comes from the server, or from the report that this page is in.
 *
 * Charts ask for what they draw on every frame (`run.line(...)`). What is not here yet is fetched, all of a frame in one
 * request, and the page is drawn again when it arrives.
 */

import type { Overview } from "./api";
import { decode, fromBase64, type Packed } from "./packed";
import { type Points, reduce, type Span, timed } from "./scale";

/** A series, maybe reduced to the lowest and highest value per pixel column. */
export interface Line extends Points {
  name: string;
  scope: string;
  reduced: boolean;
  version: number;
}

/** Values over depth and steps. */
export interface DepthMap {
  metric: string;
  scopes: string[];
  starts: number[];
  ends: number[];
  low: number;
  high: number;
  cells: Float32Array;
  version: number;
}

/** Shares of a tensor's values by size, over steps. */
export interface Histograms {
  steps: number[];
  exponents: number[];
  shares: Float32Array;
  zeros: Float32Array;
  version: number;
}

/** Values over depth at one step, with what was usual before it. */
export interface Profile {
  step: number;
  scopes: string[];
  values: ArrayLike<number>;
  low: ArrayLike<number>;
  high: ArrayLike<number>;
}

interface Embedded {
  overview: Overview;
  blobs: Record<string, string>;
}

const MAP_COLUMNS = 400;
const HISTOGRAM_COLUMNS = 120;
const SERIES_PER_REQUEST = 40;
const MOST_POINTS = 8000;
const SETTLE_MILLISECONDS = 250;
const REFRESH_MILLISECONDS = 2000;
const RETRY_MILLISECONDS = 2000;
const MOST_HELD = 60;
const OVERVIEW_MILLISECONDS = 20000;

let version = 0;

export function embedded(): Embedded | null {
  const element = document.getElementById("embedded");
  return element ? (JSON.parse(element.textContent) as Embedded) : null;
}

type Query = [string, string | number][];

async function request(path: string, query: Query, init?: RequestInit): Promise<Response> {
  const text = query.map(([key, value]) => `${key}=${encodeURIComponent(value)}`).join("&");
  const response = await fetch(`api/${path}${text ? `?${text}` : ""}`, init);
  if (response.ok) return response;
  const said = (await response.json().catch(() => null)) as { error?: string } | null;
  throw new Error(said?.error ?? `The server answered ${response.status} ${response.statusText}.`);
}

export async function getJson<T>(path: string, query: Query = []): Promise<T> {
  return (await request(path, query)).json() as Promise<T>;
}

async function getPacked(path: string, query: Query): Promise<Packed> {
  return decode(await (await request(path, query)).arrayBuffer());
}

export function writeToken(): string | null {
  return document.querySelector<HTMLMetaElement>("meta[name=token]")?.content ?? null;
}

export async function writeNote(run: string, tags: string[], note: string): Promise<void> {
  const headers = { "content-type": "application/json", "x-forewarn-token": writeToken() ?? "" };
  await request("note", [["run", run]], { method: "POST", headers, body: JSON.stringify({ tags, note }) });
}

/** The series of an answer of `/api/series`. */
export function linesOf({ header, arrays }: Packed): Line[] {
  return (header.series as { name: string; scope: string; reduced: boolean }[]).map(({ name, scope, reduced }, index) => ({
    name,
    scope,
    reduced,
    steps: Array.from(arrays[`steps:${index}`]!),
    values: Array.from(arrays[`values:${index}`]!),
    version: ++version,
  }));
}

interface Held {
  packed: Packed | null;
  version: number;
  fetched: number;
  busy: boolean;
}

interface HeldLine {
  whole: Points;
  line: Line;
  /** The last step of the run when this was fetched. */
  upTo: number;
  /** The window that was fetched in detail. */
  detail: string;
}

export type Connection = "live" | "lost" | "over";

export class RunData {
  connection: Connection = "over";
  error: string | null = null;
  private lines = new Map<string, HeldLine | null>();
  private wanted = new Set<string>();
  private held = new Map<string, Held>();
  private looked = "";
  /** The window for details: from a step, and to one unless it reaches the end of the run. */
  private settled: Query = [];
  private settling: ReturnType<typeof setTimeout> | undefined;
  private events: EventSource | null = null;
  private overviewed = Date.now();
  private alerts = -1;
  private appending = false;
  private retryAt = 0;
  private scopes = new Map<string, Set<string>>();
  private offline: Map<string, Packed> | null = null;
  private clock: { steps: number[]; times: number[] } | null = null;
  private timedLines = new WeakMap<Line, Line>();

  constructor(public overview: Overview, private changed: (what: "data" | "overview") => void, blobs?: Record<string, string>) {
    this.index();
    if (blobs) this.load(blobs);
  }

  static async open(run: string, changed: (what: "data" | "overview") => void): Promise<RunData> {
    return new RunData(await getJson<Overview>("run", [["run", run]]), changed);
  }

  get id(): string {
    return this.overview.run;
  }

  get last(): number {
    return this.overview.state.last_step ?? 0;
  }

  scopesOf(name: string): string[] {
    return [...(this.scopes.get(name) ?? [])];
  }

  records(name: string, scope?: string): boolean {
    const scopes = this.scopes.get(name);
    return scopes !== undefined && (scope === undefined || scopes.has(scope));
  }

  /** The series, or undefined while it is on its way or if it was never recorded. */
  line(name: string, scope = ""): Line | undefined {
    const key = `${name}@${scope}`;
    const held = this.lines.get(key);
    if (held === undefined && this.records(name, scope) && !this.offline && Date.now() >= this.retryAt) {
      this.lines.set(key, null);
      this.want(key);
    }
    return held?.line ?? (held === undefined && this.offline ? this.fromMap(name, scope) : undefined);
  }

  /** Reads when each step was, for `timed`. */
  async readClock(name: string): Promise<void> {
    if (this.clock || !this.records(name, "")) return;
    const { arrays } = await getPacked("series", [["run", this.id], ["series", `${name}@`], ["times", 1]]);
    this.clock = { steps: Array.from(arrays["steps:0"]!), times: Array.from(arrays["times:0"]!, (seconds) => 1000 * seconds) };
  }

  /** Milliseconds from the first step to the last. */
  get duration(): number {
    return this.clock?.times.at(-1) ?? 0;
  }

  /** A line over milliseconds since the first step, in place of steps. */
  timed(line: Line | undefined): Line | undefined {
    if (!line || !this.clock?.steps.length) return undefined;
    let result = this.timedLines.get(line);
    if (!result || result.version !== -line.version) {
      result = { ...line, ...timed(line, this.clock), version: -line.version };
      this.timedLines.set(line, result);
    }
    return result;
  }

  map(metric: string): DepthMap | undefined {
    const held = this.fetched("map", [["metric", metric]], MAP_COLUMNS, (packed) => (packed.header.starts as number[]).length);
    if (!held?.packed) return undefined;
    const { header, arrays } = held.packed;
    return { ...(header as unknown as DepthMap), cells: arrays.cells as Float32Array, version: held.version };
  }

  /** The tensors whose histograms can be shown; a report carries only some. */
  histogramScopes(metric: string): string[] {
    const scopes = this.overview.histograms[metric] ?? [];
    return this.offline ? scopes.filter((scope) => this.offline!.has(`histograms|${metric}|${scope}`)) : scopes;
  }

  histograms(metric: string, scope: string): Histograms | undefined {
    const query: Query = [["metric", metric], ["scope", scope]];
    const held = this.fetched("histograms", query, HISTOGRAM_COLUMNS, (packed) => (packed.header.steps as number[]).length);
    if (!held?.packed) return undefined;
    const { header, arrays } = held.packed;
    return { ...(header as unknown as Histograms), shares: arrays.shares as Float32Array, zeros: arrays.zeros as Float32Array, version: held.version };
  }

  /** The exact profile, where it can be fetched. */
  async profile(metric: string, step: number): Promise<Profile | null> {
    if (this.offline) return null;
    const { header, arrays } = await getPacked("profile", [["run", this.id], ["metric", metric], ["step", step]]);
    return { ...(header as unknown as Profile), values: arrays.values!, low: arrays.low!, high: arrays.high! };
  }

  /** Says which steps are in view. If they stay, what was reduced is fetched again for them alone. */
  look(window: Span): void {
    const rounded = this.rounded(window);
    if (this.offline || rounded.join() === this.looked) return;
    this.looked = rounded.join();
    clearTimeout(this.settling);
    this.settling = setTimeout(() => {
      this.settled = rounded;
      for (const [key, held] of this.lines) if (rounded.length && held?.line.reduced && held.detail !== this.looked) this.want(key);
      this.changed("data");
    }, SETTLE_MILLISECONDS);
  }

  /** A window that a run does not outgrow with every step: its ends are round, and it is open where it reaches the last one. */
  private rounded([from, to]: Span): Query {
    const unit = 2 ** Math.floor(Math.log2(Math.max(1, (to - from) / 8)));
    const start = Math.floor(from / unit) * unit;
    if (to < this.last) return [["from", start], ["to", Math.ceil(to / unit) * unit]];
    return start > 0 ? [["from", start]] : [];
  }

  /** Listens for new steps until the run is over or `close` is called. */
  follow(): void {
    this.events?.close();
    const events = (this.events = new EventSource(`api/events?run=${encodeURIComponent(this.id)}`));
    events.onopen = () => this.connect("live");
    events.onerror = () => {
      this.connect("lost");
      // A server that answers with an error ends the stream; one that is away does not.
      if (events.readyState === EventSource.CLOSED && this.events === events) setTimeout(() => this.events === events && this.follow(), 3000);
    };
    events.addEventListener("changed", (event: MessageEvent<string>) => void this.grow(JSON.parse(event.data)));
  }

  close(): void {
    this.events?.close();
    this.events = null;
    clearTimeout(this.settling);
  }

  private async grow(news: { last_step: number | null; num_steps: number; updated: number; state: string; alerts: number }): Promise<void> {
    const { state } = this.overview;
    const before = state.last_step ?? -1;
    const isFirst = before < 0 && news.last_step !== null;
    const turned = isFirst || news.state !== state.word || (this.alerts >= 0 && news.alerts !== this.alerts);
    const grown = news.last_step !== state.last_step;
    if ((news.last_step ?? -1) < before) this.forget();
    this.alerts = news.alerts;
    Object.assign(state, { last_step: news.last_step, num_steps: news.num_steps, updated: news.updated });
    try {
      if (turned || (grown && Date.now() - this.overviewed > OVERVIEW_MILLISECONDS)) {
        this.overviewed = Date.now();
        this.overview = await getJson<Overview>("run", [["run", this.id]]);
        this.index();
        this.changed("overview");
      }
      await this.append();
      this.error = null;
    } catch (error) {
      this.fail(error);
    }
    this.changed("data");
  }

  /** A run that begins anew, or is resumed from an earlier step, is read anew. */
  private forget(): void {
    this.lines.clear();
    this.held.clear();
  }

  /** Fetches what is newer than the lines here, until they are up to date. */
  private async append(): Promise<void> {
    if (this.appending) return;
    this.appending = true;
    try {
      for (;;) {
        const { last } = this;
        const old = [...this.lines].filter(([, held]) => held && held.upTo < last);
        if (!old.length) return;
        const from = Math.max(0, Math.min(...old.map(([, held]) => held!.upTo)));
        for (const line of await this.series(old.map(([key]) => key), [["from", from]])) this.extend(line);
        for (const [, held] of old) held!.upTo = last;
      }
    } finally {
      this.appending = false;
    }
  }

  private extend(news: Line): void {
    const held = this.lines.get(`${news.name}@${news.scope}`);
    if (!held) return;
    const { whole, line } = held;
    const newest = Math.max(line.steps.at(-1) ?? -1, whole.steps.at(-1) ?? -1);
    const start = news.steps.findIndex((step) => step > newest);
    if (start < 0) return;
    for (const points of new Set([whole, line])) {
      points.steps.push(...news.steps.slice(start));
      points.values.push(...news.values.slice(start));
    }
    line.reduced ||= news.reduced;
    if (line.steps.length > MOST_POINTS) Object.assign(line, reduce(line, MOST_POINTS / 4), { reduced: true });
    line.version = ++version;
  }

  private connect(connection: Connection): void {
    if (this.connection === connection) return;
    this.connection = connection;
    this.changed("data");
  }

  private index(): void {
    this.scopes = new Map(this.overview.series.map(({ name, scopes }) => [name, new Set(scopes)]));
  }

  private fail(error: unknown): void {
    this.error = error instanceof Error ? error.message : String(error);
    this.retryAt = Date.now() + RETRY_MILLISECONDS;
  }

  private want(key: string): void {
    if (!this.wanted.size) queueMicrotask(() => void this.fetchWanted());
    this.wanted.add(key);
  }

  private async fetchWanted(): Promise<void> {
    const keys = [...this.wanted];
    this.wanted.clear();
    const whole = keys.filter((key) => !this.lines.get(key));
    const detailed = keys.filter((key) => this.lines.get(key));
    const { last, settled } = this;
    try {
      for (const line of await this.series(whole, [])) this.keep(line, last);
      if (settled.length) for (const line of await this.series(detailed, settled)) this.refine(line, settled);
      this.error = null;
    } catch (error) {
      for (const key of whole) this.lines.delete(key);
      this.fail(error);
    }
    this.changed("data");
  }

  private keep(line: Line, upTo: number): void {
    this.lines.set(`${line.name}@${line.scope}`, { whole: line, line, upTo, detail: "" });
    if (line.reduced && this.settled.length) this.want(`${line.name}@${line.scope}`);
  }

  /** Puts the points of a window in place of the reduced ones. */
  private refine(part: Line, window: Query): void {
    const held = this.lines.get(`${part.name}@${part.scope}`);
    if (!held) return;
    const { whole, line } = held;
    const [from, to] = [Number(window[0]![1]), part.steps.at(-1) ?? Number(window[1]?.[1] ?? Infinity)];
    const join = (key: "steps" | "values") => [
      ...whole[key].filter((_, index) => whole.steps[index]! < from),
      ...part[key],
      ...whole[key].filter((_, index) => whole.steps[index]! > to),
    ];
    held.line = { ...line, steps: join("steps"), values: join("values"), version: ++version };
    held.detail = window.join();
  }

  private async series(keys: string[], window: Query): Promise<Line[]> {
    const lines: Line[] = [];
    for (let start = 0; start < keys.length; start += SERIES_PER_REQUEST) {
      const chunk = keys.slice(start, start + SERIES_PER_REQUEST).map((key): [string, string] => ["series", key]);
      lines.push(...linesOf(await getPacked("series", [["run", this.id], ...chunk, ...window])));
    }
    return lines;
  }

  /** A cached answer; for a window in more detail if the whole run fills all columns. */
  private fetched(path: string, query: Query, columns: number, filled: (packed: Packed) => number): Held | undefined {
    if (this.offline) {
      const packed = this.offline.get([path, ...query.map(([, value]) => value)].join("|"));
      return packed && { packed, version: 1, fetched: 0, busy: false };
    }
    const whole = this.hold(path, [["run", this.id], ...query, ["columns", columns]]);
    if (!whole.packed || !this.settled.length || filled(whole.packed) < columns) return whole;
    const detail = this.hold(path, [["run", this.id], ...query, ...this.settled, ["columns", columns]]);
    return detail.packed ? detail : whole;
  }

  private hold(path: string, query: Query): Held {
    const key = JSON.stringify([path, query]);
    let held = this.held.get(key);
    if (!held) {
      if (this.held.size >= MOST_HELD) this.held.delete(this.held.keys().next().value!);
      this.held.set(key, (held = { packed: null, version: 0, fetched: -1, busy: false }));
    }
    if (!held.busy && held.fetched < this.last && Date.now() >= this.retryAt) {
      const seen = held;
      seen.busy = true;
      const ask = () => {
        const last = this.last;
        getPacked(path, query)
          .then((packed) => Object.assign(seen, { packed, version: ++version, fetched: last }))
          .catch((error: unknown) => this.fail(error))
          .finally(() => {
            seen.busy = false;
            this.changed("data");
          });
      };
      if (seen.packed) setTimeout(ask, REFRESH_MILLISECONDS);
      else ask();
    }
    return held;
  }

  /** Reads the answers that a report carries; each is found by what its header says. */
  private load(blobs: Record<string, string>): void {
    this.offline = new Map();
    for (const [path, text] of Object.entries(blobs)) {
      const packed = decode(fromBase64(text));
      const endpoint = /api\/(\w+)/.exec(path)?.[1];
      if (endpoint === "series") for (const line of linesOf(packed)) this.keep(line, this.last);
      else this.offline.set([endpoint, packed.header.metric, packed.header.scope].filter((part) => part !== undefined).join("|"), packed);
    }
  }

  /** A row of a map as a series: a report carries no others of layers. */
  private fromMap(metric: string, scope: string): Line | undefined {
    const map = this.map(metric);
    const row = map?.scopes.indexOf(scope) ?? -1;
    if (!map || row < 0) return undefined;
    const { starts, cells } = map;
    const values = Array.from(cells.subarray(row * starts.length, (row + 1) * starts.length));
    const kept = values.map((_, index) => index).filter((index) => !Number.isNaN(values[index]));
    const line = { name: metric, scope, reduced: true, version: ++version };
    const held = { ...line, steps: kept.map((index) => starts[index]!), values: kept.map((index) => values[index]!) };
    this.keep(held, this.last);
    return held;
  }
}

