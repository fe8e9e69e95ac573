// Checks of the page's pure modules; run by test_scripts.py beside copies of them.
import assert from "node:assert/strict";
import { Model, holders } from "./model.js";
import { explain, longestWaits, sentence } from "./explain.js";
import { parseMarkdown } from "./markdown.js";
import { parseEvent } from "./server.js";

let count = 0;
const check = (name, run) => {
  run();
  count += 1;
};

const row = (number, opened, ended = null) => ({ row: number, name: "", opened, prompt: 4, max_new: 9, cached: 0, ended, reason: null });
const column = (n, t, ms, split, squares, more = {}) => ({ n, t, ms, split, squares, waiting: 0, ...more });
const load = (rows, columns, more = {}) => {
  const model = new Model();
  model.load({ system: "orca", unit: "iteration", now: 0, waiting: 0, rows, columns, tables: [], ...more });
  return model;
};
const causes = (wait) => Object.fromEntries(wait.parts.map((part) => [part.cause + (part.row || ""), Math.round(part.ms)]));
const total = (wait) => wait.parts.reduce((sum, part) => sum + part.ms, 0);

check("a decode beside another request's prefill", () => {
  const model = load(
    [row(1, 0), row(17, 5)],
    [
      column(1, 0, 10, { prefill: 10 }, [[1, "p", 4, 0]]),
      column(2, 22, 29, { decode: 0, prefill: 29 }, [[1, "d", 1, 0], [17, "p", 100, 0]]),
    ],
  );
  const wait = explain(model, 1, 1);
  assert.deepEqual(causes(wait), { beside17: 29, between: 12 });
  assert.equal(wait.total, 41);
  assert.equal(sentence(wait), "41 ms: 29 beside request 17's prefill, 12 between two iterations");
});

check("a first token: queue, then its own prefill beside another", () => {
  const model = load(
    [row(1, 0), row(2, 3)],
    [
      column(1, 0, 10, { decode: 10 }, [[1, "d", 1, 0]]),
      column(2, 10, 8, { decode: 2, prefill: 6 }, [[1, "d", 1, 0], [2, "p", 2, 0], [3, "p", 1, 0]]),
      column(3, 20, 5, { decode: 1, prefill: 4 }, [[1, "d", 1, 0], [2, "p", 2, 0]]),
      column(4, 25, 5, { decode: 5 }, [[1, "d", 1, 0], [2, "d", 1, 0]]),
    ],
  );
  const wait = explain(model, 2, 2);
  assert.deepEqual(causes(wait), { queue: 7, prefill: 8, beside3: 2, run: 3, between: 2 });
  assert.ok(Math.abs(total(wait) - wait.total) < 1e-9 && wait.total === 22);
  assert.deepEqual(causes(explain(model, 2, 3)), { run: 5 }, "from its first token on");
});

check("of more rows than fit, the newest are in view", () => {
  const model = load([], [column(1, 0, 1, {}, [[1, "d", 1, 0], [2, "d", 1, 0]]), column(2, 1, 1, {}, [[3, "d", 1, 0]])]);
  assert.deepEqual([model.rowsIn(0, 1), model.rowsIn(0, 1, 2), model.rowsIn(0, 0, 9)], [[1, 2, 3], [2, 3], [1, 2]]);
});

check("a preempted request waits for blocks, and computes again", () => {
  const model = load(
    [row(1, 0)],
    [
      column(1, 0, 2, { prefill: 2 }, [[1, "p", 4, 0]]),
      column(2, 2, 2, { decode: 2 }, [[1, "d", 1, 0]]),
      column(3, 4, 10, { decode: 10 }, [[1, "x", 0, 0], [2, "d", 1, 0]]),
      column(4, 14, 6, { prefill: 6 }, [[1, "r", 5, 0]]),
      column(5, 20, 2, { decode: 2 }, [[1, "d", 1, 0]]),
    ],
  );
  assert.deepEqual(causes(explain(model, 1, 3)), { preempted: 10, again: 6 });
  assert.deepEqual(causes(explain(model, 1, 4)), { run: 2 });
});

check("a worker's death", () => {
  const model = load(
    [row(1, 0)],
    [
      column(1, 0, 2, { decode: 2 }, [[1, "d", 1, 0]]),
      column(2, 902, 3, { decode: 3 }, [[1, "r", 1, 0]]),
      column(3, 905, 2, { decode: 2 }, [[1, "d", 1, 0]]),
    ],
  );
  assert.equal(sentence(explain(model, 1, 1)), "903 ms: 900 until another worker went on, 3.0 running");
  assert.deepEqual(causes(explain(model, 1, 2)), { run: 2 });
});

