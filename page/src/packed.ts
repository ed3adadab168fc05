/** The binary answers of the server: a JSON header, then arrays of four-byte numbers, little-endian. */

export interface Packed {
  header: Record<string, unknown>;
  arrays: Record<string, Float32Array | Uint32Array>;
}

export function decode(buffer: ArrayBuffer): Packed {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length))) as Packed["header"];
  const arrays: Packed["arrays"] = {};
  let offset = 4 + length + ((4 - (length % 4)) % 4);
  for (const { name, type, length: items } of header.arrays as { name: string; type: string; length: number }[]) {
    arrays[name] = type === "uint32" ? new Uint32Array(buffer, offset, items) : new Float32Array(buffer, offset, items);
    offset += 4 * items;
  }
  return { header, arrays };
}

export function fromBase64(text: string): ArrayBuffer {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer;
}
