import { describe, expect, it } from "vitest";
import { centredMedian, type Colour, faultWindow, heat, indexAt, moved, padded, quantile, ramp, reduce, shifted, stacked, stepTicks, ticks, timed, timeTicks, timeUnit, valueAt, within } from "../src/scale";

describe("reading a series", () => {
  const points = { steps: [0, 10, 20], values: [1, NaN, 3] };
  it("takes the newest reading at or before a step", () => {
    expect([-1, 0, 9, 10, 25].map((step) => indexAt(points.steps, step))).toEqual([-1, 0, 0, 1, 2]);
    expect(valueAt(points, 9)).toBe(1);
    expect(valueAt(points, 15)).toBeNaN();
    expect(valueAt({ ...points, scope: "layer" }, 15)).toBe(1);
    expect(valueAt({ steps: [0], values: [NaN], scope: "layer" }, 15)).toBeUndefined();
    expect(valueAt(points, -1)).toBeUndefined();
    expect(valueAt(undefined, 3)).toBeUndefined();
  });
});

describe("a stack of lines", () => {
  it("adds them up at the steps of all of them, and keeps each level between its readings", () => {
    const [low, high] = stacked([
      { steps: [0, 10], values: [1, 2] },
      { steps: [5, 10, 15], values: [10, NaN, 30] },
    ]);
    expect(low).toEqual({ steps: [0, 5, 10, 15], values: [1, 1, 2, 2] });
    expect(high!.values).toEqual([1, 11, 2, 32]);
  });
});

describe("medians and quantiles", () => {
  it("are those of the sorted values, without what is not finite", () => {
    const values = Array.from({ length: 300 }, (_, index) => (index % 17 === 3 ? NaN : index % 29 === 5 ? Infinity : Math.sin(index * index) + (index % 7)));
    const plain = values.map((_, index) => {
      const sorted = values.slice(Math.max(0, index - 16), index + 16).filter(Number.isFinite).sort((a, b) => a - b);
      return (sorted[Math.floor((sorted.length - 1) / 2)]! + sorted[Math.ceil((sorted.length - 1) / 2)]!) / 2;
    });
    expect(centredMedian(values, 32)).toEqual(plain);
    expect(centredMedian([NaN, NaN], 8)).toEqual([NaN, NaN]);
    expect(quantile([1, 2, 3, 4, 5], 0.25)).toBe(2);
    expect(quantile([0, 10], 0.05)).toBeCloseTo(0.5);
  });
  it("a spike of one step does not move the centred median, and a jump moves it at once", () => {
    const spike = Array.from({ length: 40 }, (_, index) => (index === 20 ? 100 : 1));
    expect(new Set(centredMedian(spike, 16))).toEqual(new Set([1]));
    const jump = Array.from({ length: 40 }, (_, index) => (index < 20 ? 1 : 5));
    const smooth = centredMedian(jump, 16);
    expect([smooth[18], smooth[22]]).toEqual([1, 5]);
  });
});

describe("reduction", () => {
  it("keeps a spike of one step, every value that is not finite, the order and the newest reading", () => {
    const steps = Array.from({ length: 10_000 }, (_, index) => index);
    const values = steps.map((step) => Math.sin(step / 50));
    values[7777] = 99;
    values[1234] = NaN;
    values[4321] = -Infinity;
    const kept = reduce({ steps, values }, 100);
    expect(kept.steps.length).toBeLessThanOrEqual(203);
    expect(kept.values[kept.steps.indexOf(7777)]).toBe(99);
    expect(kept.values[kept.steps.indexOf(1234)]).toBeNaN();
    expect(kept.values[kept.steps.indexOf(4321)]).toBe(-Infinity);
    expect(kept.steps.at(-1)).toBe(9999);
    expect(kept.steps).toEqual([...kept.steps].sort((a, b) => a - b));
    kept.steps.forEach((step, index) => expect(kept.values[index]).toBe(values[step]));
  });
  it("of a window leaves the points around it, so that lines reach its edges", () => {
    const points = { steps: [0, 10, 20, 30, 40], values: [0, 1, 2, 3, 4] };
    expect(within(points, [15, 25]).steps).toEqual([10, 20, 30]);
    expect(within(points, [20, 20]).steps).toEqual([10, 20, 30]);
    expect(within(points, [50, 60]).steps).toEqual([40]);
    expect(within(points, [0, 40])).toBe(points);
  });
  it("leaves a short series as it is", () => {
    const points = { steps: [1, 2], values: [3, 4] };
    expect(reduce(points, 1)).toBe(points);
  });
});

