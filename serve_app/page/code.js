// Code in texts, and blocks of code with a title and a button that copies them.

import { copyButton } from "./clipboard.js";
import { element } from "./dom.js";
import { highlight } from "./highlight.js";

// Parts between backticks become code.
export function withCode(text) {
  return text.split("`").map((part, index) => (index % 2 ? element("code", part) : part));
}

export function codeNode(text, language, title = language || "text") {
  const frame = element("figure", "", "code");
  frame.ariaLabel = title; // otherwise its name has that of the button
  const head = element("figcaption");
  head.append(element("span", title), copyButton(text));
  const code = element("code");
  highlight(code, text, language);
  const pre = element("pre");
  pre.tabIndex = 0; // can be scrolled with the keyboard
  pre.append(code);
  frame.append(head, pre);
  return frame;
}
