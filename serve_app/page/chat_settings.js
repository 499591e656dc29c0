// The dialog for the settings of a chat: system prompt, options, thinking and tools.

const NUMBERS = ["temperature", "top_k", "top_p", "seed", "repeat_penalty", "num_predict"];
const THINK = { on: true, off: false };
const dialog = document.getElementById("settings");
const form = dialog.querySelector("form");
const problem = dialog.querySelector(".problem");

export function openSettings(chat) {
  const fields = form.elements;
  fields.system.value = chat.system ?? "";
  for (const name of NUMBERS) fields[name].value = chat.options?.[name] ?? "";
  const named = Object.entries(THINK).find(([, value]) => value === chat.think)?.[0];
  fields.think.value = named ?? chat.think ?? "";
  fields.tools.value = chat.tools?.length ? JSON.stringify(chat.tools, null, 2) : "";
  problem.textContent = "";
  dialog.showModal();
}

// Takes what was submitted into `chat`. Returns false, and says why, if the tools cannot be read.
export function takeSettings(event, chat) {
  const fields = form.elements;
  let tools = [];
  try {
    tools = fields.tools.value.trim() ? JSON.parse(fields.tools.value) : [];
    if (!Array.isArray(tools)) throw new SyntaxError("a list is expected");
  } catch (error) {
    event.preventDefault();
    problem.textContent = `Tools: ${error.message}`;
    return false;
  }
  const think = fields.think.value;
  chat.system = fields.system.value;
  chat.tools = tools;
  chat.think = think ? (THINK[think] ?? think) : undefined;
  chat.options = Object.fromEntries(
    NUMBERS.filter((name) => fields[name].value !== "").map((name) => [name, Number(fields[name].value)]),
  );
  return true;
}
