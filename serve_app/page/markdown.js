// Markdown to DOM nodes. Text reaches the page through text nodes only, so it cannot add elements;
// HTML in the source is shown as it is written. Remote images are shown as links.

import { codeNode } from "./code.js";
import { element } from "./dom.js";

// The time of each pattern grows with the length of a line, at most with its square.
const FENCE = /^ {0,3}(`{3,}|~{3,})(?=[^`]*$)\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})\s/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+|$)/;
const TABLE_RULE = /^\s*(?:\|\s*)?:?-+:?\s*(?:\|\s*:?-+:?\s*)*(?:\|\s*)?$/;
const MOST_DEPTH = 16; // nesting of lists and quotes
const WINDOW = 2000; // characters in which the end of an inline element is searched
const SCHEMES = new Set(["http:", "https:", "mailto:"]);

// Shows `source` in `parent`. Blocks that have not changed keep their nodes, so appending to a text
// costs as much as rendering its last block.
export function renderMarkdown(parent, source) {
  const shown = parent.markdownBlocks ?? [];
  const blocks = splitBlocks(source.replaceAll("\r\n", "\n").split("\n"));
  let equal = 0;
  while (equal < shown.length && equal < blocks.length && shown[equal] === key(blocks[equal])) {
    equal++;
  }
  while (parent.childNodes.length > equal) parent.lastChild.remove();
  for (const block of blocks.slice(equal)) parent.append(blockNode(block, 0));
  parent.markdownBlocks = blocks.map(key);
}

function key(block) {
  return `${block.type}\n${block.lines.join("\n")}`;
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
  if (line.includes("|") && at + 1 < lines.length && TABLE_RULE.test(lines[at + 1])) return "table";
  return "paragraph";
}

const ENDS = {
  heading: (lines, at) => at + 1,
  rule: (lines, at) => at + 1,
  fence(lines, at) {
    const mark = FENCE.exec(lines[at])[1];
    for (let end = at + 1; end < lines.length; end++) {
      const line = lines[end].trim();
      if (line.length >= mark.length && line === mark[0].repeat(line.length)) return end + 1;
    }
    return lines.length; // not closed yet
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
      if (!lines[end - 1].trim() || typeAt(lines, end) !== "paragraph") break;
    }
    while (!lines[end - 1].trim()) end--;
    return end;
  },
  table(lines, at) {
    let end = at + 2;
    while (end < lines.length && lines[end].includes("|") && lines[end].trim()) end++;
    return end;
  },
  paragraph(lines, at) {
    let end = at + 1;
    while (end < lines.length && lines[end].trim() && typeAt(lines, end) === "paragraph") end++;
    return end;
  },
};

function blockNode({ type, lines }, depth) {
  return NODES[depth < MOST_DEPTH ? type : "paragraph"](lines, depth);
}

const NODES = {
  paragraph: (lines) => inline(element("p"), lines.map((line) => line.trimStart()).join("\n")),
  rule: () => element("hr"),
  heading(lines) {
    const [start, marks] = HEADING.exec(lines[0]);
    const text = lines[0].slice(start.length).trim().replace(/(?:^|\s)#+$/, "").trimEnd();
    // The page has one h1; those of an answer begin below its messages' headings.
    return inline(element(`h${Math.min(6, marks.length + 2)}`), text);
  },
  fence(lines) {
    const [, mark, language] = FENCE.exec(lines[0]);
    const last = lines.at(-1).trim();
    const closed = lines.length > 1 && last.startsWith(mark) && !last.replaceAll(mark[0], "");
    return codeNode(lines.slice(1, closed ? -1 : undefined).join("\n"), language);
  },
  quote: (lines, depth) =>
    nested(element("blockquote"), lines.map((line) => line.replace(QUOTE, "")), depth),
  list(lines, depth) {
    const [, lead, mark] = ITEM.exec(lines[0]);
    const ordered = /\d/.test(mark);
    const list = element(ordered ? "ol" : "ul");
    if (ordered && parseInt(mark) !== 1) list.start = parseInt(mark);
    for (const item of listItems(lines, lead.length)) list.append(itemNode(item, depth));
    return list;
  },
  table(lines) {
    const aligned = cells(lines[1]).map((cell) =>
      cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left",
    );
    const table = element("table");
    table.createTHead().append(rowNode(lines[0], "th", aligned));
    const body = table.createTBody();
    for (const line of lines.slice(2)) body.append(rowNode(line, "td", aligned));
    const frame = element("div", "", "table");
    frame.append(table);
    return frame;
  },
};

function nested(parent, lines, depth) {
  const blocks = splitBlocks(lines);
  // A list item of one paragraph needs no paragraph element.
  if (parent.tagName === "LI" && blocks.length && blocks[0].type === "paragraph") {
    inline(parent, blocks.shift().lines.map((line) => line.trimStart()).join("\n"));
  }
  for (const block of blocks) parent.append(blockNode(block, depth + 1));
  return parent;
}

function listItems(lines, indent) {
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent + 1) {
      items.push({ width: found[0].length, lines: [line.slice(found[0].length)] });
    } else {
      const item = items.at(-1);
      const blank = line.search(/\S/);
      item.lines.push(line.slice(Math.min(blank < 0 ? 0 : blank, item.width)));
    }
  }
  return items;
}

