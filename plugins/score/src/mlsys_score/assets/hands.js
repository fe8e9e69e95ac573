// The reader's hands: mouse, keys, sliders and buttons.
import { $, app, pause } from "./page.js";
import { legend, select } from "./panels.js";
import { openRecording } from "./recordings.js";
import { Load } from "./load.js";

export function hands() {
  const canvas = $("score");
  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect();
    const found = app.view.at(event.clientX - box.left, event.clientY - box.top);
    if (!found) return;
    app.view.selected = found;
    if (app.isLive) {
      app.view.last = app.view.to;
      pause(true);
    }
    select();
  });
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!moves[event.key]) return;
    event.preventDefault();
    if (app.isLive && !app.isPaused) {
      app.view.last = app.view.to;
      pause(true);
    }
    app.view.move(...moves[event.key]);
    select();
  });
  $("pause").addEventListener("click", () => pause(!app.isPaused));
  $("scroll").addEventListener("input", (event) => {
    if (app.isLive && !app.isPaused) pause(true);
    app.view.last = Number(event.target.value);
    app.isStale = true;
  });
  $("zoom").addEventListener("input", (event) => {
    app.view.width = Number(event.target.value);
    app.isStale = true;
  });
  $("save").addEventListener("click", async () => {
    const data = app.recorded || (await app.server.json("/ui/score/recording"));
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
  const load = new Load(app.server, app.model, (text) => ($("load-note").textContent = text));
  const setLoad = () => {
    $("load-count").textContent = $("load").value;
    load.set(Number($("load").value), $("load-length").value);
  };
  $("load").addEventListener("input", setLoad);
  $("load-length").addEventListener("change", setLoad);
  new ResizeObserver(() => (app.isStale = true)).observe(canvas.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    legend();
    app.isStale = true;
  });
}
