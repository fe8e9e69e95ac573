// Why a token waited, from the columns alone. Pure: no document, no clock.

const RUN = "pdgr"; // kinds of squares that ran

// Place of the token before the one of `row` at columns[index]: its column's index, or -1 for the first token.
export function previousToken(model, row, index) {
  let next = index;
  for (let i = index - 1; i >= 0; i--) {
    const square = model.columns[i].at.get(row);
    if (!square || !RUN.includes(square[1])) continue;
    if ("dg".includes(square[1]) || "dg".includes(model.columns[next].at.get(row)[1])) return i;
    next = i;
  }
  return -1;
}

// The wait that ended with the square of `row` in columns[index]: {total, parts}, each part {cause, row, ms}.
// Causes: queue, held (not in the batch), preempted, between (iterations), died (its worker did), prefill (its own),
// again (its own, once more), beside (another row's prefill), run (its own decode, shared with others).
export function explain(model, row, index) {
  const last = model.columns[index];
  const previous = previousToken(model, row, index);
  const facts = model.rows.get(row) || {};
  const first = model.columns.findIndex((column) => column.at.has(row));
  let begin;
  if (previous >= 0) begin = model.columns[previous].end;
  else if (facts.opened !== null && facts.opened !== undefined) begin = facts.opened;
  else begin = model.columns[first].t;
  const spent = new Map();
  const add = (cause, ms, other = 0) => {
    if (ms <= 0) return;
    const key = `${cause} ${other}`;
    const part = spent.get(key) || { cause, row: other, ms: 0 };
    part.ms += ms;
    spent.set(key, part);
  };
  let at = begin;
  let others = 0;
  let idle = previous >= 0 ? "between" : "queue";
  for (let i = Math.max(0, previous + 1); i <= index; i++) {
    const column = model.columns[i];
    if (column.lane !== last.lane || column.end <= begin) continue;
    const square = column.at.get(row);
    if (square && !RUN.includes(square[1])) idle = "preempted";
    const goesOn = square && square[1] === "r" && idle === "between"; // not preempted: its worker has died
    if (column.t > at) add(goesOn ? "died" : idle, column.t - at);
    const overlap = column.end - Math.max(at, column.t);
    at = Math.max(at, column.end);
    if (!square || !RUN.includes(square[1])) {
      add(idle === "between" ? "held" : idle, overlap);
      continue;
    }
    idle = "between";
    const share = column.ms > 0 ? overlap / column.ms : 0;
    const left = share * divide(column, row, (cause, ms, other) => add(cause, share * ms, other));
    others = Math.max(others, column.squares.filter(([, kind]) => kind === "d" || kind === "g").length - 1);
    add("run", left);
  }
  const parts = [...spent.values()].sort((a, b) => b.ms - a.ms);
  return { total: Math.max(0, last.end - begin), parts, others, from: begin, to: last.end };
}

// Give out a column's prefill time by the rows of each; return what is left: the decodes.
function divide(column, row, give) {
  const ms = column.split.prefill || 0;
  const prefills = column.squares.filter(([, kind]) => kind === "p" || kind === "r");
  const total = prefills.reduce((sum, square) => sum + square[2], 0);
  if (!total || !ms) return column.ms;
  for (const [other, kind, count] of prefills) {
    const part = (ms * count) / total;
    if (other !== row) give("beside", part, other);
    else give(kind === "r" ? "again" : "prefill", part, 0);
  }
  return column.ms - ms;
}

export function format(ms) {
  return ms >= 10000 ? `${(ms / 1000).toFixed(1)} s` : ms >= 10 ? ms.toFixed(0) : ms.toFixed(ms >= 0.95 || !ms ? 1 : 2);
}

// The explanation as a sentence: "41 ms: 12 in the queue, 29 beside request 17's prefill".
export function sentence(wait, unit = "iteration") {
  const words = {
    queue: () => "in the queue",
    held: () => `while the ${unit} ran without it`,
    preempted: () => "preempted, until there were blocks again",
    died: () => "until another worker went on",
    between: () => `between two ${unit}s`,
    prefill: () => "for its own prefill",
    again: () => "to compute again what it had lost",
    beside: (part) => `beside request ${part.row}'s prefill`,
    run: () => (wait.others > 0 ? `running with ${wait.others} other${wait.others > 1 ? "s" : ""}` : "running"),
  };
  const total = wait.total >= 10000 ? format(wait.total) : `${format(wait.total)} ms`;
  const shown = wait.parts.filter((part) => part.ms >= Math.min(0.05, 0.02 * wait.total));
  const parts = shown.map((part) => `${format(part.ms)} ${words[part.cause](part)}`);
  return `${total}: ${parts.join(", ") || "nothing to wait for"}`;
}

// The longest waits that ended in columns[from..to]: [{row, index, total}], the longest first. A request's first wait is
// that for its first token, which its last prefill gives.
export function longestWaits(model, from, to, count) {
  const found = [];
  const ended = new Map(); // row -> {end, index} of its last token, or of its last prefill so far
  for (let i = 0; i <= to; i++) {
    const column = model.columns[i];
    for (const [row, kind] of column.squares) {
      if (kind === "x") continue;
      const before = ended.get(row);
      if (kind === "p" || kind === "r") {
        if (!before || before.isPrefill) ended.set(row, { end: column.end, index: i, isPrefill: true });
        continue;
      }
      const opened = (model.rows.get(row) || {}).opened;
      const isOpened = opened !== null && opened !== undefined;
      if (before && before.isPrefill && isOpened && before.index >= from)
        found.push({ row, index: before.index, total: before.end - opened });
      if (i >= from && (before || isOpened)) found.push({ row, index: i, total: column.end - (before ? before.end : opened) });
      ended.set(row, { end: column.end, index: i, isPrefill: false });
    }
  }
  return found.sort((a, b) => b.total - a.total).slice(0, count);
}
