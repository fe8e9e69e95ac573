// Panels around the score: legend, numbers, block map, longest waits, and why the selected token waited.
import { $, app, pause } from "./page.js";
import { causeColor, colors, KINDS } from "./theme.js";
import { explain, format, longestWaits, sentence } from "./explain.js";
import { drawBlocks } from "./blocks.js";

let lastTables = 0;
let lastTable = 0;
let timer = 0;

// What is drawn seldom is drawn again later, even if no event comes until then.
function later(ms) {
  clearTimeout(timer);
  timer = setTimeout(() => (app.isStale = true), ms);
}

export function legend() {
  const color = colors();
  const items = [];
  const entry = (text, background) => {
    const item = document.createElement("li");
    const swatch = document.createElement("i");
    swatch.style.background = background;
    item.append(swatch, text);
    items.push(item);
  };
  if (app.model.system === "orca") for (const { name, color: variable } of Object.values(KINDS)) entry(name, color(variable));
  else {
    const causes = new Set(app.model.columns.slice(-200).flatMap((column) => Object.keys(column.split)));
    for (const cause of causes) entry(cause, causeColor(color, cause));
  }
  $("legend").replaceChildren(...items);
}

export function numbers() {
  const facts = app.model.facts;
  const last = app.model.columns[app.view.to];
  const batch = last ? last.squares.filter((square) => square[1] !== "x").length : 0;
  const shown = [];
  const add = (name, value, limit) => shown.push([name, limit ? `${value} of ${limit}` : `${value}`]);
  add("in the batch", batch, facts.max_batch_size && facts.max_batch_size * 1);
  add("waiting", app.view.last === null ? app.model.waiting : last ? last.waiting : 0, facts.max_waiting);
  if (last && last.free !== undefined) add("free blocks", last.free, facts.num_blocks);
  if (last) add(`last ${app.model.unit}`, `${format(last.ms)} ms`);
  for (const [title, figures] of app.panels) for (const [name, value] of Object.entries(figures)) add(`${title}: ${name}`, value);
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

export function blocks() {
  const now = performance.now();
  if (!app.model.facts.num_blocks) return;
  if (app.isLive && !app.isPaused && now - lastTables < 200) return later(200);
  lastTables = now;
  const tables = app.view.last === null ? app.model.tables : app.model.tablesAt(app.view.to);
  const counts = drawBlocks($("blocks"), app.model, tables, app.view.selected ? app.view.selected.row : null);
  if (counts) $("blocks-note").textContent = `${counts.used} of ${counts.total} blocks held, ${counts.shared} shared`;
}

// The longest waits in view, as a table: the same by keyboard and screen reader, and the quickest way to a stall.
export function table() {
  const now = performance.now();
  if (app.isLive && !app.isPaused && now - lastTable < 1000) return later(1000);
  lastTable = now;
  const waits = app.view.to >= 0 ? longestWaits(app.model, app.view.from, app.view.to, 6) : [];
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
      const number = app.model.columns[index].n;
      button.addEventListener("click", () => {
        app.view.selected = { row, n: number };
        pause(true);
        select();
      });
      const cells = [String(row), `${app.model.unit} ${number}`, button].map((content) => {
        const cell = document.createElement("td");
        cell.append(content);
        return cell;
      });
      line.append(...cells);
      return line;
    }),
  );
}

export function select() {
  app.isStale = true;
  const chosen = app.view.selected;
  const index = chosen ? app.view.indexOf(chosen.n) : -1;
  const column = app.model.columns[index];
  if (!column) return;
  const lines = [];
  if (chosen.row !== null && column.at.has(chosen.row)) {
    const [row, kind, tokens, guesses] = column.at.get(chosen.row);
    const what = app.model.system === "orca" ? KINDS[kind].name : column.label || app.model.unit;
    const more = kind === "g" ? ` (${tokens - 1} of ${guesses})` : kind === "p" || kind === "r" ? ` of ${tokens} tokens` : "";
    lines.push(`Request ${row}, ${app.model.unit} ${column.n}: ${what}${more}.`);
    lines.push(sentence(explain(app.model, row, index), app.model.unit));
    const facts = app.model.rows.get(row);
    if (facts && facts.prompt !== null)
      lines.push(`Prompt ${facts.prompt} tokens${facts.cached ? `, ${facts.cached} of them found in kept blocks` : ""}.`);
  } else {
    const split = Object.entries(column.split).map(([cause, ms]) => `${format(ms)} ${cause}`);
    lines.push(`${app.model.unit} ${column.n}: ${format(column.ms)} ms (${split.join(", ")}), ${column.squares.length} requests.`);
  }
  const own = chosen.row !== null && app.model.rows.get(chosen.row);
  if (own && app.ownName && own.name === app.ownName) lines.push("This is the chat's answer.");
  $("why").replaceChildren(
    ...lines.map((line, i) => {
      const element = document.createElement("p");
      element.textContent = line;
      if (i === 1) element.className = "wait";
      return element;
    }),
  );
}
