import { defineConfig } from "vitest/config";

// Fixed names: the server and the report look for exactly these files.
export default defineConfig({
  base: "./",
  build: {
    outDir: "../src/forewarn/views/page/built",
    emptyOutDir: true,
    modulePreload: false,
    rollupOptions: { output: { entryFileNames: "page.js", assetFileNames: "page.[ext]", codeSplitting: false } },
  },
  test: { include: ["tests/**/*.test.ts"] },
});
