/** The model over its depth: which rows a map shows, and what its rows are at one step. */

import type { Overview } from "./api";
import type { DepthMap, Profile } from "./data";
import { indexAt, quantile } from "./scale";

export interface Row {
  scope: string;
  label: string;
  block: string | null;
  /** Its row in the map. */
  index: number;
}

/** A test for names: a regular expression if the text is a valid one, else the text itself. */
export function matcher(filter: string): (name: string) => boolean {
  if (!filter) return () => true;
  try {
    const pattern = new RegExp(filter, "i");
    return (name) => pattern.test(name);
  } catch {
    return (name) => name.toLowerCase().includes(filter.toLowerCase());
  }
}

/** The scopes of each metric that a text or a regular expression finds in `metric@scope` or in the label. */
export function findSeries(series: { name: string; scopes: string[] }[], text: string, labelOf: (name: string) => string): { name: string; scopes: string[] }[] {
  const matches = matcher(text);
  return series
    .map(({ name, scopes }) => ({ name, scopes: scopes.filter((scope) => matches(`${name}@${scope}`) || matches(labelOf(name))) }))
    .filter(({ scopes }) => scopes.length);
}

/** The block of a scope is the longest one that it lies in. */
function blockOf(scope: string, blocks: string[]): string | null {
  const homes = blocks.filter((block) => scope === block || scope.startsWith(`${block}.`));
  return homes.sort((a, b) => b.length - a.length)[0] ?? null;
}

/** The rows of a map in model order. Unless all are wanted, biases and other vectors are left out. */
export function depthRows(overview: Pick<Overview, "layers" | "blocks">, map: Pick<DepthMap, "scopes">, filter: string, all: boolean): Row[] {
  const layers = new Map(overview.layers.map((layer) => [layer.scope, layer]));
  const matches = matcher(filter);
  const rows = map.scopes.map((scope, index): Row & { vector: boolean } => {
    const layer = layers.get(scope);
    const block = layer?.block ?? blockOf(scope, overview.blocks);
    const label = layer?.label ?? (block && scope !== block ? scope.slice(block.length + 1) : scope);
    return { scope, label: short(label), block, index, vector: (layer?.shape.length ?? 2) < 2 };
  });
  const matrices = rows.filter((row) => !row.vector);
  const shown = (all || filter || !matrices.length ? rows : matrices).filter((row) => matches(row.scope));
  const sizes = new Map<string | null, number>();
  for (const { block } of shown) sizes.set(block, (sizes.get(block) ?? 0) + 1);
  // A block of one row needs no bracket: its row has the whole name.
  return shown.map(({ scope, label, block, index }) => (sizes.get(block)! > 1 ? { scope, label, block, index } : { scope, label: short(scope), block: null, index }));
}

const short = (name: string) => name.replace(/\.weight$/, "");

const FEWEST = 5;

/** Column of the newest reading at or before a step; -1 if there is none. */
export function columnAt(map: Pick<DepthMap, "starts">, step: number): number {
  return indexAt(map.starts, step);
}

/** Each row at a step, with p05 and p95 of its readings before it. */
export function profileFromMap(map: DepthMap, step: number): Profile {
  const columns = map.starts.length;
  const column = Math.max(0, columnAt(map, step));
  const low: number[] = [];
  const high: number[] = [];
  const values = map.scopes.map((_, row) => {
    const cells = map.cells.subarray(row * columns, row * columns + column + 1);
    const before = cells.slice(0, column).filter(Number.isFinite).sort();
    low.push(before.length < FEWEST ? NaN : quantile(before, 0.05));
    high.push(before.length < FEWEST ? NaN : quantile(before, 0.95));
    for (let index = column; index >= 0; index--) if (!Number.isNaN(cells[index])) return cells[index]!;
    return NaN;
  });
  return { step: map.starts[column] ?? step, scopes: map.scopes, values, low, high };
}
