// The browser's two storages of strings. Where it blocks site data, values live as long as the page.

class Memory {
  #values = new Map();
  getItem = (key) => this.#values.get(key) ?? null;
  setItem = (key, value) => this.#values.set(key, value);
  removeItem = (key) => this.#values.delete(key);
}

function storage(name) {
  try {
    return window[name] ?? new Memory();
  } catch {
    return new Memory();
  }
}

export const local = storage("localStorage");
export const session = storage("sessionStorage");
