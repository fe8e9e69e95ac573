// The score as data: rows, columns and block tables, from a snapshot and the deltas after it. No document.

const MAX_COLUMNS = 2048;
export const PREEMPTED = "x";

export class Model {
  constructor() {
    this.clear();
  }

  clear() {
    this.system = "";
    this.unit = "iteration";
    this.facts = {};
    this.started = 0; // seconds since the epoch
    this.now = 0; // milliseconds, as all times below
    this.waiting = 0;
    this.rows = new Map(); // number -> row
    this.columns = []; // by number; each has `at`: row -> square
    this.firstTables = new Map(); // block tables before the first column
    this.tables = new Map(); // and after the last
    this.lanes = new Map(); // row -> lane
  }

  load(snapshot) {
    this.clear();
    this.system = snapshot.system;
    this.unit = snapshot.unit;
    this.facts = snapshot.facts || {};
    this.started = snapshot.started || 0;
    for (const [row, blocks] of snapshot.tables || []) {
      this.firstTables.set(row, blocks);
      this.tables.set(row, blocks);
    }
    this.apply(snapshot);
  }

  apply(delta) {
    this.now = delta.now;
    this.waiting = delta.waiting;
    for (const row of delta.rows) {
      this.rows.set(row.row, row);
      if (row.ended !== null) this.tables.delete(row.row);
    }
    for (const column of delta.columns) {
      this.columns.push(column);
      column.lane = column.lane || 0;
      column.end = column.t + column.ms;
      column.at = new Map(column.squares.map((square) => [square[0], square]));
      for (const [row] of column.squares) this.lanes.set(row, column.lane);
      changeTables(this.tables, column);
    }
    for (const row of delta.rows) if (row.ended !== null) this.tables.delete(row.row);
    if (this.columns.length > MAX_COLUMNS) this.forget(this.columns.length - MAX_COLUMNS);
  }

  forget(count) {
    for (const column of this.columns.splice(0, count)) changeTables(this.firstTables, column);
    const first = this.columns[0].t;
    for (const [number, row] of this.rows)
      if (row.ended !== null && row.ended < first) {
        this.rows.delete(number);
        this.firstTables.delete(number);
        this.lanes.delete(number);
      }
  }

  // Block tables right after the column at `index`.
  tablesAt(index) {
    if (index >= this.columns.length - 1) return this.tables;
    const tables = new Map(this.firstTables);
    for (let i = 0; i <= index; i++) changeTables(tables, this.columns[i]);
    const at = this.columns[index].end;
    for (const number of tables.keys()) {
      const row = this.rows.get(number);
      if (!row || (row.ended !== null && row.ended <= at)) tables.delete(number);
    }
    return tables;
  }

  // Numbers of the rows with a square in columns[from..to], by number.
  rowsIn(from, to, most = Infinity) {
    const found = new Set();
    for (let i = from; i <= to; i++) for (const [row] of this.columns[i].squares) found.add(row);
    const rows = [...found].sort((a, b) => a - b);
    return rows.slice(Math.max(0, rows.length - most));
  }
}

function changeTables(tables, column) {
  for (const [row, kind] of column.squares) if (kind === PREEMPTED) tables.delete(row);
  for (const [row, first, blocks] of column.tables || [])
    tables.set(row, [...(tables.get(row) || []).slice(0, first), ...blocks]);
}

// Holders of each block: block -> number of tables that have it.
export function holders(tables) {
  const counts = new Map();
  for (const blocks of tables.values()) for (const block of blocks) counts.set(block, (counts.get(block) || 0) + 1);
  return counts;
}
