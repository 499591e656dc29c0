// The chat page: connects the elements of index.html with chats, their store and the server.

import { ChatList } from "./chat_list.js";
import { openSettings, takeSettings } from "./chat_settings.js";
import * as conversation from "./conversation.js";
import { element } from "./dom.js";
import { keepFocus } from "./focus.js";
import { endAnswer, messageNode, updateAnswer } from "./messages.js";
import { paced } from "./pacing.js";
import { PictureList, readPicture } from "./pictures.js";
import { askKey, setUp } from "./preferences.js";
import * as server from "./server.js";
import { local } from "./site_data.js";
import { allChats, deleteChat, readChat, saveChat, watchChats } from "./store.js";

const $ = (id) => document.getElementById(id);
const MODEL = "caravan-model"; // key of localStorage
const COMPOSED = 229; // keyCode of a key of an input method; Safari ends the composition before its Enter
const STORE_MS = 5000; // between copies of an answer that is still arriving
const BOTTOM = 80; // pixels from the end that count as the end, when following an answer

const list = new ChatList($("chats"), { open, forget });
const attached = new PictureList($("attached"), $("text"));
let chats = [];
let chat = null;
let reading = Promise.resolve(); // settled when the files that were given have been read
const answers = new Map(); // chats by the AbortController of an answer that is not complete and stored
let running = null; // the AbortController of the answer that is being generated
let capabilities = new Set();
let models = null; // settled when the models and the capabilities of the chosen one have been requested

async function start() {
  setUp(requestModels);
  let trouble;
  try {
    chats = await allChats();
  } catch (error) {
    trouble = error;
  }
  open(newest() ?? conversation.newChat("", {}));
  $("text").focus();
  requestModels();
  if (trouble) problem(`The stored chats cannot be read: ${trouble.message}`);
  watchChats(reload);
}

// ---- models

function requestModels() {
  problem("");
  models = loadModels();
  return models;
}

async function loadModels() {
  let names;
  try {
    const { models } = await server.get("/api/tags");
    names = models.map((model) => model.name.replace(/:latest$/, ""));
  } catch (error) {
    report(error);
    return;
  }
  const wanted = chat.model || local.getItem(MODEL);
  $("model").disabled = !names.length;
  $("model").replaceChildren(...names.map((name) => new Option(name, name)));
  if (wanted && !names.includes(wanted)) $("model").add(new Option(`${wanted} (not served)`, wanted));
  $("model").value = wanted || names[0] || "";
  if (!names.length) problem("The server has no models.");
  await choose($("model").value);
}

async function choose(name) {
  chat.model = name;
  capabilities = new Set();
  let found = [];
  if (name) {
    local.setItem(MODEL, name);
    try {
      found = (await server.show(name)).capabilities;
    } catch (error) {
      report(error);
    }
  }
  if (chat.model !== name) return; // another one has been chosen since
  capabilities = new Set(found);
  const told = ["vision", "tools", "thinking"].filter((each) => capabilities.has(each));
  $("capabilities").textContent = told.join(", ");
  $("attach").disabled = !capabilities.has("vision");
  $("attach").title = capabilities.has("vision") ? "Attach images" : `${name} cannot see images`;
  $("welcome-hint").textContent = hint(name);
  $("think-label").hidden = !capabilities.has("thinking");
}

function hint(name) {
  if (!name) return "";
  const images = capabilities.has("vision") ? " Drop or paste a picture, or attach it with +." : "";
  return `You talk with ${name}.${images} Settings has the system prompt, options and tools.`;
}

// ---- chats

function open(opened) {
  if ($("side").classList.contains("open")) $("close-side").click();
  if (opened === chat) return;
  running?.abort();
  busy(null);
  attached.show([]);
  problem("");
  show(opened);
}

function show(shown) {
  chat = shown;
  chat.model ||= $("model").value;
  if (chat.model && $("model").value !== chat.model && !$("model").disabled) {
    if (![...$("model").options].some((option) => option.value === chat.model)) {
      $("model").add(new Option(`${chat.model} (not served)`, chat.model));
    }
    $("model").value = chat.model;
    models = choose(chat.model);
  }
  draw();
  drawChats();
}

function draw() {
  const nodes = conversation.path(chat);
  keepFocus($("messages"), $("text"), () => {
    $("messages").replaceChildren(
      ...nodes.map((node) => messageNode(chat, node, actions, running !== null)),
    );
    $("welcome").hidden = nodes.length > 0;
    $("export").disabled = !nodes.length;
    $("again").hidden = running !== null || !conversation.lacksAnswer(chat);
  });
  follow();
}

function drawChats() {
  list.show(chats, chat);
}

async function forget(removed) {
  if (!confirm(`Delete the chat "${removed.title}"?`)) return;
  drop(removed);
  await deleteChat(removed.id);
}

