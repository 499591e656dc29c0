// DOM nodes of messages.

import { copyButton } from "./clipboard.js";
import { siblings } from "./conversation.js";
import { element, plainButton } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { PictureList, pictureNode } from "./pictures.js";

// `actions`: the functions of the buttons: edit, retry, branch, result. `frozen`: an answer is being generated.
export function messageNode(chat, node, actions, frozen) {
  const article = element("article", "", node.role);
  const authors = { user: "You", tool: `Result of ${node.tool}`, assistant: node.model ?? chat.model };
  article.append(element("h2", authors[node.role]));
  const body = element("div", "", "body");
  article.append(body);
  if (node.role === "assistant") {
    updateAnswer(article, node);
    if (!frozen) body.append(...callForms(chat, node, actions));
  } else {
    if (node.images?.length) {
      const pictures = element("div", "", "pictures");
      pictures.append(...node.images.map(pictureNode));
      body.append(pictures);
    }
    body.append(autoDirected(element("div", node.content, "text")));
  }
  article.append(toolbar(chat, node, actions, article)); // invisible while an answer is generated
  return article;
}

// Completes the message of an answer that has ended. What the user opened or selected in it stays so.
export function endAnswer(article, chat, node, actions) {
  updateAnswer(article, node);
  article.querySelector(".body").append(...callForms(chat, node, actions));
  article.querySelector(":scope > .tools").replaceWith(toolbar(chat, node, actions, article));
}

// Shows the part of an answer that has arrived.
export function updateAnswer(article, node) {
  const body = article.querySelector(".body");
  article.classList.toggle("waiting", !node.content && !node.calls);
  if (node.thinking) {
    const details = part(body, "details", "thoughts");
    if (!details.firstChild) {
      details.append(element("summary", "Thinking"), element("div", "", "thinking"));
    }
    const more = node.thinking.slice(details.lastChild.textContent.length);
    if (more) details.lastChild.append(more);
  }
  renderMarkdown(part(body, "div", "markdown"), node.content);
  const calls = part(body, "div", "calls");
  for (const call of (node.calls ?? []).slice(calls.childElementCount)) {
    const shown = element("div", "", "call");
    const code = element("pre");
    code.tabIndex = 0;
    code.textContent = JSON.stringify(call.function.arguments, null, 2);
    shown.append(element("strong", `Calls ${call.function.name}`), code);
    calls.append(shown);
  }
}

function part(body, tag, name) {
  let found = body.querySelector(`:scope > .${name}`);
  if (!found) {
    found = element(tag, "", name);
    const later = { thoughts: ".markdown", markdown: ".calls" }[name];
    body.insertBefore(found, later ? body.querySelector(`:scope > ${later}`) : null);
  }
  return found;
}

// A form for the result of each call that has none yet.
function callForms(chat, node, actions) {
  if (chat.leaf !== node.id && chat.nodes[chat.leaf]?.role !== "tool") return [];
  let given = 0;
  for (let at = chat.nodes[chat.leaf]; at && at !== node; at = chat.nodes[at.parent]) given++;
  return (node.calls ?? []).slice(given, given + 1).map((call) => {
    const form = element("form");
    const label = element("label", `Result of ${call.function.name}`);
    const field = autoDirected(element("textarea"));
    field.rows = 2;
    field.placeholder = "what the function returned";
    label.append(field);
    form.append(label, submit("Send the result"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      actions.result(node, call.function.name, field.value);
    });
    return form;
  });
}

function toolbar(chat, node, actions, article) {
  const bar = element("div", "", "tools");
  const all = siblings(chat, node);
  if (all.length > 1) {
    const at = all.indexOf(node);
    const turn = (text, label, to) => {
      const button = plainButton(text, () => actions.branch(all[to]));
      button.setAttribute("aria-label", label);
      button.disabled = !all[to];
      return button;
    };
    bar.append(
      turn("‹", "Previous version", at - 1),
      element("span", `${at + 1} / ${all.length}`),
      turn("›", "Next version", at + 1),
    );
  }
  if (node.role === "assistant") {
    bar.append(
      plainButton("Retry", () => actions.retry(node)),
      copyButton(() => node.content),
      element("span", statistics(node)),
    );
  } else bar.append(plainButton("Edit", () => edit(article, node, actions)));
  return bar;
}

function statistics({ statistics: made, stopped }) {
  if (!made) return stopped ? "stopped" : "";
  const speed = made.seconds > 0 ? `, ${(made.tokens / made.seconds).toFixed(1)} tokens/s` : "";
  const cut = made.reason === "length" ? ", cut at the limit" : "";
  return `${made.tokens ?? 0} tokens${speed}${cut}`;
}

function edit(article, node, actions) {
  const focused = document.activeElement;
  const form = element("form");
  const field = autoDirected(element("textarea"));
  field.value = node.content;
  field.rows = Math.min(12, node.content.split("\n").length + 1);
  field.setAttribute("aria-label", "Edit the message");
  const pictures = new PictureList(element("ul", "", "attached"), field);
  pictures.node.setAttribute("aria-label", "Pictures of the message");
  pictures.show(node.images ?? []);
  const row = element("div", "", "row end");
  const cancel = plainButton("Cancel", () => {
    form.replaceWith(...hidden);
    focused.focus();
  });
  row.append(cancel, submit("Send"));
  form.append(pictures.node, field, row);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    actions.edit(node, field.value, pictures.images);
  });
  const hidden = [...article.querySelectorAll(".body, .tools")];
  hidden[0].before(form);
  for (const part of hidden) part.remove();
  field.focus();
}

// Its text is shown in the direction of the first letter.
function autoDirected(node) {
  node.dir = "auto";
  return node;
}

function submit(text) {
  const button = element("button", text);
  button.type = "submit";
  return button;
}
