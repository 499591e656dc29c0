// What all pages have: dark or light, and the dialog for the API key.

import { apiKey, setApiKey } from "./server.js";

const THEME = "caravan-theme"; // key of localStorage
const root = document.documentElement;
const $ = (id) => document.getElementById(id);

// `onKey`: called when the user has changed the key.
export function setUp(onKey) {
  root.dataset.theme = localStorage.getItem(THEME) ?? "";
  $("theme").addEventListener("click", changeTheme);
  $("open-key").addEventListener("click", () => askKey("Needed only if the server asks for one."));
  $("key").querySelector("form").addEventListener("submit", (event) => {
    if (event.submitter?.value !== "save") return;
    const { key, remember } = event.target.elements;
    setApiKey(key.value.trim(), remember.checked);
    onKey();
  });
}

export function askKey(reason) {
  $("key-reason").textContent = reason;
  $("key").querySelector("form").elements.key.value = apiKey();
  if (!$("key").open) $("key").showModal();
}

function changeTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = root.dataset.theme || (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  localStorage.setItem(THEME, root.dataset.theme);
}
