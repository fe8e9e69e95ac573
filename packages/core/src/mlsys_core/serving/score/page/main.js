// Joins the parts: a stream or a recording into the model, the model onto the page, the reader's hands to both.
import { explain, format, latencies, longestWaits, percentile, sentence } from "./explain.js";
import { causeColor, colors, KINDS } from "./theme.js";
import { drawBlocks } from "./blocks.js";
import { Chat } from "./chat.js";
import { Load } from "./load.js";
import { Model } from "./model.js";
import { ScoreView } from "./draw.js";
import { Server } from "./server.js";

const $ = (id) => document.getElementById(id);
const model = new Model();
const view = new ScoreView($("score"), model);
const server = new Server(askKey);
const recorded = JSON.parse($("recording").textContent);
let isLive = recorded === null; // what is shown comes from the server
let isPaused = false;
let waiting = []; // deltas that came while paused
let chat = null;
let ownName = ""; // end of the chat's last answer's id
let isStale = true; // what is drawn
let lastTables = 0;

function askKey(wasRefused) {
  const dialog = $("key-dialog");
  $("key-note").textContent = wasRefused ? "That key is not known here." : "This server asks for an API key.";
  $("key-input").value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    $("key-form").onsubmit = () => resolve($("key-input").value.trim());
    dialog.oncancel = (event) => event.preventDefault();
  });
}

async function follow() {
  for (;;) {
    try {
      for await (const { event, data } of server.events("/ui/score/events")) {
        const message = JSON.parse(data);
        if (event === "error" || message.error) break;
        state("live");
        if (!isLive) continue;
        if (event === "snapshot") show(message);
        else if (isPaused) waiting.push(message);
        else model.apply(message);
        isStale = true;
      }
      state("connecting");
    } catch (error) {
      state("connecting", error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, 1500));
  }
}

function state(word, detail = "") {
  $("state").textContent = isLive ? (isPaused && word === "live" ? "paused" : word) : "recording";
  $("state").className = isLive ? word : "recording";
  $("state").title = detail;
}

function show(snapshot) {
  waiting = [];
  model.load(snapshot);
  view.selected = null;
  view.last = null;
  isStale = true;
  const facts = model.facts;
  const name = facts.model || (facts.models || []).join(", ");
  $("what").textContent = [model.system, name, facts.policy && `policy ${facts.policy}`].filter(Boolean).join(" · ");
  document.body.classList.toggle("has-chat", Boolean(recorded === null && facts.chat));
  document.body.classList.toggle("has-server", recorded === null);
  document.body.classList.toggle("has-blocks", Boolean(facts.num_blocks));
  if (recorded === null && facts.chat && !chat) chat = new Chat(server, model, (id) => (ownName = id));
  $("load").max = model.system === "batchmaker" ? 3 : 64; // where each request needs a connection
  $("load-length").parentElement.hidden = facts.protocol !== "openai";
  const policies = $("policy");
  if (isLive && policies.options.length === 0)
    for (const policy of facts.policies || []) policies.add(new Option(policy, policy));
  $("replay").hidden = recorded !== null || !policies.options.length;
  legend();
}

function legend() {
  const color = colors();
  const items = [];
  const entry = (text, background) => {
    const item = document.createElement("li");
    const swatch = document.createElement("i");
    swatch.style.background = background;
    item.append(swatch, text);
    items.push(item);
  };
  if (model.system === "orca") for (const { name, color: variable } of Object.values(KINDS)) entry(name, color(variable));
  else {
    const causes = new Set(model.columns.slice(-200).flatMap((column) => Object.keys(column.split)));
    for (const cause of causes) entry(cause, causeColor(color, cause));
  }
  $("legend").replaceChildren(...items);
}

function frame() {
  if (isStale) {
    isStale = false;
    view.draw();
    numbers();
    blocks();
    table();
    $("empty").hidden = model.columns.length > 0;
    const slider = $("scroll");
    slider.max = Math.max(0, model.columns.length - 1);
    slider.value = view.to < 0 ? 0 : view.to;
    slider.setAttribute("aria-valuetext", `${model.unit} ${view.to + 1} of ${model.columns.length}`);
  }
  requestAnimationFrame(frame);
}

