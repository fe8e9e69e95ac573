// Load from the browser: so many requests at a time, sent to the server's own endpoint. A browser has six connections to
// a server, so several prompts share one.

const CONNECTIONS = 3;
const WORDS = "the engine runs one batch of tokens while other requests wait for their turn and the blocks fill up slowly".split(" ");

export class Load {
  constructor(server, model, report) {
    this.server = server;
    this.model = model;
    this.report = report; // (text) -> shown
    this.wanted = 0;
    this.running = 0; // connections
    this.done = 0;
    this.inputs = null;
    this.frame = 1;
    this.stop = new AbortController();
  }

  set(count, length) {
    this.wanted = count;
    this.length = length;
    if (!count) {
      this.stop.abort();
      this.stop = new AbortController();
    }
    while (this.running < Math.min(CONNECTIONS, this.wanted)) this.connection(this.running++);
  }

  async connection(number) {
    try {
      while (number < Math.min(CONNECTIONS, this.wanted)) {
        const share = Math.floor(this.wanted / CONNECTIONS) + (number < this.wanted % CONNECTIONS ? 1 : 0);
        this.done += await this.one(share);
        this.report(`${this.done} requests answered`);
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        this.report(error.message);
        this.wanted = 0;
      }
    } finally {
      this.running -= 1;
    }
  }

  // Have so many requests answered; return how many there were.
  async one(count) {
    const options = { signal: this.stop.signal };
    const { protocol, model } = this.model.facts;
    if (protocol === "openai") {
      const prompt = Array.from({ length: count }, (_, i) => words(this.promptLength(i)));
      const body = { model, prompt, max_tokens: 16 + Math.floor(Math.random() * 48), temperature: 1, ignore_eos: true };
      await this.server.json("/v1/completions", body, options);
      return count;
    }
    return this.infer(count, options);
  }

  // Every fourth prompt is long where lengths are mixed: those are the prefills that others wait beside.
  promptLength(i) {
    const room = Math.max(8, Math.floor((this.model.facts.max_model_len || 256) / 3));
    if (this.length === "short") return 8;
    if (this.length === "long" || i % 4 === 3) return Math.min(220, room);
    return 4 + Math.floor(Math.random() * Math.min(24, room));
  }

  async infer(count, options) {
    const name = this.model.facts.models[0];
    const path = `/v2/models/${encodeURIComponent(name)}`;
    if (!this.inputs) {
      this.inputs = (await this.server.json(path)).inputs;
      const { parameters } = await this.server.json(`${path}/config`);
      this.frame = Number(parameters?.frame_size?.string_value || 1); // values of a stream's frame: lengths are multiples
    }
    const isBatch = this.model.system !== "batchmaker"; // there each request is one sequence
    const length = this.frame * (3 + Math.floor(Math.random() * 20));
    const text = this.inputs.filter((input) => input.name === "text"); // a form of its own, beside token ids
    const inputs = (text.length ? text : this.inputs).map(({ name: input, datatype, shape }) => {
      const filled = shape.map((size, i) => (Number(size) >= 0 ? Number(size) : i === 0 && isBatch ? count : length));
      const data = Array.from({ length: filled.reduce((a, b) => a * b, 1) }, () => value(datatype));
      return { name: input, datatype, shape: filled, data };
    });
    await this.server.json(`${path}/infer`, { inputs }, options);
    return isBatch ? count : 1;
  }
}

function words(count) {
  return Array.from({ length: count }, () => WORDS[Math.floor(Math.random() * WORDS.length)]).join(" ");
}

function value(datatype) {
  if (datatype === "BYTES") return "hello";
  if (datatype === "BOOL") return true;
  return datatype.startsWith("FP") || datatype === "BF16" ? Math.random() : 1;
}
