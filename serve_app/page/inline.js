// Inline elements of Markdown: code, emphasis, links, line breaks. Remote images are shown as links.

import { element } from "./dom.js";

const MOST_DEPTH = 16; // nesting of links and of emphasis
const WINDOW = 2000; // characters in which the end of code or of an address is searched
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const WORD = /[\p{L}\p{N}_]/u;

// Appends `text` to `parent`, in linear time. Returns `parent`.
export function inline(parent, text) {
  new Inline(parent, text, false).show();
  return parent;
}

class Inline {
  #parent;
  #text;
  #linked; // within a link there are no other ones
  #brackets; // place of the end by place of the start, of [] and ()
  #runs = []; // of characters that begin or end emphasis

  constructor(parent, text, linked) {
    this.#parent = parent;
    this.#text = text;
    this.#linked = linked;
    this.#brackets = text.includes("](") ? pairs(text) : new Map();
  }

  show() {
    const text = this.#text;
    let plain = 0;
    for (let at = 0; at < text.length; ) {
      const found = this.#find(at);
      if (!found) {
        at++;
        continue;
      }
      this.#parent.append(text.slice(plain, at));
      const [node, end] = found;
      this.#parent.append(node);
      plain = at = end;
    }
    this.#parent.append(text.slice(plain));
    emphasize(this.#runs);
  }

  // The node that begins at a place, and the place after it; nothing if the character is only text.
  #find(at) {
    const text = this.#text;
    switch (text[at]) {
      case "\\":
        return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? [text[at + 1], at + 2] : null;
      case "`":
        return code(text, at);
      case "*":
      case "_":
      case "~":
        return this.#run(at);
      case "!":
        return text[at + 1] === "[" ? this.#image(at) : null;
      case "[":
        return this.#linked ? null : this.#link(at);
      case "<":
        return this.#address(at, /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/);
      case "h":
        return WORD.test(text[at - 1] ?? "") ? null : this.#address(at, /^(https?:\/\/[^\s<>]*[\w/#=&-])/);
      case "\n":
        return [element("br"), at + 1];
      default:
        return null;
    }
  }

  // Spaces alone decide where `*` may begin or end: CommonMark's rules for punctuation leave bold text of
  // languages without spaces as it is written. Within words, `_` does neither.
  #run(at) {
    const mark = this.#text[at];
    let end = at;
    while (this.#text[end] === mark) end++;
    const node = document.createTextNode(this.#text.slice(at, end));
    const before = this.#text[at - 1] ?? " ";
    const after = this.#text[end] ?? " ";
    const opens = /\S/.test(after) && !(mark === "_" && WORD.test(before));
    const closes = /\S/.test(before) && !(mark === "_" && WORD.test(after));
    const count = end - at;
    if (mark === "~" ? count === 2 : count <= 3) this.#runs.push({ mark, node, opens, closes, count, rest: count });
    return [node, end];
  }

  #link(at) {
    const found = this.#target(at);
    const node = found && anchor(found.target);
    if (!node) return null;
    if (found.label) new Inline(node, found.label, true).show();
    else node.textContent = node.href;
    return [node, found.end];
  }

  #image(at) {
    if (!this.#linked) return this.#link(at + 1);
    const found = this.#target(at + 1);
    return found && [found.label, found.end];
  }

  // Label and target of a link whose label begins at a place.
  #target(at) {
    const middle = this.#brackets.get(at);
    const end = this.#text[middle + 1] === "(" && this.#brackets.get(middle + 1);
    if (!end || end - middle > WINDOW) return null;
    const [target] = this.#text.slice(middle + 2, end).trim().split(/\s/, 1);
    return { label: this.#text.slice(at + 1, middle), target, end: end + 1 };
  }

  #address(at, pattern) {
    const found = this.#linked ? null : pattern.exec(this.#text.slice(at, at + WINDOW));
    const node = found && anchor(found[1]);
    if (!node) return null;
    node.textContent = found[1];
    return [node, at + found[0].length];
  }
}

function code(text, at) {
  const mark = /^`+/.exec(text.slice(at, at + WINDOW))[0];
  const begin = at + mark.length;
  const length = text.slice(begin, begin + WINDOW).indexOf(mark);
  if (length < 0) return null;
  return [element("code", text.slice(begin, begin + length).replaceAll("\n", " ")), begin + length + mark.length];
}

function anchor(target) {
  if (!URL.canParse(target) || !SCHEMES.has(new URL(target).protocol)) return null;
  const node = element("a");
  node.href = target;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}

function pairs(text) {
  const found = new Map();
  const open = { "]": [], ")": [] };
  const closing = { "[": "]", "(": ")" };
  for (let at = 0; at < text.length; at++) {
    if (text[at] === "\\") at++;
    else if (closing[text[at]]) open[closing[text[at]]].push(at);
    else if (open[text[at]]?.length) found.set(open[text[at]].pop(), at);
  }
  return found;
}

// Moves what is between matching runs into elements, as CommonMark's "process emphasis" does. Only the last
// openers are kept, which limits nesting and time.
function emphasize(runs) {
  const openers = [];
  for (const run of runs) {
    while (run.closes && run.rest) {
      const at = openers.findLastIndex((opener) => matches(opener, run));
      if (at < 0) break;
      openers.length = at + 1;
      wrap(openers[at], run);
      if (!openers[at].rest) openers.pop();
    }
    if (run.opens && run.rest && openers.push(run) > MOST_DEPTH) openers.shift();
  }
}

function matches(opener, closer) {
  if (opener.mark !== closer.mark) return false;
  const sum = opener.count + closer.count;
  const both = opener.closes || closer.opens;
  return !(both && sum % 3 === 0 && closer.count % 3 !== 0);
}

function wrap(opener, closer) {
  const size = Math.min(opener.rest, closer.rest, 2);
  const node = element(opener.mark === "~" ? "del" : size === 2 ? "strong" : "em");
  while (opener.node.nextSibling !== closer.node) node.append(opener.node.nextSibling);
  opener.node.after(node);
  for (const run of [opener, closer]) {
    run.rest -= size;
    run.node.data = run.mark.repeat(run.rest);
  }
}
