// The list of chats beside the messages.

import { element, plainButton } from "./dom.js";

// `actions`: open and forget, called with a chat.
export class ChatList {
  #node;
  #actions;
  #items = new Map(); // by the id of the chat

  constructor(node, actions) {
    this.#node = node;
    this.#actions = actions;
  }

  // Items keep their elements, and so the focus of the keyboard. If the item of the focus is removed, the one
  // that takes its place gets it.
  show(chats, current) {
    const focus = document.activeElement;
    const place = [...this.#node.children].findIndex((item) => item.contains(focus));
    const known = this.#items;
    this.#items = new Map(chats.map((chat) => [chat.id, known.get(chat.id) ?? this.#item()]));
    for (const [id, { node }] of known) if (!this.#items.has(id)) node.remove();
    chats.forEach((chat, at) => {
      const item = this.#items.get(chat.id);
      item.chat = chat;
      item.open.textContent = chat.title;
      item.open.disabled = Boolean(chat.unreadable);
      item.forget.setAttribute("aria-label", `Delete the chat ${chat.title}`);
      item.node.setAttribute("aria-current", String(chat.id === current.id));
      const there = this.#node.children[at] ?? null;
      if (there !== item.node) this.#node.insertBefore(item.node, there);
    });
    if (place < 0 || document.activeElement === focus) return;
    const next = this.#node.children[place] ?? this.#node.lastChild;
    (focus.isConnected ? focus : next?.lastChild)?.focus();
  }

  #item() {
    const item = { node: element("li") };
    item.open = plainButton("", () => this.#actions.open(item.chat));
    item.open.className += " open";
    item.open.dir = "auto";
    item.forget = plainButton("✕", () => this.#actions.forget(item.chat));
    item.node.append(item.open, item.forget);
    return item;
  }
}
