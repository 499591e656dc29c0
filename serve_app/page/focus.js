// Where the focus of the keyboard goes.

const SEEN = { visibilityProperty: true };

// If `change` removes or hides the element that has the focus of the keyboard, the button of the same name in
// the message at its place gets it, otherwise `field`.
export function keepFocus(messages, field, change) {
  const before = document.activeElement;
  const byKey = before.matches(":focus-visible");
  const place = [...messages.children].indexOf(before.closest("article"));
  change();
  if (!byKey || before.checkVisibility(SEEN)) return;
  const name = (button) => button.ariaLabel ?? button.textContent;
  const buttons = [...(messages.children[place]?.querySelectorAll("button:enabled") ?? [])];
  const same = buttons.find((each) => name(each) === name(before) && each.checkVisibility(SEEN));
  (same ?? field).focus();
}
