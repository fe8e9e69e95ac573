// The K/V block map: one cell a block, by the request that holds it; blocks that several share are tinted.
import { colors, fit, rowColor } from "./theme.js";
import { holders } from "./model.js";

const CELL = 9;

export function drawBlocks(canvas, model, tables, selectedRow) {
  const total = model.facts.num_blocks || 0;
  const lanes = model.facts.num_lanes || 1;
  const width = canvas.clientWidth;
  if (!total || !width) return null;
  const perLine = Math.max(1, Math.floor(width / CELL));
  // Where there are more blocks than 24 lines have cells, a cell stands for several.
  const each = Math.max(1, Math.ceil(total / (perLine * 24)));
  const lines = Math.ceil(total / each / perLine);
  const context = fit(canvas, width, lanes * (lines * CELL + 6));
  const color = colors();
  let used = 0;
  let shared = 0;
  for (let lane = 0; lane < lanes; lane++) {
    const mine = new Map([...tables].filter(([row]) => (model.lanes.get(row) || 0) === lane));
    const owner = new Map();
    for (const [row, blocks] of mine) for (const block of blocks) owner.set(block, row);
    const counts = holders(mine);
    used += counts.size;
    for (let cell = 0; cell * each < total; cell++) {
      let holder = null;
      let isShared = false;
      let isSelected = false;
      for (let block = cell * each; block < Math.min(total, (cell + 1) * each); block++) {
        if (!owner.has(block)) continue;
        holder = owner.get(block);
        isShared = isShared || counts.get(block) > 1;
        isSelected = isSelected || (selectedRow !== null && (mine.get(selectedRow) || []).includes(block));
      }
      const x = (cell % perLine) * CELL;
      const y = lane * (lines * CELL + 6) + Math.floor(cell / perLine) * CELL;
      context.fillStyle = holder === null ? color("--stripe") : isShared ? color("--shared") : rowColor(holder);
      context.fillRect(x, y, CELL - 1, CELL - 1);
      if (isSelected) {
        context.strokeStyle = color("--ink");
        context.strokeRect(x + 0.5, y + 0.5, CELL - 2, CELL - 2);
      }
    }
    for (const count of counts.values()) if (count > 1) shared += 1;
  }
  return { used, shared, total: total * lanes };
}
