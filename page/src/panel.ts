/** A titled box around charts, with the values under the cursor in its header and the charts as PNG and CSV. */

import { colour, h, say, toast } from "./dom";
import { fileName, plural } from "./format";
import { type Part, redraw, state } from "./page";

interface Options {
  title: string;
  sub?: string | (() => string);
  /** The values at the step that is looked at. */
  out?: () => string;
  class?: string;
  id?: string;
  /** Stands after the charts. */
  note?: Node | string;
}

const text = (value: string | (() => string) | undefined) => (typeof value === "function" ? value() : (value ?? ""));

export function panel({ title, sub, out, class: name = "", id, note }: Options, ...parts: Part[]): Part {
  const subtitle = h("span", { class: "sub" });
  const output = h("output", { class: "out" });
  const first = parts.find((part) => part.canvas);
  const tools = h(
    "span",
    { class: "tools" },
    first?.changeScale && h("button", { type: "button", title: "Logarithmic or linear scale", onclick: first.changeScale }, "log"),
    first?.changeScale && h("button", { type: "button", title: "Large or small", "aria-label": "Large or small", onclick: () => (element.classList.toggle("large"), redraw()) }, "⤢"),
    first && h("button", { type: "button", onclick: () => void copyPicture(title, first) }, "PNG"),
    first?.rows && h("button", { type: "button", onclick: () => void copyTable(title, first) }, "CSV"),
  );
  const element = h(
    "section",
    { class: `panel ${name}`, id, "aria-label": title },
    h("header", {}, h("h3", {}, title), subtitle, tools, out && output),
    ...parts.map((part) => part.element),
    note && h("div", { class: "note" }, note),
  );
  const draw = () => {
    say(subtitle, text(sub));
    subtitle.title = text(sub);
    if (out) say(output, out());
    for (const part of parts) part.draw();
  };
  return { element, draw, destroy: () => parts.forEach((part) => part.destroy?.()) };
}

/** What a file or a picture is about: the run, or the runs that are compared. */
const subject = () => (state.view === "compare" ? state.runs.join(", ") : state.run);

function save(blob: Blob, title: string, ending: string): void {
  const link = h("a", { href: URL.createObjectURL(blob), download: `${fileName(subject(), title)}.${ending}` });
  link.click();
  URL.revokeObjectURL(link.href);
  toast(`Saved as ${link.download}`);
}

/** Copies the numbers of a chart; saves them where the browser does not let text be copied. */
async function copyTable(title: string, part: Part): Promise<void> {
  const rows = part.rows!();
  const quoted = (cell: string | number) => (/[",\n]/.test(String(cell)) ? `"${String(cell).replaceAll('"', '""')}"` : String(cell));
  const text = rows.map((row) => row.map(quoted).join(",")).join("\n");
  try {
    await navigator.clipboard.writeText(text);
    toast(`${plural(rows.length - 1, "row")} copied as CSV`);
  } catch {
    save(new Blob([text], { type: "text/csv" }), title, "csv");
  }
}

/** Copies a chart with its title; saves it where the browser does not let pictures be copied. */
async function copyPicture(title: string, part: Part): Promise<void> {
  const chart = part.canvas!();
  if (!chart) return;
  const ratio = window.devicePixelRatio || 1;
  const picture = h("canvas", { width: chart.width, height: chart.height + 34 * ratio });
  const context = picture.getContext("2d")!;
  context.fillStyle = colour("surface");
  context.fillRect(0, 0, picture.width, picture.height);
  context.fillStyle = colour("ink");
  context.font = `600 ${14 * ratio}px system-ui, sans-serif`;
  context.fillText(`${title} · ${subject()}`, 8 * ratio, 22 * ratio);
  context.drawImage(chart, 0, 34 * ratio);
  const blob = await new Promise<Blob | null>((done) => picture.toBlob(done));
  if (!blob) return;
  try {
    await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
    toast("Copied as PNG");
  } catch {
    save(blob, title, "png");
  }
}
