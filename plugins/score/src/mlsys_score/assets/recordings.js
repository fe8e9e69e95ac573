// What is shown: the server's board, a recording, or the same requests under another policy.
import { $, app, state } from "./page.js";
import { Chat } from "./chat.js";
import { latencies, percentile } from "./explain.js";
import { legend } from "./panels.js";
import { Model } from "./model.js";

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
  const policies = $("policy");
  if (app.isLive && policies.options.length === 0)
    for (const policy of facts.policies || []) policies.add(new Option(policy, policy));
  $("replay").hidden = app.recorded !== null || !policies.options.length;
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

export async function replay() {
  const policy = $("policy").value;
  const note = $("replay-note");
  note.textContent = "replaying…";
  try {
    const recording = await app.server.json("/ui/score/recording");
    const original = new Model();
    original.load(recording);
    const rows = [summary("as it was", original)];
    const names = [...new Set([recording.facts.policy, policy])];
    let last = null;
    for (const name of names) {
      last = await app.server.json(`/ui/score/replay?policy=${encodeURIComponent(name)}`, recording);
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
