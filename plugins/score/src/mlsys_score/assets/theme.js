// Colours of the canvases, read from the style sheet, so that both follow the reader's light or dark setting.

export const KINDS = {
  p: { name: "prefill", color: "--prefill" },
  d: { name: "decode", color: "--decode" },
  g: { name: "accepted guess", color: "--guess" },
  x: { name: "preempted", color: "--preempted" },
  r: { name: "recovered", color: "--recovered" },
};
const CAUSES = { prefill: "--prefill", decode: "--decode" };

export function colors() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(name).trim();
}

export function causeColor(color, cause) {
  if (CAUSES[cause]) return color(CAUSES[cause]);
  let hash = 7;
  for (const letter of cause) hash = (hash * 31 + letter.charCodeAt(0)) % 360;
  return `hsl(${hash} 55% 52%)`;
}

export function rowColor(row) {
  return `hsl(${(row * 137) % 360} 60% 55%)`;
}

// Fit a canvas to its box and the screen's pixels; return its context, in CSS pixels.
export function fit(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