function drop(removed) {
  chats = chats.filter((each) => each !== removed);
  if (removed === chat) open(newest() ?? fresh());
  else drawChats();
}

function newest() {
  return chats.find((each) => !each.unreadable);
}

function fresh() {
  const { system, options, tools, think } = chat ?? {};
  return conversation.newChat($("model").value, { system, options, tools, think });
}

// A chat without messages is not in `chats`, nor is a deleted one.
async function store(changed = chat) {
  drawChats();
  if (!chats.includes(changed)) return;
  try {
    const other = await saveChat(changed);
    if (other) await reload(other);
  } catch (error) {
    problem(`The chat could not be stored in this browser: ${error.message}`);
  }
}

// Shows what another tab has made of a chat. If this tab changes it too, `store` will keep both versions.
async function reload(id) {
  let read;
  try {
    read = await readChat(id);
  } catch {
    return; // the browser has lost it; this tab may still have it
  }
  const known = chats.find((each) => each.id === id);
  if (!read) {
    if (known) drop(known);
    return;
  }
  if ([...answers.values()].includes(known) || (known === chat && $("messages").querySelector("textarea:focus"))) return;
  chats = known ? chats.map((each) => (each === known ? read : each)) : [read, ...chats];
  if (known !== chat) {
    drawChats();
    return;
  }
  const { scrollTop } = $("main");
  const following = atEnd();
  show(read);
  if (!following) $("main").scrollTop = scrollTop;
}

// ---- messages

const actions = {
  edit(node, content, images) {
    const { role, tool } = node;
    conversation.add(chat, node.parent, { role, content, images, tool });
    proceed();
  },
  retry(node) {
    chat.leaf = node.parent;
    answer();
  },
  branch(node) {
    conversation.showBranch(chat, node);
    store();
    draw();
  },
  result(node, name, content) {
    conversation.add(chat, chat.leaf, { role: "tool", tool: name, content });
    proceed();
  },
};

// Answers a changed chat, unless results of tools are missing.
function proceed() {
  if (conversation.lacksAnswer(chat)) {
    answer();
    return;
  }
  store();
  draw();
}

async function send() {
  await started; // stored chats may not have been read yet
  const asked = chat.id;
  await reading;
  if (attached.images.length) await models;
  if (chat.id !== asked || (attached.images.length && !sees())) return;
  const content = $("text").value;
  if (running || (!content.trim() && !attached.images.length)) return;
  conversation.add(chat, chat.leaf, { role: "user", content, images: attached.images });
  $("text").value = "";
  attached.show([]);
  grow();
  answer();
}

async function answer() {
  const asked = chat;
  const abort = new AbortController();
  problem("");
  busy(abort);
  answers.set(abort, asked);
  if (!chats.includes(asked)) chats.unshift(asked);
  store(asked);
  draw();
  if (await modelReady(abort.signal)) await generate(asked, abort);
  else if (running === abort) {
    busy(null);
    draw();
  }
  answers.delete(abort);
}

// Whether the server has told its models, before `signal`.
async function modelReady(signal) {
  const stopped = new Promise((resolve) => signal.addEventListener("abort", resolve));
  let awaited;
  while (awaited !== models && !signal.aborted) {
    awaited = models;
    await Promise.race([awaited, stopped]);
  }
  if ($("model").disabled && !signal.aborted) await requestModels();
  return !$("model").disabled && !signal.aborted;
}

async function generate(asked, abort) {
  const body = conversation.request(asked, capabilities.has("thinking"));
  const node = conversation.add(asked, asked.leaf, { role: "assistant", content: "", model: body.model });
  const shown = messageNode(asked, node, actions, true);
  if (chat === asked) {
    $("messages").append(shown);
    follow();
  }
  const storing = setInterval(() => store(asked), STORE_MS);
  const end = await receive(body, abort.signal, asked, node, shown);
  clearInterval(storing);
  asked.changed = Date.now();
  await store(asked);
  if (running === abort) busy(null);
  if (chat === asked && !running) drawEnd(shown, node);
  $("announce").textContent = end;
}

// Adds the answer to `node` as it arrives. Returns what is announced; a problem announces itself.
async function receive(body, signal, asked, node, shown) {
  try {
    for await (const part of server.chat(body, signal)) {
      conversation.take(node, part);
      if (chat === asked) redraw(shown, node);
    }
    return "The answer is complete.";
  } catch (error) {
    node.stopped = error.name === "AbortError";
    if (node.stopped) return "The answer was stopped.";
    if (!node.content && !node.thinking && !node.calls) conversation.remove(asked, node);
    report(error);
    return "";
  }
}

const redraw = paced((shown, node) => {
  const following = atEnd();
  updateAnswer(shown, node);
  if (following) follow();
  void $("main").scrollHeight; // the time of the layout counts
});

