import { afterEach, expect, it, vi } from "vitest";
import type { Overview } from "../src/api";
import { RunData } from "../src/data";

/** A server with one series that holds the squares of its steps. */
class Squares {
  last = 9;
  requests: string[] = [];
  events: Record<string, (event: { data: string }) => void> = {};

  install(): void {
    vi.stubGlobal("fetch", async (address: string) => {
      this.requests.push(address);
      const query = new URLSearchParams(address.split("?")[1]);
      const from = Number(query.get("from") ?? 0);
      const steps = Array.from({ length: this.last + 1 - from }, (_, index) => from + index);
      return { ok: true, arrayBuffer: async () => packed(query.getAll("series"), steps), json: async () => overview(this.last) };
    });
    const { events } = this;
    vi.stubGlobal(
      "EventSource",
      class {
        addEventListener = (name: string, call: (event: { data: string }) => void) => (events[name] = call);
        close = () => undefined;
      },
    );
  }

  grow(last: number): void {
    this.last = last;
    this.events.changed!({ data: JSON.stringify({ last_step: last, num_steps: last + 1, updated: 0, state: "running", alerts: 0 }) });
  }
}

function overview(last: number): Overview {
  const series = ["train/loss", "train/lr"].map((name) => ({ name, scopes: [""], count: last + 1 }));
  return { run: "a", state: { word: "running", last_step: last, num_steps: last + 1, updated: 0 }, series, alerts: [] } as unknown as Overview;
}

function packed(keys: string[], steps: number[]): ArrayBuffer {
  const arrays = keys.flatMap((_, index) => [
    { name: `steps:${index}`, type: "uint32", length: steps.length },
    { name: `values:${index}`, type: "float32", length: steps.length },
  ]);
  const series = keys.map((key) => ({ name: key.split("@")[0], scope: key.split("@")[1], reduced: false }));
  const header = JSON.stringify({ arrays, series });
  const text = new TextEncoder().encode(header.padEnd(Math.ceil(header.length / 4) * 4));
  const buffer = new ArrayBuffer(4 + text.length + 8 * steps.length * keys.length);
  new DataView(buffer).setUint32(0, text.length, true);
  new Uint8Array(buffer).set(text, 4);
  keys.forEach((_, index) => {
    const offset = 4 + text.length + index * 8 * steps.length;
    new Uint32Array(buffer, offset, steps.length).set(steps);
    new Float32Array(buffer, offset + 4 * steps.length, steps.length).set(steps.map((step) => step * step));
  });
  return buffer;
}

afterEach(() => vi.unstubAllGlobals());

it("series that are asked for in one frame come in one request", async () => {
  const server = new Squares();
  server.install();
  const run = new RunData(overview(9), () => undefined);
  expect([run.line("train/loss"), run.line("train/lr"), run.line("never/recorded")]).toEqual([undefined, undefined, undefined]);
  await vi.waitFor(() => expect(run.line("train/loss")).toBeDefined());
  expect(run.line("train/lr")!.values.at(-1)).toBe(81);
  expect(server.requests).toEqual(["api/series?run=a&series=train%2Floss%40&series=train%2Flr%40"]);
});

it("new steps are appended once, also when the server sends a step again", async () => {
  const server = new Squares();
  server.install();
  const run = new RunData(overview(9), () => undefined);
  run.follow();
  run.line("train/loss");
  await vi.waitFor(() => expect(run.line("train/loss")).toBeDefined());
  const version = run.line("train/loss")!.version;
  server.grow(11);
  server.grow(12); // while the steps before are on their way
  await vi.waitFor(() => expect(run.line("train/loss")!.steps.at(-1)).toBe(12));
  expect(run.line("train/loss")!.steps).toEqual([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
  expect(run.line("train/loss")!.values).toEqual([0, 1, 4, 9, 16, 25, 36, 49, 64, 81, 100, 121, 144]);
  expect(run.line("train/loss")!.version).toBeGreaterThan(version);
  expect(run.last).toBe(12);
});

it("a server that refuses says why", async () => {
  vi.stubGlobal("fetch", async () => ({ ok: false, status: 404, statusText: "Not Found", json: async () => ({ error: "there is no run b" }) }));
  await expect(RunData.open("b", () => undefined)).rejects.toThrow("there is no run b");
});