function numbers() {
  const facts = model.facts;
  const last = model.columns[view.to];
  const batch = last ? last.squares.filter((square) => square[1] !== "x").length : 0;
  const shown = [];
  const add = (name, value, limit) => shown.push([name, limit ? `${value} of ${limit}` : `${value}`]);
  add("in the batch", batch, facts.max_batch_size && facts.max_batch_size * 1);
  add("waiting", view.last === null ? model.waiting : last ? last.waiting : 0, facts.max_waiting);
  if (last && last.free !== undefined) add("free blocks", last.free, facts.num_blocks);
  if (last) add(`last ${model.unit}`, `${format(last.ms)} ms`);
  $("numbers").replaceChildren(
    ...shown.flatMap(([name, value]) => {
      const term = document.createElement("dt");
      term.textContent = name;
      const description = document.createElement("dd");
      description.textContent = value;
      return [term, description];
    }),
  );
}

function blocks() {
  const now = performance.now();
  if (!model.facts.num_blocks || (isLive && !isPaused && now - lastTables < 200)) return;
  lastTables = now;
  const tables = view.last === null ? model.tables : model.tablesAt(view.to);
  const counts = drawBlocks($("blocks"), model, tables, view.selected ? view.selected.row : null);
  if (counts) $("blocks-note").textContent = `${counts.used} of ${counts.total} blocks held, ${counts.shared} shared`;
}

// The longest waits in view, as a table: the same by keyboard and screen reader, and the quickest way to a stall.
let lastTable = 0;
function table() {
  const now = performance.now();
  if (isLive && !isPaused && now - lastTable < 1000) return;
  lastTable = now;
  const waits = view.to >= 0 ? longestWaits(model, view.from, view.to, 6) : [];
  const body = $("waits").tBodies[0];
  const focused = body.contains(document.activeElement);
  if (focused) return; // do not take the row away from under the reader
  body.replaceChildren(
    ...waits.map(({ row, index, total }) => {
      const line = document.createElement("tr");
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = `${format(total)} ms`;
      button.setAttribute("aria-label", `request ${row} waited ${format(total)} milliseconds: why`);
      const number = model.columns[index].n;
      button.addEventListener("click", () => {
        view.selected = { row, n: number };
        pause(true);
        select();
      });
      const cells = [String(row), `${model.unit} ${number}`, button].map((content) => {
        const cell = document.createElement("td");
        cell.append(content);
        return cell;
      });
      line.append(...cells);
      return line;
    }),
  );
}

function select() {
  isStale = true;
  const chosen = view.selected;
  const index = chosen ? view.indexOf(chosen.n) : -1;
  const column = model.columns[index];
  if (!column) return;
  const lines = [];
  if (chosen.row !== null && column.at.has(chosen.row)) {
    const [row, kind, tokens, guesses] = column.at.get(chosen.row);
    const what = model.system === "orca" ? KINDS[kind].name : column.label || model.unit;
    const more = kind === "g" ? ` (${tokens - 1} of ${guesses})` : kind === "p" || kind === "r" ? ` of ${tokens} tokens` : "";
    lines.push(`Request ${row}, ${model.unit} ${column.n}: ${what}${more}.`);
    lines.push(sentence(explain(model, row, index), model.unit));
    const facts = model.rows.get(row);
    if (facts && facts.prompt !== null)
      lines.push(`Prompt ${facts.prompt} tokens${facts.cached ? `, ${facts.cached} of them found in kept blocks` : ""}.`);
  } else {
    const split = Object.entries(column.split).map(([cause, ms]) => `${format(ms)} ${cause}`);
    lines.push(`${model.unit} ${column.n}: ${format(column.ms)} ms (${split.join(", ")}), ${column.squares.length} requests.`);
  }
  const own = chosen.row !== null && model.rows.get(chosen.row);
  if (own && ownName && own.name === ownName) lines.push("This is the chat's answer.");
  $("why").replaceChildren(
    ...lines.map((line, i) => {
      const element = document.createElement("p");
      element.textContent = line;
      if (i === 1) element.className = "wait";
      return element;
    }),
  );
}

