// Parts of all pages: the dark or light theme, the dialog for the API key, and what dialogs have in common.

import { apiKey, setApiKey } from "./server.js";
import { local } from "./site_data.js";

const THEME = "caravan-theme"; // key of localStorage
const root = document.documentElement;
const $ = (id) => document.getElementById(id);
const KEY_DIALOG = `
<dialog id="key" aria-labelledby="key-title">
  <form method="dialog">
    <h2 id="key-title">API key</h2>
    <p id="key-reason"></p>
    <label>Key<input name="key" type="password" autocomplete="off" spellcheck="false"></label>
    <label class="line"><input name="remember" type="checkbox"> Keep it in this browser</label>
    <div class="row end">
      <button type="button" class="plain">Cancel</button>
      <button>Save</button>
    </div>
  </form>
</dialog>`;

// `onKey`: called when the user has changed the key.
export function setUp(onKey) {
  document.body.insertAdjacentHTML("beforeend", KEY_DIALOG);
  root.dataset.theme = local.getItem(THEME) ?? "";
  $("theme").addEventListener("click", changeTheme);
  $("open-key").addEventListener("click", () => askKey("Needed only if the server asks for one."));
  $("key").querySelector("form").addEventListener("submit", (event) => {
    const { key, remember } = event.target.elements;
    setApiKey(key.value.trim(), remember.checked);
    onKey();
  });
  // Enter presses the first button that submits, so those that cancel are of another type.
  for (const button of document.querySelectorAll("dialog [type=button]")) {
    button.addEventListener("click", () => button.closest("dialog").close());
  }
}

export function askKey(reason) {
  if ($("key").open) return; // a key may have been typed
  $("key-reason").textContent = reason;
  $("key").querySelector("form").elements.key.value = apiKey();
  $("key").showModal();
}

function changeTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = root.dataset.theme || (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  local.setItem(THEME, root.dataset.theme);
}
