// Painting: patches over a photograph, where a patch looked, and a picture to take along.

// Cividis: even steps to every eye, with or without colour.
const RAMP = ["#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838"].map(
  (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
export const FELL_BACK = "#d55e00", HELD = "#56b4e9", NOBODY = "#8a93a3";

export const ramp = (share) => {
  const place = Math.min(Math.max(Number.isFinite(share) ? share : 0, 0), 1) * (RAMP.length - 1);
  const low = Math.min(Math.floor(place), RAMP.length - 2);
  const mixed = RAMP[low].map((value, c) => Math.round(value + (place - low) * (RAMP[low + 1][c] - value)));
  return `rgb(${mixed.join(" ")})`;
};

export const rampStyle = () => `linear-gradient(90deg, ${[0, 0.2, 0.4, 0.6, 0.8, 1].map(ramp).join(", ")})`;

// The colour of every patch, and the scale it was read from.
export const coloured = (layer, mode, colours, expert) => {
  const tokens = layer.patches;
  if (mode === "expert") {
    return { colours: tokens.map((t) => (t.order.length ? colours[t.order[0]] : NOBODY)), scale: null };
  }
  if (mode === "fallback") {
    return { colours: tokens.map((t) => (t.fellBack === null ? NOBODY : t.fellBack ? FELL_BACK : HELD)), scale: null };
  }
  const value = tokens.map((t) => (mode === "margin" ? t.margin : expert === null ? t.best : t.score[expert]));
  const known = value.filter(Number.isFinite);
  const low = Math.min(...known), high = Math.max(...known);
  return {
    colours: value.map((v) => (Number.isFinite(v) ? ramp((v - low) / (high - low || 1)) : NOBODY)),
    scale: known.length ? [low, high] : null,
  };
};

const box = (index, [height, width], size) => {
  const row = Math.floor(index / width), column = index % width;
  const left = Math.round((column * size) / width), top = Math.round((row * size) / height);
  return [left, top, Math.round(((column + 1) * size) / width) - left, Math.round(((row + 1) * size) / height) - top];
};

// A square canvas of `size` pixels: a cell a patch; its second expert in the lower right corner, as large as its weight.
export const paint = (context, layer, grid, size, { mode, colours, strength, numbers, expert }) => {
  const found = coloured(layer, mode, colours, expert);
  context.clearRect(0, 0, size, size);
  layer.patches.forEach((patch, index) => {
    const [left, top, width, height] = box(index, grid, size);
    const takesPart = expert === null || mode !== "expert" || patch.order.includes(expert);
    context.globalAlpha = takesPart ? strength : 0.06;
    context.fillStyle = mode === "expert" && expert !== null && takesPart ? colours[expert] : found.colours[index];
    context.fillRect(left, top, width, height);
    if (mode === "expert" && expert === null && patch.order.length > 1) {
      const side = Math.sqrt(2 * patch.weight[patch.order[1]]) * 0.8;
      context.fillStyle = colours[patch.order[1]];
      context.beginPath();
      context.moveTo(left + width, top + height * (1 - side));
      context.lineTo(left + width, top + height);
      context.lineTo(left + width * (1 - side), top + height);
      context.fill();
    }
    if (numbers && patch.order.length && width >= 14) {
      context.globalAlpha = 1;
      context.font = `600 ${Math.round(width * 0.42)}px system-ui, sans-serif`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.lineWidth = 3;
      context.strokeStyle = "#10131a";
      context.fillStyle = "#ffffff";
      const text = String(mode === "expert" && expert !== null && takesPart ? expert : patch.order[0]);
      context.strokeText(text, left + width / 2, top + height / 2);
      context.fillText(text, left + width / 2, top + height / 2);
    }
  });
  context.globalAlpha = 1;
  return found.scale;
};

// Where a patch looked: the photograph, dark where it hardly did.
export const paintAttention = (canvas, image, alpha, grid, own) => {
  const size = (canvas.width = canvas.height = 288);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0, size, size);
  const most = Math.max(...alpha) || 1;
  alpha.forEach((value, index) => {
    context.fillStyle = `rgb(10 14 22 / ${0.82 * (1 - Math.cbrt(value / most))})`;
    context.fillRect(...box(index, grid, size));
  });
  if (own >= 0) {
    context.lineWidth = 3;
    context.strokeStyle = "#ffffff";
    context.strokeRect(...box(own, grid, size));
  }
};

// Pictures to take along

const TITLED = "600 22px system-ui, sans-serif", PLAIN = "18px system-ui, sans-serif", INK = "#1c2230", LINE = 30;
export const GAP = 24, HEAD = 92;

// A white canvas with room for a head and for legends, [text, colour] of each entry, in columns of a width.
export const sheet = (width, height, columns, legends) => {
  const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
  context.font = PLAIN;
  const laid = legends.map((legend) => laidOut(context, legend, columns));
  canvas.width = width + 2 * GAP;
  canvas.height = HEAD + height + GAP + LINE * Math.max(...laid.map(({ lines }) => lines)) + GAP;
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.textBaseline = "middle";
  return { canvas, context, laid };
};

export const writeHead = (context, title, note, left, width) => {
  context.fillStyle = INK;
  context.font = TITLED;
  context.fillText(title, left, 32, width);
  context.font = PLAIN;
  context.fillText(note, left, 64, width);
};

export const writeLegend = (context, legend, { places }, left, top) => legend.forEach(([text, colour], entry) => {
  const x = left + places[entry][0], y = top + places[entry][1] * LINE;
  context.fillStyle = colour;
  context.fillRect(x, y, 18, 18);
  context.fillStyle = INK;
  context.fillText(text, x + 25, y + 10);
});

// Where the entries of a legend go: [left, line] of each, and the number of lines.
const laidOut = (context, legend, width) => {
  let left = 0, line = 0;
  const places = legend.map(([text]) => {
    const own = 25 + context.measureText(text).width + 22;
    if (left > 0 && left + own > width) [left, line] = [0, line + 1];
    left += own;
    return [left - own, line];
  });
  return { places, lines: line + 1 };
};

// All panels side by side with their titles and legends, as a canvas.
export const poster = (panels) => {
  const side = 672;
  const { canvas, context, laid } = sheet(panels.length * (side + GAP) - GAP, side, side, panels.map(({ legend }) => legend));
  panels.forEach(({ title, note, image, overlay, grey, legend }, number) => {
    const left = GAP + number * (side + GAP);
    writeHead(context, title, note, left, side);
    context.filter = grey ? "grayscale(1)" : "none";
    context.drawImage(image, left, HEAD, side, side);
    context.filter = "none";
    context.drawImage(overlay, left, HEAD, side, side);
    writeLegend(context, legend, laid[number], left, HEAD + side + GAP);
  });
  return canvas;
};
