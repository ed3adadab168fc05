import js from "@eslint/js";
import typescript from "typescript-eslint";

export default typescript.config(
  { ignores: ["node_modules"] },
  js.configs.recommended,
  ...typescript.configs.strict,
  {
    rules: {
      "@typescript-eslint/no-non-null-assertion": "off", // indices that were just checked
      // Names and messages of runs are text: no markup is ever parsed.
      "no-restricted-properties": ["error", ...["innerHTML", "outerHTML", "insertAdjacentHTML"].map((property) => ({ property }))],
      eqeqeq: ["error", "always", { null: "ignore" }],
    },
  },
);
