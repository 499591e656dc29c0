// Chats in the browser's IndexedDB, which all tabs share; in memory where the browser offers none.

import { newId } from "./conversation.js";

const NAME = "caravan";
const memory = new Map();
const tabs = channel();

function channel() {
  try {
    return new BroadcastChannel(NAME);
  } catch {
    return null; // browsers that block site data have none
  }
}

function opened() {
  return new Promise((resolve) => {
    let request;
    try {
      request = indexedDB.open(NAME, 1);
    } catch {
      resolve(null);
      return;
    }
    request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null);
  });
}

const database = opened();

// The result of the request that `action` makes.
async function within(mode, action) {
  const open = await database;
  return new Promise((resolve, reject) => {
    const transaction = open.transaction("chats", mode);
    const request = action(transaction.objectStore("chats"));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(request.error ?? transaction.error);
  });
}

// Newest first. Browsers keep large values in files of their own and can lose one, so each chat is read
// alone; one that cannot be read has `unreadable` and no messages.
export async function allChats() {
  if (!(await database)) return [];
  const ids = await within("readonly", (chats) => chats.getAllKeys());
  const found = await Promise.all(ids.map((id) => readChat(id).catch(() => unreadable(id))));
  return found.filter(Boolean).sort((a, b) => b.changed - a.changed);
}

function unreadable(id) {
  return { id, title: "(a chat that cannot be read)", changed: 0, unreadable: true };
}

// Undefined if there is no such chat.
export async function readChat(id) {
  if (!(await database)) return memory.get(id);
  return within("readonly", (chats) => chats.get(id));
}

// Stores `chat`. If another tab has stored it since it was read, both versions are kept: this one gets an id
// of its own, and the id of the other is returned, otherwise null. An error if another tab has deleted it.
export async function saveChat(chat) {
  if (!(await database)) {
    memory.set(chat.id, chat);
    return null;
  }
  const { id, title, revision } = chat;
  try {
    await within("readwrite", (chats) => {
      const request = chats.get(id);
      request.onsuccess = () => put(chats, chat, request.result);
      return request;
    });
  } catch (error) {
    Object.assign(chat, { id, title, revision });
    throw error ?? new Error("another tab has deleted it"); // then `put` has aborted
  }
  tabs?.postMessage(chat.id);
  return chat.id === id ? null : id;
}

// `revision` differs each time that a chat is stored.
function put(chats, chat, stored) {
  if (!stored && chat.revision) {
    chats.transaction.abort();
    return;
  }
  if (stored && stored.revision !== chat.revision) {
    chat.id = newId();
    chat.title += " (copy)";
  }
  chat.revision = newId();
  chats.put(chat);
}

export async function deleteChat(id) {
  if (!(await database)) {
    memory.delete(id);
    return;
  }
  await within("readwrite", (chats) => chats.delete(id));
  tabs?.postMessage(id);
}

// `changed`: called with the id of each chat that another tab has stored or deleted.
export function watchChats(changed) {
  if (tabs) tabs.onmessage = ({ data }) => changed(data);
}
