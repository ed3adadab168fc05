/** Elements without markup: text is always text. */

type Child = Node | string | null | undefined | false;
type Properties = Record<string, string | number | boolean | null | undefined | ((event: never) => void)>;

function fill<E extends Element>(element: E, properties: Properties, children: Child[]): E {
  for (const [key, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(key.slice(2), value as EventListener);
    else if (value !== false && value != null) element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...children.filter((child): child is Node | string => child != null && child !== false));
  return element;
}

/** An element; a property that is a function listens: `onclick`. */
export function h<K extends keyof HTMLElementTagNameMap>(tag: K, properties: Properties = {}, ...children: Child[]): HTMLElementTagNameMap[K] {
  return fill(document.createElement(tag), properties, children);
}

export function svg(tag: string, properties: Properties = {}, ...children: Child[]): SVGElement {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

/** Sets text only if it differs, so that a selection survives. */
export function say(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

export type Sign = "critical" | "warning" | "info" | "healthy" | "resolved" | "waiting";

// Each severity has its own shape: octagon, triangle, ring, tick, dashed ring.
const SHAPES: Record<Sign, [string, string][]> = {
  critical: [["solid", "M5 1h6l4 4v6l-4 4H5l-4-4V5z"], ["cut", "M8 4.2v4.6M8 11v.9"]],
  warning: [["solid", "M8 1.2 15.4 14.4H.6z"], ["cut", "M8 6v4M8 12v.6"]],
  info: [["ring", "M15 8A7 7 0 1 1 1 8a7 7 0 0 1 14 0"], ["ring", "M8 7.4v4M8 4.6v.7"]],
  healthy: [["solid", "M15.4 8A7.4 7.4 0 1 1 .6 8a7.4 7.4 0 0 1 14.8 0"], ["cut", "m4.6 8.3 2.3 2.3 4.5-4.8"]],
  resolved: [["dashed", "M15 8A7 7 0 1 1 1 8a7 7 0 0 1 14 0"], ["ring", "m5 8.3 2.2 2.2 4-4.4"]],
  waiting: [["dashed", "M15 8A7 7 0 1 1 1 8a7 7 0 0 1 14 0"], ["ring", "M8 8h.1"]],
};

export function sign(kind: Sign, word?: string): HTMLElement {
  const picture = svg("svg", { viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true" });
  for (const [part, d] of SHAPES[kind]) picture.append(svg("path", { class: part, d }));
  return h("span", { class: `sign ${kind}` }, picture, word);
}

/** The same shapes as a mark on a canvas. */
export function mark(context: CanvasRenderingContext2D, kind: Sign, x: number, y: number, size: number, colour: string, halo: string): void {
  context.save();
  context.translate(x - size / 2, y - size / 2);
  context.scale(size / 16, size / 16);
  const path = new Path2D(SHAPES[kind][0]![1]);
  context.lineWidth = 5;
  context.strokeStyle = halo;
  context.stroke(path);
  context.fillStyle = colour;
  context.fill(path);
  context.restore();
}

let toasted = 0;

export function toast(text: string): void {
  const box = document.querySelector(".toast") ?? document.body.appendChild(h("div", { class: "toast", role: "status" }));
  box.textContent = text;
  box.classList.add("on");
  clearTimeout(toasted);
  toasted = window.setTimeout(() => box.classList.remove("on"), 1800);
}

export async function copy(text: string, said: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
    toast(said);
  } catch {
    toast("The browser does not allow copying here.");
  }
}

let colours = new Map<string, string>();

/** A colour of the theme by the name of its CSS variable. */
export function colour(name: string): string {
  let value = colours.get(name);
  if (value === undefined) {
    value = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
    colours.set(name, value);
  }
  return value;
}

export function setTheme(theme: "light" | "dark"): void {
  document.documentElement.dataset.theme = theme;
  colours = new Map();
}
