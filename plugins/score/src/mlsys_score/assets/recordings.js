// What is shown: the server's board, or a recording.
import { $, app, state } from "./page.js";
import { Chat } from "./chat.js";
import { legend } from "./panels.js";

export function show(snapshot) {
  app.waiting = [];
  app.model.load(snapshot);
  app.view.selected = null;
  app.view.last = null;
  app.isStale = true;
  const facts = app.model.facts;
  const name = facts.model || (facts.models || []).join(", ");
  $("what").textContent = [app.model.system, name, facts.policy && `policy ${facts.policy}`].filter(Boolean).join(" · ");
  document.body.classList.toggle("has-chat", Boolean(app.recorded === null && facts.chat));
  document.body.classList.toggle("has-server", app.recorded === null);
  document.body.classList.toggle("has-blocks", Boolean(facts.num_blocks));
  if (app.recorded === null && facts.chat && !app.chat) app.chat = new Chat(app.server, app.model, (id) => (app.ownName = id));
  $("load").max = app.model.system === "batchmaker" ? 3 : 64; // where each request needs a connection
  $("load-length").parentElement.hidden = facts.protocol !== "openai";
  legend();
}

export function openRecording(text, title) {
  const found = JSON.parse(text);
  if (found.format !== "mlsys-score") throw new Error("this is no recording of the score");
  app.isLive = false;
  show(found);
  $("banner").hidden = false;
  $("banner-text").textContent = title;
  state("recording");
}
