// A button that copies what `text` returns, and says so.

import { element, plainButton } from "./dom.js";

export function copyButton(text) {
  const button = plainButton("Copy", async () => {
    button.textContent = (await copied(text())) ? "Copied" : "Not copied";
  });
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedBySelection(text); // browsers have no clipboard for pages of http:// on other hosts
  }
}

function copiedBySelection(text) {
  const before = document.activeElement;
  const field = element("textarea", "", "hidden");
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  before?.focus();
  return done;
}