check("an iteration that ran without it", () => {
  const model = load(
    [row(1, 0)],
    [
      column(1, 0, 2, { decode: 2 }, [[1, "d", 1, 0]]),
      column(2, 2, 7, { prefill: 7 }, [[2, "p", 90, 0]]),
      column(3, 9, 2, { decode: 2 }, [[1, "d", 1, 0]]),
    ],
  );
  assert.deepEqual(causes(explain(model, 1, 2)), { held: 7, run: 2 });
  assert.deepEqual(longestWaits(model, 0, 2, 3), [
    { row: 1, index: 2, total: 9 },
    { row: 1, index: 0, total: 2 },
  ]);
  assert.deepEqual(longestWaits(model, 1, 2, 3), [{ row: 1, index: 2, total: 9 }], "those that ended in view");
});

check("the wait for a first token is its prefill's", () => {
  const columns = [
    column(1, 5, 5, { prefill: 5 }, [[1, "p", 4, 0]]),
    column(2, 10, 5, { prefill: 5 }, [[1, "p", 4, 0]]),
    column(3, 15, 1, { decode: 1 }, [[1, "d", 1, 0]]),
  ];
  const waits = longestWaits(load([row(1, 2)], columns), 0, 2, 9);
  assert.deepEqual(waits, [{ row: 1, index: 1, total: 13 }, { row: 1, index: 2, total: 1 }]);
  const model = load([row(1, 2)], columns);
  for (const wait of waits) assert.equal(explain(model, 1, wait.index).total, wait.total, "as explained");
});

check("parts always add up to the wait", () => {
  let seed = 1;
  const random = (n) => (seed = (seed * 48271) % 2147483647) % n;
  for (let trial = 0; trial < 200; trial++) {
    const columns = [];
    let t = 0;
    for (let n = 1; n <= 12; n++) {
      t += random(4);
      const squares = [];
      for (let r = 1; r <= 4; r++) if (random(3)) squares.push([r, "pdgxr"[random(5)], 1 + random(9), 0]);
      const ms = 1 + random(9);
      const prefill = random(ms);
      columns.push(column(n, t, ms, { prefill, decode: ms - prefill }, squares));
      t += ms;
    }
    const model = load([1, 2, 3, 4].map((r) => row(r, r)), columns);
    model.columns.forEach((each, index) => {
      for (const [r, kind] of each.squares) {
        if (kind === "x") continue;
        const wait = explain(model, r, index);
        assert.ok(Math.abs(total(wait) - wait.total) < 1e-6, `${total(wait)} of ${wait.total}`);
        assert.match(sentence(wait), /^[\d.]+ ms: /);
      }
    });
  }
});

check("block tables grow, are shared, and are freed", () => {
  const model = load(
    [row(1, 0), row(2, 0)],
    [
      column(1, 0, 1, {}, [[1, "p", 4, 0]], { tables: [[1, 0, [5, 6]]] }),
      column(2, 1, 1, {}, [[1, "d", 1, 0], [2, "p", 4, 0]], { tables: [[1, 2, [7]], [2, 0, [5, 8]]] }),
      column(3, 2, 1, {}, [[2, "x", 0, 0], [1, "d", 1, 0]]),
    ],
  );
  assert.deepEqual([...model.tables], [[1, [5, 6, 7]]]);
  assert.equal(holders(model.tablesAt(1)).get(5), 2);
  model.apply({ now: 9, waiting: 0, rows: [row(1, 0, 3)], columns: [] });
  assert.equal(model.tables.size, 0);
});

check("markdown has no HTML and no address but http", () => {
  assert.deepEqual(parseMarkdown("<img src=x onerror=alert(1)>"), [{ tag: "p", children: ["<img src=x onerror=alert(1)>"] }]);
  assert.deepEqual(parseMarkdown("[a](javascript:alert(1))")[0].children.map((each) => each.tag || "text"), ["text", "text"]);
  assert.deepEqual(parseMarkdown("[a](https://e.org)")[0].children, [{ tag: "a", href: "https://e.org", children: ["a"] }]);
  assert.deepEqual(parseMarkdown("- a **b**\n- `c*d*`"), [
    {
      tag: "ul",
      children: [
        { tag: "li", children: ["a ", { tag: "strong", children: ["b"] }] },
        { tag: "li", children: [{ tag: "code", children: ["c*d*"] }] },
      ],
    },
  ]);
  assert.deepEqual(parseMarkdown("```js\n<b>\n"), [{ tag: "pre", children: [{ tag: "code", children: ["<b>\n"] }] }]);
  const tags = new Set();
  const walk = (nodes) => nodes.forEach((node) => typeof node !== "string" && (tags.add(node.tag), walk(node.children)));
  walk(parseMarkdown(">".repeat(500) + " deep\n# T\n1. x\n> q\n" + "*".repeat(300)));
  const allowed = ["p", "h3", "h4", "h5", "h6", "ul", "ol", "li", "pre", "code", "strong", "em", "a", "blockquote"];
  for (const tag of tags) assert.ok(allowed.includes(tag), tag);
});

check("events", () => {
  assert.deepEqual(parseEvent("event: delta\ndata: {}"), { event: "delta", data: "{}" });
  assert.deepEqual(parseEvent("id: 4\ndata: a\ndata: b"), { event: "message", data: "a\nb" });
});

console.log(`${count} checks passed`);
