// Joins the parts: a stream or a recording into the model, the model onto the page.
import { $, app, state } from "./page.js";
import { blocks, legend, numbers, table } from "./panels.js";
import { hands } from "./hands.js";
import { Server } from "./server.js";
import { show } from "./recordings.js";

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
      for await (const { event, data } of app.server.events("/ui/score/events")) {
        const message = JSON.parse(data);
        if (event === "error" || message.error) break;
        state("live");
        if (!app.isLive) continue;
        if (event === "snapshot") show(message);
        else if (app.isPaused) app.waiting.push(message);
        else app.model.apply(message);
        app.isStale = true;
      }
      state("connecting");
    } catch (error) {
      state("connecting", error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, 1500));
  }
}

function frame() {
  if (app.isStale) {
    app.isStale = false;
    app.view.draw();
    numbers();
    blocks();
    table();
    $("empty").hidden = app.model.columns.length > 0;
    const slider = $("scroll");
    slider.max = Math.max(0, app.model.columns.length - 1);
    slider.value = app.view.to < 0 ? 0 : app.view.to;
    slider.setAttribute("aria-valuetext", `${app.model.unit} ${app.view.to + 1} of ${app.model.columns.length}`);
  }
  requestAnimationFrame(frame);
}

app.server = new Server(askKey);
app.isLive = app.recorded === null;
hands();
if (app.recorded === null) follow();
else {
  show(app.recorded);
  state("recording");
}
// Live figures of the server's extensions.
setInterval(async () => {
  if (!app.isLive || !app.model.facts.has_panels) return;
  app.panels = await app.server.json("/ui/score/panels").catch(() => []);
  app.isStale = true;
}, 1000);
setInterval(() => {
  if (app.isLive && app.model.system && app.model.system !== "orca") legend();
}, 2000);
requestAnimationFrame(frame);
