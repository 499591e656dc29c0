// Markdown to DOM nodes. Text reaches the page through text nodes only, so it cannot add elements;
// HTML in the source is shown as it is written.

import { CodeBlock } from "./code.js";
import { element } from "./dom.js";
import { inline } from "./inline.js";

// The time of each pattern grows with the length of a line.
const FENCE = /^ {0,3}(?=(`{3,}|~{3,}))\1(?=[^`]*$)\s*([^\s`]*)/; // the run is matched once
const HEADING = /^ {0,3}(#{1,6})\s/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+|$)/;
const TABLE_RULE = /^\s*(?:\|\s*)?:?-+:?\s*(?:\|\s*:?-+:?\s*)*(?:\|\s*)?$/;
const INDENT = /^(?: {4}| {0,3}\t)/;
const FROM_RIGHT = /[\p{Script=Arabic}\p{Script=Hebrew}\p{Script=Nko}\p{Script=Syriac}\p{Script=Thaana}]/u;
const MOST_DEPTH = 16; // nesting of lists and quotes
const shown = new WeakMap(); // parts by the element that shows them

// Shows `source` in `parent`. Blocks, items, rows and code keep their nodes as far as the source has not
// changed, so appending to a text costs as much as rendering its last paragraph.
export function renderMarkdown(parent, source) {
  const blocks = splitBlocks(source.replaceAll("\r\n", "\n").split("\n"));
  showParts(parent, shown.get(parent), blocks, 0);
  shown.set(parent, blocks);
}

// A part is a block, an item or a row: { type, lines, node, and what its type keeps }. Shows `after` in
// `parent`, which shows `before`.
function showParts(parent, before = [], after, depth) {
  after.forEach((part, at) => {
    const old = before[at];
    if (old && equal(old, part)) {
      Object.assign(part, old);
      return;
    }
    const type = depth < MOST_DEPTH ? part.type : "paragraph";
    part.node = NODES[type](part, old?.type === part.type ? old : undefined, depth);
    if (!old) parent.append(part.node);
    else if (old.node !== part.node) old.node.replaceWith(part.node);
  });
  for (const old of before.slice(after.length)) old.node.remove();
}

function equal(one, other) {
  return (
    one.type === other.type &&
    one.lines.length === other.lines.length &&
    one.lines.every((line, at) => line === other.lines[at])
  );
}

function splitBlocks(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const type = typeAt(lines, at);
    const end = ENDS[type](lines, at);
    blocks.push({ type, lines: lines.slice(at, end) });
    at = end;
  }
  return blocks;
}

function typeAt(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return "fence";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  if (line.includes("|") && ruled(line, lines[at + 1] ?? "")) return "table";
  return INDENT.test(line) ? "indented" : "paragraph";
}

function ruled(line, rule) {
  return TABLE_RULE.test(rule) && cells(line).length === cells(rule).length;
}

// Whether a line continues the paragraph of the line before it.
function continues(lines, at) {
  return ["paragraph", "indented"].includes(typeAt(lines, at));
}

const ENDS = {
  heading: (lines, at) => at + 1,
  rule: (lines, at) => at + 1,
  fence(lines, at) {
    const [, mark] = FENCE.exec(lines[at]);
    for (let end = at + 1; end < lines.length; end++) {
      if (closes(lines[end], mark)) return end + 1;
    }
    return lines.length; // not closed yet
  },
  indented(lines, at) {
    let end = at;
    while (end < lines.length && (!lines[end].trim() || INDENT.test(lines[end]))) end++;
    return withoutBlank(lines, end);
  },
  quote(lines, at) {
    let end = at;
    while (end < lines.length && QUOTE.test(lines[end])) end++;
    return end;
  },
  list(lines, at) {
    const [, lead, mark] = ITEM.exec(lines[at]);
    let end = at + 1;
    for (; end < lines.length; end++) {
      const line = lines[end];
      if (!line.trim() || line.search(/\S/) > lead.length) continue;
      const item = ITEM.exec(line);
      if (item && item[2].at(-1) === mark.at(-1)) continue;
      if (!lines[end - 1].trim() || !continues(lines, end)) break;
    }
    return withoutBlank(lines, end);
  },
  table(lines, at) {
    let end = at + 2;
    while (end < lines.length && lines[end].includes("|") && lines[end].trim()) end++;
    return end;
  },
  paragraph(lines, at) {
    let end = at + 1;
    while (end < lines.length && lines[end].trim() && continues(lines, end)) end++;
    return end;
  },
};

function withoutBlank(lines, end) {
  while (!lines[end - 1].trim()) end--;
  return end;
}

function closes(line, mark) {
  const found = line.trim();
  return found.length >= mark.length && found === mark[0].repeat(found.length);
}

// Functions of a part, an earlier state of it, and the depth, which return the node of the part: that of the
// earlier state if it can be made to show the part.
const NODES = {
  paragraph: ({ lines }) => inline(directed(element("p"), lines), joined(lines)),
  rule: () => element("hr"),
  heading({ lines }) {
    const [start, marks] = HEADING.exec(lines[0]);
    const text = lines[0].slice(start.length).trim().replace(/(?:^|\s)#+$/, "").trimEnd();
    // The page has one h1; those of an answer begin below its messages' headings.
    return inline(directed(element(`h${Math.min(6, marks.length + 2)}`), lines), text);
  },
  fence(part, old) {
    const [, mark, language] = FENCE.exec(part.lines[0]);
    const code = part.lines.slice(1);
    const last = code.at(-1)?.trim();
    // Also what may become the closing line.
    if (code.length && (closes(last, mark) || mark.startsWith(last))) code.pop();
    return codeNode(part, old, code.join("\n"), language);
  },
  indented(part, old) {
    return codeNode(part, old, part.lines.map((line) => line.replace(INDENT, "")).join("\n"), "");
  },
  quote(part, old, depth) {
    const node = directed(old?.node ?? element("blockquote"), part.lines);
    part.parts = splitBlocks(part.lines.map((line) => line.replace(QUOTE, "")));
    showParts(node, old?.parts, part.parts, depth + 1);
    return node;
  },
  list(part, old, depth) {
    const [, lead, mark] = ITEM.exec(part.lines[0]);
    part.start = /\d/.test(mark) ? parseInt(mark) : null;
    const known = old?.start === part.start ? old : undefined;
    const node = known?.node ?? element(part.start === null ? "ul" : "ol");
    if (part.start !== null) node.start = part.start;
    directed(node, part.lines);
    part.parts = listItems(part.lines, lead.length);
    showParts(node, known?.parts, part.parts, depth);
    return node;
  },
  item(part, old, depth) {
    const node = old?.node ?? element("li");
    part.parts = splitBlocks(part.lines);
    // A list item of one paragraph needs no paragraph element.
    if (part.parts[0]?.type === "paragraph") part.parts[0].type = "text";
    showParts(node, old?.parts, part.parts, depth + 1);
    return node;
  },
  text({ lines }) {
    const node = element("span");
    const task = /^\[([ xX])\]\s+/.exec(lines[0]);
    if (task) node.append(checkbox(task[1] !== " "), " ");
    return inline(node, joined(lines).slice(task?.[0].length));
  },
  table(part, old, depth) {
    const [head, rule, ...rows] = part.lines;
    const known = old?.lines[0] === head && old.lines[1] === rule ? old : undefined;
    const aligned = cells(rule).map(alignment);
    const node = directed(known?.node ?? tableNode(head, aligned), part.lines);
    part.parts = rows.map((line) => ({ type: "row", lines: [line], aligned }));
    showParts(node.querySelector("tbody"), known?.parts, part.parts, depth);
    return node;
  },
  row: ({ lines: [line], aligned }) => rowNode(line, "td", aligned),
};

// Gives `node` the direction of the first letter. With dir="auto", the browser would search for it each time
// that something is appended.
function directed(node, lines) {
  const letter = /\p{L}/u.exec(lines.find((line) => /\p{L}/u.test(line)) ?? "")?.[0];
  if (letter) node.dir = FROM_RIGHT.test(letter) ? "rtl" : "ltr";
  return node;
}

function joined(lines) {
  return lines.map((line) => line.trimStart()).join("\n");
}

function codeNode(part, old, text, language) {
  const known = old?.lines[0] === part.lines[0] && text.startsWith(old.code.text) ? old.code : undefined;
  part.code = known ?? new CodeBlock("", language);
  part.code.append(text.slice(part.code.text.length));
  return part.code.node;
}

function listItems(lines, indent) {
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent + 1) {
      items.push({ type: "item", width: found[0].length, lines: [line.slice(found[0].length)] });
    } else {
      const item = items.at(-1);
      const blank = line.search(/\S/);
      item.lines.push(line.slice(Math.min(blank < 0 ? 0 : blank, item.width)));
    }
  }
  return items;
}

function checkbox(checked) {
  const box = element("input");
  box.type = "checkbox";
  box.disabled = true;
  box.checked = checked;
  box.setAttribute("aria-label", checked ? "done" : "open");
  return box;
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
}

function alignment(cell) {
  if (!cell.endsWith(":")) return cell.startsWith(":") ? "left" : "start";
  return cell.startsWith(":") ? "center" : "right";
}

function tableNode(head, aligned) {
  const table = element("table");
  table.createTHead().append(rowNode(head, "th", aligned));
  table.createTBody();
  const frame = element("div", "", "table");
  frame.append(table);
  return frame;
}

function rowNode(line, tag, aligned) {
  const row = element("tr");
  for (const [index, text] of cells(line).slice(0, aligned.length).entries()) {
    const cell = inline(element(tag, "", aligned[index]), text.replaceAll("\\|", "|"));
    if (tag === "th") cell.scope = "col";
    row.append(cell);
  }
  return row;
}
