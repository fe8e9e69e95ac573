// The server: requests with the reader's key, and server-sent events over fetch, which can send one.

const KEY = "mlsys-key";

export class Server {
  constructor(askKey) {
    this.askKey = askKey; // () -> Promise of a key
    this.asking = null;
  }

  get key() {
    return sessionStorage.getItem(KEY) || "";
  }

  // Like fetch, with the key; asks for one where the server wants it, and again if it is not known there.
  async fetch(path, options = {}) {
    for (;;) {
      const headers = { ...options.headers };
      const used = this.key;
      if (used) headers.authorization = `Bearer ${used}`;
      const response = await fetch(path, { ...options, headers });
      if (response.status !== 401) return response;
      if (this.key === used) {
        this.asking = this.asking || this.askKey(used !== "").finally(() => (this.asking = null));
        sessionStorage.setItem(KEY, await this.asking);
      }
    }
  }

  async json(path, body, options = {}) {
    const post = body === undefined ? {} : { method: "POST", body: typeof body === "string" ? body : JSON.stringify(body) };
    const response = await this.fetch(path, { headers: { "content-type": "application/json" }, ...post, ...options });
    if (!response.ok) throw new Error(await reason(response));
    return response.json();
  }

  // Yield {event, data} of a stream.
  async *events(path, options = {}) {
    const response = await this.fetch(path, options);
    if (!response.ok) throw new Error(await reason(response));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    try {
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        rest += value;
        const parts = rest.split(/\r?\n\r?\n/);
        rest = parts.pop();
        for (const part of parts) yield parseEvent(part);
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }
}

export function parseEvent(text) {
  const found = { event: "message", data: "" };
  for (const line of text.split(/\r?\n/)) {
    const [, name, value] = /^([a-z]+): ?(.*)$/.exec(line) || [];
    if (name === "data") found.data += (found.data ? "\n" : "") + value;
    else if (name === "event") found.event = value;
  }
  return found;
}

async function reason(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return typeof error === "string" ? error : error.message;
  } catch {
    return `${response.status} ${text.slice(0, 200)}`;
  }
}