// Only the last message changes when an answer ends, unless it was removed or the chat was opened again.
function drawEnd(shown, node) {
  if (!chat.nodes[node.id] || !shown.isConnected) {
    draw();
    return;
  }
  const following = atEnd();
  endAnswer(shown, chat, node, actions);
  if (following) follow();
}

function atEnd() {
  const main = $("main");
  return main.scrollHeight - main.scrollTop - main.clientHeight < BOTTOM;
}

function follow() {
  $("main").scrollTop = $("main").scrollHeight;
}

// `abort`: ends the answer that is generated from now on; null if there is none.
function busy(abort) {
  running = abort;
  keepFocus($("messages"), $("text"), () => {
    $("messages").setAttribute("aria-busy", String(abort !== null));
    $("send").hidden = abort !== null;
    $("stop").hidden = abort === null;
  });
}

// ---- pictures

function attach(files) {
  const into = chat.id;
  reading = reading.then(() => readInto(into, files));
  return reading;
}

async function readInto(into, files) {
  const read = [];
  for (const file of files) {
    if (!file.type.startsWith("image/")) {
      problem(`${file.name} is not an image.`);
      continue;
    }
    if (!sees()) return;
    try {
      read.push(await readPicture(file));
    } catch {
      problem(`${file.name} cannot be read as an image.`);
    }
  }
  if (chat.id !== into) return;
  attached.show([...attached.images, ...read]);
  $("text").focus();
}

function sees() {
  if (!capabilities.has("vision")) problem(`${chat.model} cannot see images.`);
  return capabilities.has("vision");
}

// ---- export, problems

function save() {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([conversation.asMarkdown(chat)], { type: "text/markdown" }));
  link.download = `${chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "chat"}.md`;
  link.click();
  URL.revokeObjectURL(link.href);
}

function report(error) {
  if (error.status === 401) askKey("This server needs an API key.");
  else if (error instanceof server.ServerError) problem(error.message);
  else problem(`The server cannot be reached: ${error.message}`);
}

function problem(text) {
  $("problem").textContent = text;
}

function composing(event) {
  return event.isComposing || event.keyCode === COMPOSED;
}

function grow() {
  $("text").style.height = "auto";
  $("text").style.height = `${$("text").scrollHeight + 2}px`;
}

// ---- events

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("text").addEventListener("input", grow);
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !composing(event)) {
    event.preventDefault();
    send();
  }
});
$("text").addEventListener("paste", (event) => {
  const { files, types } = event.clipboardData;
  if (!files.length || types.includes("text/plain")) return; // cells and other texts have a picture, too
  event.preventDefault();
  attach([...files]);
});
$("attach").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", async () => {
  await attach([...$("files").files]);
  $("files").value = "";
});
$("frame").addEventListener("dragover", (event) => {
  if (!event.dataTransfer.types.includes("Files")) return;
  event.preventDefault();
  $("frame").classList.add("drop");
});
$("frame").addEventListener("dragleave", () => $("frame").classList.remove("drop"));
$("frame").addEventListener("drop", (event) => {
  if (!event.dataTransfer.types.includes("Files")) return;
  event.preventDefault();
  $("frame").classList.remove("drop");
  attach([...event.dataTransfer.files]);
});
$("stop").addEventListener("click", () => running?.abort());
$("again").addEventListener("click", () => running ?? answer());
for (const button of document.querySelectorAll(".suggestions button")) {
  button.addEventListener("click", () => {
    $("text").value = button.textContent;
    send();
  });
}
$("model").addEventListener("change", () => {
  models = choose($("model").value);
});
$("new-chat").addEventListener("click", () => {
  open(fresh());
  $("text").focus();
});
$("export").addEventListener("click", save);
$("open-settings").addEventListener("click", async () => {
  await started;
  openSettings(chat);
});
$("settings").querySelector("form").addEventListener("submit", (event) => {
  if (takeSettings(event, chat)) store();
});
$("open-side").addEventListener("click", () => {
  $("side").classList.add("open");
  $("close-side").focus();
});
$("close-side").addEventListener("click", () => {
  $("side").classList.remove("open");
  $("open-side").focus();
});
document.addEventListener("keydown", (event) => {
  if (composing(event) || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    if ($("side").classList.contains("open")) $("close-side").click();
    else running?.abort();
  }
  // With Option, the N of a Mac writes another character.
  if (event.altKey && event.key.toLowerCase() === "n") {
    event.preventDefault();
    $("new-chat").click();
  }
});

document.addEventListener("visibilitychange", () => {
  if (document.hidden && running) store(); // the browser may end a page that is not seen
  if (!document.hidden && models && $("model").disabled) requestModels();
});

const started = start();