function itemNode(item, depth) {
  const node = element("li");
  const task = /^\[([ xX])\]\s+/.exec(item.lines[0]);
  if (task) {
    const box = element("input");
    box.type = "checkbox";
    box.disabled = true;
    box.checked = task[1] !== " ";
    box.setAttribute("aria-label", box.checked ? "done" : "open");
    node.append(box, " ");
    item.lines[0] = item.lines[0].slice(task[0].length);
  }
  return nested(node, item.lines, depth);
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
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

// Inline elements by their first character: a function of the text and a place, which returns the node
// and the place after it, or nothing.
const INLINE = {
  "\\": (text, at) => (/[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? [text[at + 1], at + 2] : null),
  "`"(text, at) {
    const mark = /^`+/.exec(text.slice(at, at + WINDOW))[0];
    const end = find(text, mark, at + mark.length);
    if (end < 0) return null;
    const code = element("code");
    code.textContent = text.slice(at + mark.length, end).replaceAll("\n", " ");
    return [code, end + mark.length];
  },
  "*": (text, at) => emphasis(text, at),
  _: (text, at) => (/\w/.test(text[at - 1] ?? "") ? null : emphasis(text, at)),
  "~": (text, at) => (text[at + 1] === "~" ? marked(text, at, "~~", "del") : null),
  "!": (text, at) => (text[at + 1] === "[" ? link(text, at + 1) : null),
  "[": (text, at) => link(text, at),
  "<": (text, at) => address(text, at, /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/),
  h: (text, at) =>
    /\w/.test(text[at - 1] ?? "") ? null : address(text, at, /^(https?:\/\/[^\s<>]*[\w/#=&-])/),
  "\n": (text, at) => [element("br"), at + 1],
};

function inline(parent, text, depth = 0) {
  let plain = 0;
  for (let at = 0; at < text.length; ) {
    const found = depth < MOST_DEPTH && INLINE[text[at]]?.(text, at, depth);
    if (!found) {
      at++;
      continue;
    }
    parent.append(text.slice(plain, at));
    const [node, end] = found;
    if (node.pending) inline(node, node.pending, depth + 1);
    parent.append(node);
    plain = at = end;
  }
  parent.append(text.slice(plain));
  return parent;
}

function emphasis(text, at) {
  const mark = text[at];
  return text[at + 1] === mark ? marked(text, at, mark + mark, "strong") : marked(text, at, mark, "em");
}

function marked(text, at, mark, tag) {
  const begin = at + mark.length;
  if (!text[begin] || /\s/.test(text[begin])) return null;
  let end = begin;
  do {
    end = find(text, mark, end + 1);
    if (end < 0) return null;
  } while (/\s/.test(text[end - 1]) || (mark.length === 1 && text[end + 1] === mark));
  const node = element(tag);
  node.pending = text.slice(begin, end);
  return [node, end + mark.length];
}

function link(text, at) {
  const middle = find(text, "](", at);
  const end = middle < 0 ? -1 : find(text, ")", middle);
  if (end < 0) return null;
  const node = anchor(text.slice(middle + 2, end).trim().split(/\s/)[0]);
  if (!node) return null;
  node.pending = text.slice(at + 1, middle) || node.href;
  return [node, end + 1];
}

function address(text, at, pattern) {
  const found = pattern.exec(text.slice(at, at + WINDOW));
  const node = found && anchor(found[1]);
  if (!node) return null;
  node.textContent = found[1];
  return [node, at + found[0].length];
}

function anchor(target) {
  if (!URL.canParse(target) || !SCHEMES.has(new URL(target).protocol)) return null;
  const node = element("a");
  node.href = target;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}

function find(text, mark, from) {
  const end = text.slice(from, from + WINDOW).indexOf(mark);
  return end < 0 ? -1 : from + end;
}
