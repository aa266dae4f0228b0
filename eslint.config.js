import js from "@eslint/js";
import globals from "globals";

export default [
  { ignores: ["api/static/vendor/**"] },
  js.configs.recommended,
  {
    languageOptions: { ecmaVersion: 2023, sourceType: "module", globals: globals.browser },
    rules: {
      eqeqeq: "error",
      "no-console": "error",
      "no-var": "error",
      "prefer-const": "error",
      "no-control-regex": "off", // Addresses with control characters are refused.
      "no-unused-vars": ["error", { argsIgnorePattern: "^_" }],
    },
  },
  { files: ["api/vendor.mjs", "tests/web/**"], languageOptions: { globals: globals.node } },
];
