import { expect, it } from "vitest";
import { depthRows, findSeries, matcher, profileFromMap } from "../src/depth";

it("a filter is a regular expression, or text if it is not a valid one", () => {
  expect(matcher("qkv|out")("blocks.0.QKV.weight")).toBe(true);
  expect(matcher("^mlp")("blocks.0.mlp")).toBe(false);
  expect(matcher("a[")("data[0].a[1]")).toBe(true);
  expect(matcher("")("anything")).toBe(true);
});

it("series are found by metric, layer or label", () => {
  const series = [{ name: "gradient/norm", scopes: ["a.weight", "b.weight"] }, { name: "train/lr", scopes: ["0"] }];
  const find = (text: string) => findSeries(series, text, (name) => (name === "train/lr" ? "Learning rate" : name)).map(({ name, scopes }) => [name, ...scopes]);
  expect(find("^gradient/norm@")).toEqual([["gradient/norm", "a.weight", "b.weight"]]);
  expect(find("gradient.*b\\.")).toEqual([["gradient/norm", "b.weight"]]);
  expect(find("learning")).toEqual([["train/lr", "0"]]);
  expect(find("nothing")).toEqual([]);
});

const overview = {
  layers: [
    { scope: "embed.weight", label: "embed.weight", block: null, shape: [10, 4] },
    { scope: "blocks.0.mlp.weight", label: "mlp.weight", block: "blocks.0", shape: [4, 4] },
    { scope: "blocks.0.mlp.bias", label: "mlp.bias", block: "blocks.0", shape: [4] },
  ],
  blocks: ["blocks.0", "blocks.10"],
};

it("rows are in model order, named within their block, without vectors unless asked", () => {
  const map = { scopes: overview.layers.map((layer) => layer.scope) };
  expect(depthRows(overview, map, "", false).map((row) => row.label)).toEqual(["embed", "blocks.0.mlp"]);
  expect(depthRows(overview, map, "", true).map((row) => row.label)).toEqual(["embed", "mlp", "mlp.bias"]);
  expect(depthRows(overview, map, "bias", false).map((row) => row.index)).toEqual([2]);
});

it("modules find the block that they lie in", () => {
  const rows = depthRows(overview, { scopes: ["blocks.10.mlp", "blocks.10.norm", "blocks.1.mlp", "blocks.0"] }, "", false);
  expect(rows.map((row) => [row.block, row.label])).toEqual([["blocks.10", "mlp"], ["blocks.10", "norm"], [null, "blocks.1.mlp"], [null, "blocks.0"]]);
});

it("a profile has the newest value at a step and what was usual before", () => {
  const first = [1, 2, 3, 4, 5, 60, 7];
  const second = [NaN, NaN, NaN, NaN, 8, NaN, 9];
  const starts = [0, 10, 20, 30, 40, 50, 60];
  const map = { metric: "m", scopes: ["a", "b"], starts, ends: starts, low: 1, high: 9, cells: new Float32Array([...first, ...second]), version: 1 };
  const profile = profileFromMap(map, 55);
  expect(profile.step).toBe(50);
  expect(profile.values).toEqual([60, 8]);
  expect([profile.low[0], profile.high[0]]).toEqual([1.2, 4.8]); // of 1 to 5
  expect(profile.low[1]).toBeNaN();
});
