import { expect, it } from "vitest";
import { formatLink, parseLink } from "../src/state";

it("a link opens what it was made from", () => {
  for (const hash of [
    "#run=runs%2Fdemo&step=182&zoom=121-221&alert=U104%40&layer=blocks.0.qkv.weight&metric=update%2Fratio&theme=dark",
    "#run=a&zoom=all",
    "#view=runs",
    "#run=a&run=b%26c&view=compare&axis=time&smooth=64",
    "#run=a&smooth=0&find=gradient.*blocks",
    "#run=%3Cimg+src%3Dx%3E&layer=%3Cimg+src%3Dx%3E",
  ]) {
    const link = formatLink(parseLink(hash));
    expect(parseLink(link)).toEqual(parseLink(hash));
  }
  expect(formatLink(parseLink("#run=runs%2Fdemo&zoom=121-221&step=0"))).toBe("#run=runs%2Fdemo&step=0&zoom=121-221");
});

it("nonsense in a link is ignored", () => {
  const state = parseLink("#run=a&view=evil&step=-3&zoom=9-2&theme=pink&smooth=x&axis=depth");
  expect(state).toMatchObject({ view: "run", run: "a", step: null, zoom: null, theme: null, smooth: null, axis: null });
  expect(parseLink("#run=a&step=1e999").step).toBeNull();
  expect(parseLink("").view).toBe("runs");
});
