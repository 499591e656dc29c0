// Code in texts, and blocks of code with a title and a button that copies them.

import { copyButton } from "./clipboard.js";
import { element } from "./dom.js";
import { Highlighter } from "./highlight.js";

// Parts between backticks become code.
export function withCode(text) {
  return text.split("`").map((part, index) => (index % 2 ? element("code", part) : part));
}

export class CodeBlock {
  text = "";
  #shown;

  constructor(text, language, title = language || "text") {
    this.node = element("figure", "", "code");
    this.node.ariaLabel = title; // otherwise its name has that of the button
    const head = element("figcaption");
    head.append(element("span", title), copyButton(() => this.text));
    const code = element("code");
    const pre = element("pre");
    pre.tabIndex = 0; // can be scrolled with the keyboard
    pre.append(code);
    this.node.append(head, pre);
    this.#shown = new Highlighter(code, language);
    this.append(text);
  }

  append(more) {
    this.text += more;
    this.#shown.append(more);
  }
}
