export * from "preact";
export * from "preact/hooks";
export { html } from "htm/preact";
