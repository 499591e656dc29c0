// New elements of the pages.

export function element(tag, text = "", name = "") {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  if (name) made.className = name;
  return made;
}

// A button without a frame, which does not submit a form.
export function plainButton(text, action) {
  const made = element("button", text, "plain");
  made.type = "button";
  made.addEventListener("click", action);
  return made;
}
