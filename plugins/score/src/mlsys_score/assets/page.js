// State of the page: what is shown, and whether it moves. The other modules read and change it.
import { Model } from "./model.js";
import { ScoreView } from "./draw.js";

export const $ = (id) => document.getElementById(id);
const shown = new Model();
export const app = {
  model: shown,
  view: new ScoreView($("score"), shown),
  server: null, // set at the start
  recorded: JSON.parse($("recording").textContent), // a recording in the page; null: a server's page
  isLive: true, // what is shown comes from the server
  isPaused: false,
  isStale: true, // what is drawn
  waiting: [], // deltas that came while paused
  panels: [], // [title, {name: value}] of the server's extensions
  chat: null,
  ownName: "", // end of the id of the chat's last answer
};

export function state(word, detail = "") {
  $("state").textContent = app.isLive ? (app.isPaused && word === "live" ? "paused" : word) : "recording";
  $("state").className = app.isLive ? word : "recording";
  $("state").title = detail;
}

export function pause(value) {
  app.isPaused = value;
  $("pause").textContent = value ? "Go on" : "Pause";
  $("pause").setAttribute("aria-pressed", String(value));
  if (!value) {
    for (const delta of app.waiting) app.model.apply(delta);
    app.waiting = [];
    app.view.last = null;
  }
  state("live");
  app.isStale = true;
}
