import { expect, it } from "vitest";
import { ago, fileName, inColumn, number, plural, withUnit } from "../src/format";

it("numbers have three significant digits", () => {
  expect([0, 0.46512, 2.5, 1234.5, 987654, 1.5e7, 0.00001234, -3.14159].map(number)).toEqual(["0", "0.465", "2.5", "1,230", "988,000", "1.5e7", "1.23e-5", "-3.14"]);
  expect([NaN, Infinity, null, undefined].map(number)).toEqual(["not finite", "not finite", "no reading", "no reading"]);
});

it("in a column zeros are kept", () => {
  expect([0.3, 12, 1e-9, NaN].map(inColumn)).toEqual(["0.300", "12.0", "1e-9", "not finite"]);
});

it("units are said", () => {
  expect(withUnit(0.0652, "s")).toBe("65.2 ms");
  expect(withUnit(2, "s")).toBe("2 s");
  expect(withUnit(0.0143, "share")).toBe("1.43%");
  expect(withUnit(1.5e9, "bytes")).toBe("1.5 GB");
  expect(withUnit(0, "bytes")).toBe("0 B");
  expect(withUnit(3, "count")).toBe("3");
  expect(withUnit(12000, "tokens/s")).toBe("12,000 tokens/s");
  expect(withUnit(NaN, "s")).toBe("not finite");
});

it("words", () => {
  expect([plural(1, "step"), plural(1200, "step")]).toEqual(["1 step", "1,200 steps"]);
  expect([2, 120, 7200, 2e5].map(ago)).toEqual(["2 s ago", "2 min ago", "2 h ago", "2 days ago"]);
  expect(fileName("Loss", "runs/a b:<c>")).toBe("Loss-runs-a-b-c");
});
