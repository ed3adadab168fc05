import { describe, expect, it } from "vitest";
import { linesOf } from "../src/data";
import { decode, fromBase64 } from "../src/packed";

/** Packs as the contract says, byte by byte, independent of the decoder. */
function pack(header: object, arrays: (Float32Array | Uint32Array)[]): ArrayBuffer {
  const text = new TextEncoder().encode(JSON.stringify(header));
  const padded = Math.ceil(text.length / 4) * 4;
  const bytes = new Uint8Array(4 + padded + arrays.reduce((sum, array) => sum + array.byteLength, 0)).fill(32);
  new DataView(bytes.buffer).setUint32(0, padded, true);
  bytes.set(text, 4);
  let offset = 4 + padded;
  for (const array of arrays) {
    bytes.set(new Uint8Array(array.buffer), offset);
    offset += array.byteLength;
  }
  return bytes.buffer;
}

describe("packed answers", () => {
  const values = new Float32Array([0.5, NaN, Infinity]);
  const steps = new Uint32Array([0, 7, 4_000_000_000]);

  it("reads names of any length and alphabet before the arrays", () => {
    for (const name of ["a", "ab", "abc", "abcd", "höhe·层"]) {
      const arrays = [
        { name: "steps:0", type: "uint32", length: 3 },
        { name: "values:0", type: "float32", length: 3 },
      ];
      const series = [{ name, scope: "<img src=x>", reduced: false }];
      const [line] = linesOf(decode(pack({ arrays, series }, [steps, values])));
      expect(line!.name).toBe(name);
      expect(line!.scope).toBe("<img src=x>");
      expect(line!.steps).toEqual([0, 7, 4_000_000_000]);
      expect(line!.values).toEqual([0.5, NaN, Infinity]);
    }
  });

  it("reads base64 as a report carries it", () => {
    const bytes = new Uint8Array(pack({ arrays: [{ name: "values", type: "float32", length: 3 }] }, [values]));
    const text = btoa(String.fromCharCode(...bytes));
    expect(Array.from(decode(fromBase64(text)).arrays.values!)).toEqual([0.5, NaN, Infinity]);
  });
});
