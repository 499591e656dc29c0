// The status page: requests /status.json at intervals and plots the values.

import { element } from "./dom.js";
import { number, Plot } from "./plots.js";
import { askKey, setUp } from "./preferences.js";
import * as server from "./server.js";

const EVERY_MS = 2000;
const POINTS = 150;
const DRIFT_S = 5; // by which the clocks of server and page may disagree about an interval
const SPAN = "the last five minutes";
const $ = (id) => document.getElementById(id);
const models = new Map(); // a ModelSection by name
let paused = false;
let asking = false;
let refused = false; // by a server that needs a key: nothing is requested until the key changes

const COLUMNS = [
  ["Replica", (one) => one.id],
  ["Running", (one) => `${number(one.running)} of ${number(one.slots)}`],
  ["Waiting", (one) => number(one.waiting)],
  ["Queued tokens", (one) => number(one.queued_tokens)],
  ["Cache pages", (one) => `${number(one.pages_owned)} of ${number(one.pages_total)}`],
  ["Images waiting", (one) => number(one.images_waiting)],
  ["Tokens generated", (one) => number(one.completion_tokens_total)],
  ["Preemptions", (one) => number(one.preemptions_total)],
];

class ModelSection {
  constructor(name) {
    this.name = name;
    this.before = null; // { at, received, known: replicas by id }
    this.node = element("section");
    this.heading = element("h2", name);
    this.facts = element("p");
    this.plots = {
      speed: new Plot("Tokens per second", ["generated", "prompts"], { span: POINTS }),
      requests: new Plot("Requests", ["running", "waiting"], { span: POINTS }),
      queue: new Plot("Prompt tokens in the queue", ["tokens"], { span: POINTS }),
      cache: new Plot("Cache", ["used", "prefix hits"], { unit: "%", span: POINTS, most: 100 }),
    };
    const grid = element("div", "", "plots");
    grid.append(...Object.values(this.plots).map((plot) => plot.figure));
    Object.values(this.plots).forEach((plot) => plot.showSpan(SPAN));
    this.body = element("tbody");
    this.node.append(this.heading, this.facts, grid, this.#table());
  }

  // `begun`: when the answer was requested, by the page's clock in seconds.
  update(at, replicas, begun) {
    const missed = Math.floor((begun - this.before?.received) / (EVERY_MS / 1000)) - 1;
    if (missed > 0) Object.values(this.plots).forEach((plot) => plot.skip(missed));
    const changed = this.#changes(at, replicas);
    const sum = (field) => replicas.reduce((total, one) => total + one[field], 0);
    this.plots.speed.add([changed.completion_tokens_total, changed.computed_tokens_total], this.name);
    this.plots.requests.add([sum("running"), sum("waiting")], this.name);
    this.plots.queue.add([sum("queued_tokens")], this.name);
    const prompts = sum("prompt_tokens_total");
    const hits = prompts ? (100 * sum("cached_tokens_total")) / prompts : null;
    const pages = sum("pages_total");
    this.plots.cache.add([pages ? (100 * sum("pages_owned")) / pages : null, hits], this.name);
    this.facts.textContent = replicas.length
      ? `${replicas.length} ${replicas.length === 1 ? "replica" : "replicas"}, ${number(sum("slots"))} slots, ` +
        `${number(sum("completion_tokens_total"))} tokens generated since they started`
      : "No replica answers.";
    this.body.replaceChildren(...replicas.map(row));
    this.body.closest("table").hidden = !replicas.length;
  }

  // Rates per second since the last answer, of the replicas that are in both answers. None if the answers
  // come from hosts whose clocks differ.
  #changes(at, replicas) {
    const before = this.before;
    const known = new Map(replicas.map((one) => [one.id, one]));
    this.before = { at, received: performance.now() / 1000, known };
    const seconds = at - before?.at;
    const drift = Math.abs(seconds - (this.before.received - before?.received));
    if (!(seconds > 0 && drift < DRIFT_S)) return { completion_tokens_total: null, computed_tokens_total: null };
    const rate = (field) => {
      let change = 0;
      for (const [id, one] of known) change += Math.max(0, one[field] - (before.known.get(id) ?? one)[field]);
      return change / seconds;
    };
    return Object.fromEntries(["completion_tokens_total", "computed_tokens_total"].map((f) => [f, rate(f)]));
  }

  #table() {
    const around = element("div", "", "table");
    around.tabIndex = 0; // scrolls
    around.setAttribute("role", "region");
    around.setAttribute("aria-label", `Replicas of ${this.name}`);
    const table = element("table");
    const head = element("tr");
    for (const [title] of COLUMNS) {
      const cell = element("th", title);
      cell.scope = "col";
      head.append(cell);
    }
    table.append(element("thead"), this.body);
    table.tHead.append(head);
    around.append(table);
    return around;
  }
}

function row(replica) {
  const made = element("tr");
  made.append(...COLUMNS.map(([, text]) => element("td", text(replica))));
  return made;
}

function show({ at, models: listed }, begun) {
  const names = new Set(listed.map(({ name }) => name));
  for (const [name, section] of models) {
    if (!names.has(name)) {
      section.node.remove();
      models.delete(name);
    }
  }
  for (const { name, replicas } of listed) {
    if (!models.has(name)) {
      models.set(name, new ModelSection(name));
      $("models").append(models.get(name).node);
    }
    models.get(name).update(at, replicas, begun);
  }
  const replicas = listed.flatMap((model) => model.replicas);
  const total = (field) => number(replicas.reduce((sum, one) => sum + one[field], 0));
  $("summary").textContent =
    `Models: ${listed.length}. Replicas: ${replicas.length}. ` +
    `Requests: ${total("running")} running, ${total("waiting")} waiting.`;
}

async function ask() {
  if (asking || refused || document.hidden || $("key").open) return;
  asking = true;
  try {
    const begun = performance.now() / 1000;
    show(await server.get("/status.json"), begun);
    $("problem").textContent = "";
  } catch (error) {
    refused = error.status === 401;
    if (refused) askKey("This server needs an API key.");
    $("problem").textContent = refused
      ? `No values without a valid API key: ${error.message}`
      : `The server does not answer: ${error.message}`;
  } finally {
    asking = false;
  }
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
});
setUp(() => {
  refused = false;
  ask();
});
setInterval(() => paused || ask(), EVERY_MS);
ask();
