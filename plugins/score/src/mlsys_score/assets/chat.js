// The chat: conversations kept in this browser, streamed answers that can be stopped.
import { parseMarkdown, renderMarkdown } from "./markdown.js";

const STORE = "mlsys-chats";
const KEPT = 30; // conversations

const find = (id) => document.getElementById(id);

export class Chat {
  // onAnswer is called with the end of an answer's id, by which its row is known.
  constructor(server, model, onAnswer) {
    this.server = server;
    this.model = model;
    this.onAnswer = onAnswer;
    this.stopping = null; // AbortController of the running answer
    this.chats = readChats();
    if (!this.chats.length) this.chats.push(newChat());
    this.current = this.chats[0];
    find("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.stopping) this.stopping.abort();
      else this.send();
    });
    find("chat-input").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.stopping) this.send();
      }
    });
    find("chat-list").addEventListener("change", (event) => this.open(event.target.value));
    find("chat-new").addEventListener("click", () => {
      if (this.current.messages.length) this.chats.unshift(newChat());
      this.open(this.chats[0].id);
      find("chat-input").focus();
    });
    find("chat-delete").addEventListener("click", () => {
      this.chats = this.chats.filter((chat) => chat !== this.current);
      if (!this.chats.length) this.chats.push(newChat());
      this.open(this.chats[0].id);
    });
    find("chat-system").addEventListener("change", (event) => {
      this.current.system = event.target.value;
      this.save();
    });
    this.open(this.current.id);
  }

  open(id) {
    if (this.stopping) this.stopping.abort();
    this.current = this.chats.find((chat) => chat.id === id) || this.chats[0];
    find("chat-system").value = this.current.system;
    const log = find("chat-log");
    log.replaceChildren();
    for (const message of this.current.messages) this.show(message);
    this.save();
  }

  show(message) {
    const element = document.createElement("div");
    element.className = `message ${message.role}`;
    const who = document.createElement("span");
    who.className = "who";
    who.textContent = message.role === "user" ? "You" : "Model";
    const body = document.createElement("div");
    body.className = "body";
    if (message.role === "user") body.textContent = message.content;
    else body.append(renderMarkdown(parseMarkdown(message.content)));
    element.append(who, body);
    find("chat-log").append(element);
    find("chat-log").scrollTop = find("chat-log").scrollHeight;
    return body;
  }

  async send() {
    const input = find("chat-input");
    const text = input.value.trim();
    if (!text) return;
    input.value = "";
    const chat = this.current;
    const asked = { role: "user", content: text };
    chat.messages.push(asked);
    if (chat.messages.length === 1) chat.title = text.slice(0, 40);
    this.show(asked);
    this.save();
    const answer = { role: "assistant", content: "" };
    const body = this.show(answer);
    body.parentElement.setAttribute("aria-busy", "true");
    const controller = (this.stopping = new AbortController());
    this.state(true, "");
    let note = "";
    try {
      note = await this.stream(chat, answer, body, controller);
    } catch (error) {
      note = controller.signal.aborted ? "stopped" : error.message;
    }
    body.parentElement.removeAttribute("aria-busy");
    body.replaceChildren(renderMarkdown(parseMarkdown(answer.content)));
    if (answer.content) chat.messages.push(answer);
    this.stopping = null;
    this.save();
    this.state(false, note);
  }

  async stream(chat, answer, body, controller) {
    const system = chat.system.trim() ? [{ role: "system", content: chat.system }] : [];
    const request = { model: this.model.facts.model, messages: [...system, ...chat.messages], stream: true };
    request.stream_options = { include_usage: true };
    for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
      const value = find(`chat-${name}`).value;
      if (value !== "") request[name] = Number(value);
    }
    const started = performance.now();
    let first = null;
    let drawn = false;
    let usage = null;
    const options = {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(request),
      signal: controller.signal,
    };
    for await (const { data } of this.server.events("/v1/chat/completions", options)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.id) this.onAnswer(chunk.id.slice(-8));
      usage = chunk.usage || usage;
      const delta = (chunk.choices && chunk.choices[0] && chunk.choices[0].delta.content) || "";
      if (!delta) continue;
      if (first === null) first = performance.now();
      answer.content += delta;
      if (drawn) continue;
      drawn = true; // once a frame, however fast tokens come
      requestAnimationFrame(() => {
        drawn = false;
        if (this.stopping === controller) body.replaceChildren(renderMarkdown(parseMarkdown(answer.content)));
        find("chat-log").scrollTop = find("chat-log").scrollHeight;
      });
    }
    if (first === null || !usage) return "";
    const seconds = (performance.now() - started) / 1000;
    return `${usage.completion_tokens} tokens, ${seconds.toFixed(1)} s, first after ${(first - started).toFixed(0)} ms`;
  }

  state(isRunning, note) {
    const button = find("chat-send");
    button.textContent = isRunning ? "Stop" : "Send";
    button.classList.toggle("stop", isRunning);
    find("chat-note").textContent = note;
  }

  save() {
    const list = find("chat-list");
    list.replaceChildren(
      ...this.chats.map((chat) => {
        const option = document.createElement("option");
        option.value = chat.id;
        option.textContent = chat.title || "New conversation";
        option.selected = chat === this.current;
        return option;
      }),
    );
    const kept = this.chats.filter((chat) => chat.messages.length || chat.system).slice(0, KEPT);
    try {
      localStorage.setItem(STORE, JSON.stringify(kept));
    } catch {
      find("chat-note").textContent = "this browser keeps no conversations";
    }
  }
}

function newChat() {
  return { id: `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`, title: "", system: "", messages: [] };
}

function readChats() {
  try {
    const found = JSON.parse(localStorage.getItem(STORE) || "[]");
    return found.filter((chat) => chat && typeof chat.id === "string" && Array.isArray(chat.messages));
  } catch {
    return [];
  }
}
