// Chats in the browser's IndexedDB; in memory where the browser offers none.

const NAME = "caravan";
const memory = new Map();

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

async function within(mode, action) {
  const open = await database;
  return new Promise((resolve, reject) => {
    const transaction = open.transaction("chats", mode);
    const request = action(transaction.objectStore("chats"));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = () => reject(transaction.error);
    transaction.onabort = () => reject(transaction.error);
  });
}

// Newest first.
export async function allChats() {
  const chats = (await database)
    ? await within("readonly", (chats) => chats.getAll())
    : [...memory.values()];
  return chats.sort((a, b) => b.changed - a.changed);
}

export async function saveChat(chat) {
  if (await database) await within("readwrite", (chats) => chats.put(chat));
  else memory.set(chat.id, chat);
}

export async function deleteChat(id) {
  if (await database) await within("readwrite", (chats) => chats.delete(id));
  else memory.delete(id);
}
