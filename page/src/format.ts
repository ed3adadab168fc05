/** Numbers as text: three significant digits, with units. */

export function number(value: number | null | undefined): string {
  if (value == null) return "no reading";
  if (!Number.isFinite(value)) return "not finite";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
  if (size >= 1000) return Math.round(Number(value.toPrecision(3))).toLocaleString("en-US");
  return String(Number(value.toPrecision(3)));
}

/** A number in a column: trailing zeros are kept, so that the points line up. */
export function inColumn(value: number | null | undefined): string {
  const size = Math.abs(value ?? NaN);
  return size >= 1e-4 && size < 1000 ? value!.toPrecision(3) : number(value);
}

export function count(value: number): string {
  return value.toLocaleString("en-US");
}

export function plural(value: number, word: string): string {
  return `${count(value)} ${word}${value === 1 ? "" : "s"}`;
}

const BYTES = ["B", "kB", "MB", "GB", "TB"];

export function withUnit(value: number | null | undefined, unit: string): string {
  if (value == null || !Number.isFinite(value)) return number(value);
  if (unit === "s") return value < 1 ? `${number(value * 1000)} ms` : `${number(value)} s`;
  if (unit === "share") return `${number(value * 100)}%`;
  if (unit === "bytes") {
    const power = Math.min(BYTES.length - 1, Math.floor(Math.log10(Math.max(1, value)) / 3));
    return `${number(value / 1000 ** power)} ${BYTES[power]}`;
  }
  return unit === "" || unit === "count" || unit === "flag" || unit === "code" ? number(value) : `${number(value)} ${unit}`;
}

/** A step below an axis; the first says what the numbers are. */
export function stepWords(step: number, index: number): string {
  return index ? count(step) : `step ${count(step)}`;
}

export function ago(seconds: number): string {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

/** A file's name from the name of a run and a panel. */
export function fileName(...words: string[]): string {
  return words.join(" ").replace(/[^\p{L}\p{N}._-]+/gu, "-").replace(/^-+|-+$/g, "");
}