function pause(value) {
  isPaused = value;
  $("pause").textContent = value ? "Go on" : "Pause";
  $("pause").setAttribute("aria-pressed", String(value));
  if (!value) {
    for (const delta of waiting) model.apply(delta);
    waiting = [];
    view.last = null;
  }
  state("live");
  isStale = true;
}

function openRecording(text, title) {
  const found = JSON.parse(text);
  if (found.format !== "mlsys-score") throw new Error("this is no recording of the score");
  isLive = false;
  show(found);
  $("banner").hidden = false;
  $("banner-text").textContent = title;
  state("recording");
}

function summary(name, shown) {
  const { first, between, tokens, ms } = latencies(shown);
  const time = (values, share) => (values.length ? `${percentile(values, share).toFixed(0)} ms` : "none");
  return [
    name,
    time(first, 0.5),
    time(first, 0.99),
    time(between, 0.5),
    time(between, 0.99),
    ms ? `${((1000 * tokens) / ms).toFixed(0)}/s` : "none",
  ];
}

async function replay() {
  const policy = $("policy").value;
  const note = $("replay-note");
  note.textContent = "replaying…";
  try {
    const recording = await server.json("/ui/score/recording");
    const original = new Model();
    original.load(recording);
    const rows = [summary("as it was", original)];
    const names = [...new Set([recording.facts.policy, policy])];
    let last = null;
    for (const name of names) {
      last = await server.json(`/ui/score/replay?policy=${encodeURIComponent(name)}`, recording);
      const simulated = new Model();
      simulated.load(last);
      rows.push(summary(`${name}, simulated`, simulated));
    }
    $("compare").tBodies[0].replaceChildren(
      ...rows.map((row) => {
        const line = document.createElement("tr");
        for (const value of row) line.insertCell().textContent = value;
        return line;
      }),
    );
    $("compare").hidden = false;
    note.textContent = "";
    openRecording(JSON.stringify(last), `The same requests under the policy ${policy}, simulated`);
  } catch (error) {
    note.textContent = error.message;
  }
}

function hands() {
  const canvas = $("score");
  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect();
    const found = view.at(event.clientX - box.left, event.clientY - box.top);
    if (!found) return;
    view.selected = found;
    if (isLive) {
      view.last = view.to;
      pause(true);
    }
    select();
  });
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!moves[event.key]) return;
    event.preventDefault();
    if (isLive && !isPaused) {
      view.last = view.to;
      pause(true);
    }
    view.move(...moves[event.key]);
    select();
  });
  $("pause").addEventListener("click", () => pause(!isPaused));
  $("scroll").addEventListener("input", (event) => {
    if (isLive && !isPaused) pause(true);
    view.last = Number(event.target.value);
    isStale = true;
  });
  $("zoom").addEventListener("input", (event) => {
    view.width = Number(event.target.value);
    isStale = true;
  });
  $("save").addEventListener("click", async () => {
    const data = recorded || (await server.json("/ui/score/recording"));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify(data)], { type: "application/json" }));
    link.download = "score.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  $("file").addEventListener("change", async (event) => {
    const [file] = event.target.files;
    if (!file) return;
    try {
      openRecording(await file.text(), file.name);
    } catch (error) {
      $("why").textContent = `${file.name} cannot be shown: ${error.message}`;
    }
    event.target.value = "";
  });
  $("back").addEventListener("click", () => location.reload());
  $("replay-go").addEventListener("click", replay);
  const load = new Load(server, model, (text) => ($("load-note").textContent = text));
  const setLoad = () => {
    $("load-count").textContent = $("load").value;
    load.set(Number($("load").value), $("load-length").value);
  };
  $("load").addEventListener("input", setLoad);
  $("load-length").addEventListener("change", setLoad);
  new ResizeObserver(() => (isStale = true)).observe(canvas.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    legend();
    isStale = true;
  });
}

hands();
if (recorded === null) follow();
else {
  show(recorded);
  state("recording");
}
setInterval(() => {
  if (isLive && model.system && model.system !== "orca") legend();
}, 2000);
requestAnimationFrame(frame);