describe("axes", () => {
  it("ticks are round numbers inside the range", () => {
    expect(ticks(0, 10, 5)).toEqual([0, 2, 4, 6, 8, 10]);
    expect(ticks(2.3, 4.1, 4)).toEqual([2.5, 3, 3.5, 4]);
    expect(ticks(0.004, 0.6, 5, true)).toEqual([0.01, 0.03, 0.1, 0.3]);
    expect(ticks(1e-8, 10, 5, true)).toEqual([1e-8, 1e-6, 1e-4, 0.01, 1]);
    expect(ticks(0.5, 0.9, 4, true)).toEqual([0.5, 0.6, 0.7, 0.8, 0.9]);
  });
  it("steps are whole, and the last label is not cut off", () => {
    expect(stepTicks(0, 399, 160)).toEqual([0, 200]);
    expect(stepTicks(50_000, 50_200, 400)).toEqual([50_000, 50_050, 50_100, 50_150]);
    expect(stepTicks(0, 3, 800)).toEqual([0, 1, 2]);
  });
  it("give none for an empty or endless range", () => {
    expect(ticks(1, 1, 5)).toEqual([]);
    expect(ticks(0, Infinity, 5)).toEqual([]);
  });
  it("leave air around the values, and a constant has room too", () => {
    const [low, high] = padded(2, 4, false);
    expect(low).toBeLessThan(2);
    expect(high).toBeGreaterThan(4);
    expect(padded(0.01, 5, false)[0]).toBe(0);
    expect(padded(3, 3, false)).toEqual([2.7, 3.3]);
    const [bottom, top] = padded(0.01, 1, true);
    expect(bottom).toBeGreaterThan(0);
    expect(top / 1).toBeCloseTo(0.01 / bottom);
  });
});

describe("colours", () => {
  it("lie on a log scale between the ends", () => {
    expect(heat(0.1, 0.01, 1)).toBeCloseTo(0.5);
    expect(heat(5, 0.01, 1)).toBe(1);
    expect(heat(0, 0.01, 1)).toBe(0);
    expect(heat(-1, 0.01, 1)).toBe(0);
    expect(heat(0, -1, 1)).toBe(0.5);
    expect(heat(3, 3, 3)).toBe(0);
  });
  it("run through the stops", () => {
    const stops: Colour[] = [[0, 0, 0], [100, 0, 0], [100, 200, 0]];
    expect(ramp(0, stops)).toEqual([0, 0, 0]);
    expect(ramp(0.25, stops)).toEqual([50, 0, 0]);
    expect(ramp(0.75, stops)).toEqual([100, 100, 0]);
    expect(ramp(2, stops)).toEqual([100, 200, 0]);
  });
});

describe("windows", () => {
  it("open on the fault with 1.5 times its length before it, at least 40 steps", () => {
    expect(faultWindow(181, 221)).toEqual([121, 221]);
    expect(faultWindow(181, 190)).toEqual([141, 190]);
    expect(faultWindow(10, 300)).toEqual([0, 300]);
    expect(faultWindow(50, 50)).toEqual([10, 51]);
  });
  it("move without changing their width", () => {
    expect(shifted([100, 200], 150, 400)).toEqual([100, 200]);
    expect(shifted([100, 200], 300, 400)).toEqual([260, 360]);
    expect(shifted([100, 200], 395, 400)).toEqual([300, 400]);
    expect(shifted([100, 200], 5, 400)).toEqual([0, 100]);
  });
});

describe("time", () => {
  it("ticks are round numbers of a unit that fits", () => {
    const hour = 3_600_000;
    expect(timeUnit(0, 5 * hour).unit).toBe("h");
    expect(timeTicks(0, 5 * hour, 400)).toEqual([0, 1, 2, 3, 4].map((hours) => hours * hour));
    expect(timeUnit(0, 90_000).unit).toBe("s");
    expect(timeTicks(0, 90_000, 400)).toEqual([0, 20_000, 40_000, 60_000, 80_000]);
  });
  it("a step lies straight between those whose time is known", () => {
    const clock = { steps: [0, 10, 20], times: [0, 1000, 4000] };
    expect(timed({ steps: [0, 5, 10, 15, 20, 25], values: [1, 2, 3, 4, 5, 6] }, clock).steps).toEqual([0, 500, 1000, 2500, 4000, 4000]);
  });
});

it("a window moves up to the ends of the run and keeps its width", () => {
  expect(moved([20, 40], 5, 100)).toEqual([25, 45]);
  expect(moved([20, 40], -50, 100)).toEqual([0, 20]);
  expect(moved([20, 40], 500, 100)).toEqual([80, 100]);
});
