// Notes in Markdown as elements. What is not known of it stays text, so that nothing of a note is markup.

import { h } from "./dom.js";

const INLINE =
  /`([^`]+)`|\*\*(.+?)\*\*|\*(\S(?:.*?\S)?)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)|(https?:\/\/[^\s<>)]*[\w/])/;

/** Emphasis, code and links of a line. */
function inline(text) {
  const found = INLINE.exec(text);
  if (!found) return [text];
  const [whole, code, strong, emphasis, title, address, bare] = found;
  const link = (href, ...words) => h("a", { href, rel: "noopener noreferrer", target: "_blank" }, words);
  const node = code
    ? h("code", {}, code)
    : strong
      ? h("strong", {}, inline(strong))
      : emphasis
        ? h("em", {}, inline(emphasis))
        : title
          ? link(address, inline(title))
          : link(bare, bare);
  return [text.slice(0, found.index), node, ...inline(text.slice(found.index + whole.length))];
}

const BULLET = /^\s*[-*+]\s+/,
  NUMBER = /^\s*\d+[.)]\s+/;

/** Headings, lists, code and paragraphs of a text, as an array of elements. */
export function markdown(text) {
  const blocks = [];
  const parts = text.replace(/\r/g, "").split(/^```.*$/m);
  parts.forEach((part, place) => {
    if (place % 2) return blocks.push(h("pre", { class: "code" }, part.replace(/^\n|\n$/g, "")));
    for (const block of part.split(/\n\s*\n/).filter(one => one.trim())) {
      const lines = block.split("\n").filter(line => line.trim());
      const mark = [BULLET, NUMBER].find(one => lines.every(line => one.test(line)));
      const heading = /^#{1,6}\s+(.*)$/.exec(lines[0]);
      if (mark) {
        const items = lines.map(line => h("li", {}, inline(line.replace(mark, ""))));
        blocks.push(h(mark === BULLET ? "ul" : "ol", {}, items));
        continue;
      }
      if (heading) blocks.push(h("p", { class: "strong" }, inline(heading[1])));
      const rest = heading ? lines.slice(1) : lines;
      if (rest.length)
        blocks.push(
          h(
            "p",
            {},
            rest.map((line, number) => [number ? h("br") : null, inline(line)]),
          ),
        );
    }
    return null;
  });
  return blocks;
}
