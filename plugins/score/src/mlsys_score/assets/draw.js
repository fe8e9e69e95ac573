// The score on a canvas: bars of milliseconds above, squares below, and where a click falls.
import { causeColor, colors, fit, KINDS } from "./theme.js";

const LEFT = 58;
const BARS = 96;
const ROW = 16; // height of a row, where there is room for all
const LEAST_ROW = 5;
const MIN_ROWS = 8;
const FONT = "11px system-ui, sans-serif";

export class ScoreView {
  constructor(canvas, model) {
    this.canvas = canvas;
    this.model = model;
    this.width = 14; // of a column
    this.last = null; // index of the rightmost column; null: the newest
    this.selected = null; // {row, n}: n is a column's number, since indices move
    this.rows = [];
    this.rowHeight = ROW;
    this.from = 0;
    this.to = -1;
  }

  // Columns that fit.
  get capacity() {
    return Math.max(1, Math.floor((this.canvas.clientWidth - LEFT - 4) / this.width));
  }

  indexOf(number) {
    const columns = this.model.columns;
    return columns.length ? number - columns[0].n : -1;
  }

  draw() {
    const { model, canvas } = this;
    const count = model.columns.length;
    this.to = this.last === null ? count - 1 : Math.min(this.last, count - 1);
    this.from = Math.max(0, this.to - this.capacity + 1);
    const width = canvas.clientWidth;
    const room = Math.max(200, 0.58 * window.innerHeight - BARS - 16);
    const most = this.last === null ? Math.floor(room / LEAST_ROW) : Infinity; // live: the newest that fit
    this.rows = count ? model.rowsIn(this.from, this.to, most) : [];
    const row = (this.rowHeight = Math.max(LEAST_ROW, Math.min(ROW, Math.floor(room / Math.max(1, this.rows.length)))));
    const height = BARS + 10 + Math.max(MIN_ROWS * ROW, this.rows.length * row) + 6;
    const context = fit(canvas, width, height);
    context.font = FONT;
    context.textBaseline = "middle";
    const color = colors();
    const scale = this.scale();
    this.drawAxis(context, color, width, scale);
    const every = Math.ceil(12 / row); // labels need twelve pixels
    this.rows.forEach((number, i) => {
      const y = BARS + 10 + i * row;
      context.fillStyle = i % 2 ? color("--panel") : color("--stripe");
      context.fillRect(LEFT, y, width - LEFT, row);
      context.fillStyle = color("--quiet");
      context.textAlign = "right";
      if (i % every === 0) context.fillText(String(number), LEFT - 8, y + row / 2);
    });
    for (let i = this.from; i <= this.to; i++) this.drawColumn(context, color, i, scale);
  }

  scale() {
    let most = 0.01; // ms
    for (let i = this.from; i <= this.to; i++) most = Math.max(most, this.model.columns[i].ms);
    const step = 10 ** Math.floor(Math.log10(most));
    return [1, 2, 5, 10].map((factor) => factor * step).find((top) => top >= most);
  }

  drawAxis(context, color, width, scale) {
    context.textAlign = "right";
    context.fillStyle = color("--quiet");
    context.strokeStyle = color("--line");
    for (const share of [0, 0.5, 1]) {
      const y = BARS - share * (BARS - 14) + 0.5;
      context.beginPath();
      context.moveTo(LEFT, y);
      context.lineTo(width, y);
      context.stroke();
      context.fillText(share ? `${Number((share * scale).toPrecision(3))} ms` : "0", LEFT - 8, y);
    }
  }

  drawColumn(context, color, index, scale) {
    const column = this.model.columns[index];
    const x = LEFT + (index - this.from) * this.width;
    const gap = this.width > 6 ? 2 : 1;
    let y = BARS;
    for (const [cause, ms] of Object.entries(column.split)) {
      const height = (ms / scale) * (BARS - 14);
      context.fillStyle = causeColor(color, cause);
      context.fillRect(x, y - height, this.width - gap, height);
      y -= height;
    }
    // Where there are no kinds, a square has the colour of its column: of the cells, or the stage.
    const cause = this.model.system === "orca" ? null : causeColor(color, Object.keys(column.split)[0] || "");
    for (const square of column.squares) this.drawSquare(context, color, x, gap, square, cause);
    if (this.selected && column.n === this.selected.n) {
      const i = this.rows.indexOf(this.selected.row);
      context.strokeStyle = color("--ink");
      context.lineWidth = 2;
      if (i >= 0) context.strokeRect(x - 1, BARS + 10 + i * this.rowHeight, this.width, this.rowHeight);
      context.strokeRect(x - 1, 12, this.width, BARS - 11);
      context.lineWidth = 1;
    }
  }

  // Each kind has a shape of its own, so that colour is not needed to tell them apart.
  drawSquare(context, color, x, gap, [row, kind, tokens], cause) {
    const i = this.rows.indexOf(row);
    if (i < 0) return;
    const tall = this.rowHeight;
    const y = BARS + 10 + i * tall;
    const width = this.width - gap;
    const inset = tall > 9 ? 5 : 1;
    context.fillStyle = cause || color(KINDS[kind].color);
    if (kind === "x") {
      context.fillRect(x, y + tall / 2 - 1.5, width, 3);
      context.fillRect(x + width / 2 - 1.5, y + 1, 3, tall - 2);
    } else if (kind === "d") context.fillRect(x, y + inset, width, tall - 2 * inset + (tall > 9 ? 1 : 0));
    else if (kind === "g") {
      context.fillRect(x, y + inset, width, tall - 2 * inset + (tall > 9 ? 1 : 0));
      for (let i = 1; i < Math.min(tokens, 5); i++) context.fillRect(x + (i - 1) * 3, y + 1, 2, 3);
    } else {
      context.fillRect(x, y + 1, width, tall - 1 - (tall > 9 ? 1 : 0));
      if (kind === "r") {
        context.fillStyle = color("--panel");
        context.fillRect(x + width / 2 - 1.5, y + tall / 2 - 1.5, 3, 3);
      }
    }
  }

  // The square, or the column, at a point of the canvas: {row, n}; row is null above the squares.
  at(x, y) {
    const index = this.from + Math.floor((x - LEFT) / this.width);
    if (x < LEFT || index > this.to || index < this.from || !this.model.columns[index]) return null;
    const row = this.rows[Math.floor((y - BARS - 10) / this.rowHeight)];
    return { n: this.model.columns[index].n, row: y < BARS + 10 || row === undefined ? null : row };
  }

  // Move the selection to the nearest square in a direction; keeps it in view.
  move(dx, dy) {
    const columns = this.model.columns;
    if (!columns.length) return;
    if (!this.selected || this.indexOf(this.selected.n) < 0) {
      const index = this.to;
      this.selected = { n: columns[index].n, row: columns[index].squares[0] ? columns[index].squares[0][0] : null };
      return;
    }
    let { row, n } = this.selected;
    let index = this.indexOf(n);
    if (dy) {
      const present = columns[index].squares.map((square) => square[0]).sort((a, b) => a - b);
      const next = present.indexOf(row) + dy;
      if (present.length) row = present[Math.max(0, Math.min(present.length - 1, next))];
    }
    if (dx) {
      let next = index + dx;
      while (row !== null && columns[next] && !columns[next].at.has(row)) next += dx;
      if (columns[next]) index = next;
    }
    this.selected = { row, n: columns[index].n };
    this.reveal(index);
  }

  reveal(index) {
    if (index < this.from || index > this.to) this.last = Math.min(this.model.columns.length - 1, index + (this.capacity >> 1));
  }
}
