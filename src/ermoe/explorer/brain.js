// Brains: three slices through the chosen cube, an overlay by cube, and the age without hidden cubes.
import { $, alertOf, ask, bytes, element, floats, percent, post, save, say, swatch, themed } from "./ask.js";
import { GAP, HEAD, sheet, writeHead, writeLegend } from "./draw.js";

const TISSUES = { wm: ["white matter", "#f0e442"], gm: ["grey matter", "#cc79a7"], csf: ["fluid", "#56b4e9"] };
const CUTS = [["sagittal", 0, 1, 2], ["coronal", 1, 0, 2], ["axial", 2, 0, 1]]; // name, axis through, axis across, axis up
const state = { scan: 0, layer: 0, overlay: "experts", strength: 0.5, cube: [0, 0, 0], hidden: new Set() };
let setup, brain = null, change = null, asking = 0, hiding = 0, remembering = 0;

const numberOf = ([x, y, z]) => (x * brain.grid[1] + y) * brain.grid[2] + z;
const years = (value) => (Math.abs(value) < 0.005 ? "less than 0.01 years" : `${value > 0 ? "+" : "−"}${Math.abs(value).toFixed(2)} years`);

const remember = () => {
  clearTimeout(remembering);
  remembering = setTimeout(() => history.replaceState(null, "", `#${view()}`), 120);
};
const view = () => new URLSearchParams({
  scan: state.scan, layer: state.layer, overlay: state.overlay, strength: state.strength, cube: state.cube.join(","), hidden: [...state.hidden].join(","),
}).toString();

// Colours of cubes

const highest = () => Math.max(...(change ?? []).filter((value) => value !== null).map(Math.abs), 1e-6);
const colourOf = (cube) => {
  if (state.overlay === "experts") {
    const expert = brain.layers[state.layer].expert[cube];
    return expert < 0 ? null : setup.colours[expert];
  }
  if (state.overlay === "tissue") return brain.tissue[cube] < 0 ? null : TISSUES[setup.tissues[brain.tissue[cube]]][1];
  if (state.overlay === "occlusion" && change?.[cube] != null) {
    const share = change[cube] / highest(), pale = Math.round(255 * (1 - Math.abs(share)));
    return share > 0 ? `rgb(213 ${94 + Math.round(pale * 0.6)} ${pale})` : `rgb(${pale} ${114 + Math.round(pale * 0.5)} 178)`;
  }
  return null;
};

const drawSlice = (canvas, [name, through, across, up]) => {
  const { shape, edge, t1 } = brain, zoom = Math.max(2, Math.round(480 / Math.max(...shape)));
  const width = shape[across], height = shape[up];
  const context = canvas.getContext("2d");
  const small = new OffscreenCanvas(width, height), ink = small.getContext("2d"), pixels = ink.createImageData(width, height);
  const at = Math.min(state.cube[through] * edge + Math.floor(edge / 2), shape[through] - 1), place = [0, 0, 0];
  place[through] = at;
  for (let u = 0; u < width; u++) {
    for (let v = 0; v < height; v++) {
      place[across] = u;
      place[up] = v;
      const grey = t1[(place[0] * shape[1] + place[1]) * shape[2] + place[2]], spot = 4 * ((height - 1 - v) * width + u);
      pixels.data.set([grey, grey, grey, 255], spot);
    }
  }
  ink.putImageData(pixels, 0, 0);
  canvas.width = width * zoom;
  canvas.height = height * zoom;
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
  const cube = [0, 0, 0];
  cube[through] = state.cube[through];
  for (cube[across] = 0; cube[across] < brain.grid[across]; cube[across]++) {
    for (cube[up] = 0; cube[up] < brain.grid[up]; cube[up]++) {
      const left = cube[across] * edge * zoom, bottom = canvas.height - cube[up] * edge * zoom, side = edge * zoom;
      const number = numberOf(cube), colour = colourOf(number);
      if (colour) {
        context.globalAlpha = state.strength;
        context.fillStyle = colour;
        context.fillRect(left, bottom - side, side - 1, side - 1);
        context.globalAlpha = 1;
      }
      if (state.hidden.has(number)) {
        context.fillStyle = "#10131a";
        context.fillRect(left, bottom - side, side - 1, side - 1);
        context.strokeStyle = "#ffffff";
        context.lineWidth = 2;
        context.beginPath();
        context.moveTo(left, bottom - side);
        context.lineTo(left + side, bottom);
        context.stroke();
      }
    }
  }
  context.strokeStyle = "#ffffff";
  context.lineWidth = 3;
  context.strokeRect(state.cube[across] * edge * zoom, canvas.height - (state.cube[up] + 1) * edge * zoom, edge * zoom, edge * zoom);
};

const draw = () => {
  if (!brain) return;
  $("slices").style.gridTemplateColumns = CUTS.map(([, , across]) => `minmax(0, ${brain.shape[across]}fr)`).join(" "); // one scale for all
  document.querySelectorAll("#slices canvas").forEach((canvas, number) => drawSlice(canvas, CUTS[number]));
  $("layer-name").textContent = setup.layers[state.layer].name;
  ["x", "y", "z"].forEach((name, axis) => {
    $(name).max = brain.grid[axis] - 1;
    $(name).value = state.cube[axis];
    $(`${name}-name`).textContent = `${state.cube[axis] + 1} of ${brain.grid[axis]}`;
  });
  drawLegend();
  drawCube();
  drawTissues();
};

const legendOf = () => {
  return state.overlay === "experts" ? setup.colours.slice(0, setup.layers[state.layer].experts).map((colour, e) => [colour, `expert ${e}`])
    : state.overlay === "tissue" ? setup.tissues.map((name) => [TISSUES[name][1], TISSUES[name][0]])
      : state.overlay === "occlusion" ? [["#d55e00", "hidden, the brain looks older"], ["#0072b2", "younger"]] : [];
};

const drawLegend = () => {
  const parts = legendOf();
  $("legend").replaceChildren(...parts.map(([colour, text]) => element("span", { class: "chip" }, swatch(colour), ` ${text}`)));
  if (state.overlay === "occlusion") $("legend").append(!brain.worth ? " the ridge alone answers: no cube changes anything" : change ? ` up to ${highest().toFixed(2)} years` : " every cube is hidden in turn …");
};

const drawCube = () => {
  const number = numberOf(state.cube), layer = brain.layers[state.layer], experts = setup.layers[state.layer].experts;
  const expert = layer.expert[number], score = [...layer.score.subarray(number * experts, (number + 1) * experts)];
  const weight = [...layer.weight.subarray(number * experts, (number + 1) * experts)];
  $("where").textContent = `Cube ${state.cube.map((value) => value + 1).join(", ")}`;
  $("hide").textContent = state.hidden.has(number) ? "Show this cube" : "Hide this cube";
  const isBrain = brain.tissue[number] >= 0;
  $("hide").disabled = !isBrain;
  const alone = change?.[number] == null ? "" : ` Hidden alone it changes the age by ${years(change[number])}.`;
  $("said").textContent = isBrain ? `Mostly ${TISSUES[setup.tissues[brain.tissue[number]]][0]}; goes to ${expert < 0 ? "no expert" : `expert ${expert}`}.${alone}` : "No brain here.";
  const low = Math.min(0, ...score), high = Math.max(...score, low + 1e-6), at = (value) => (100 * (value - low)) / (high - low);
  const head = element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "expert"), element("th", { scope: "col" }, "score"), element("th", { scope: "col", class: "number" }, "score"), element("th", { scope: "col", class: "number" }, "weight")));
  const rows = !isBrain ? [] : score.map((value, e) => element("tr", { class: weight[e] > 0 ? "chosen" : null }, element("th", { scope: "row" }, swatch(setup.colours[e]), ` ${e}`),
    element("td", {}, element("span", { class: "scale", "aria-hidden": "true" }, element("span", { class: "bar", style: `background:${setup.colours[e]};left:${at(Math.min(value, 0))}%;width:${at(Math.max(value, 0)) - at(Math.min(value, 0))}%` }))),
    element("td", { class: "number" }, value.toFixed(3)), element("td", { class: "number" }, weight[e] > 0 ? percent(weight[e]) : "–")));
  $("scores").replaceChildren(...(rows.length ? [head, element("tbody", {}, ...rows)] : []));
};

const drawTissues = () => {
  const head = element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "expert"), ...setup.tissues.map((name) => element("th", { scope: "col", class: "wide" }, TISSUES[name][0]))));
  const rows = brain.layers[state.layer].tissues.map(({ own, shuffled, sd }, e) => element("tr", {}, element("th", { scope: "row" }, swatch(setup.colours[e]), ` ${e}`),
    ...own.map((value, t) => element("td", {}, own.some((v) => v) ? `${(100 * value).toFixed(0)}\u00a0% (${(100 * shuffled[t]).toFixed(0)}±${(100 * sd[t]).toFixed(0)})` : "–"))));
  $("tissues").replaceChildren(head, element("tbody", {}, ...rows));
};

// Asking

const open = async (scan, keeps = false) => {
  state.scan = scan;
  if (!keeps) state.hidden.clear();
  const ticket = ++asking;
  hiding++; // what is still to come is of another scan
  change = null;
  for (const button of document.querySelectorAll("#scans button")) button.setAttribute("aria-pressed", String(Number(button.dataset.scan) === scan));
  say("Preparing the scan …");
  try {
    const told = await post("brain", { scan });
    if (ticket !== asking) return;
    brain = { ...told, t1: bytes(told.t1), layers: told.layers.map((layer) => ({ ...layer, score: floats(layer.score), weight: floats(layer.weight) })) };
    state.cube = brain.grid.map((size, axis) => (keeps ? Math.min(state.cube[axis], size - 1) : Math.floor(size / 2)));
    $("age").textContent = `${brain.age.toFixed(1)} years`;
    $("age-note").textContent = `${brain.known === null ? "" : `in truth ${brain.known.toFixed(1)}; `}experts of network ${brain.network}${brain.worth < 1 ? `, which counts ${percent(brain.worth)} of what it adds to the ridge` : ""}`;
    say("");
    alertOf("");
    draw();
    hide();
    performance.mark("first picture");
    if (state.overlay === "occlusion") occlude();
    frame();
  } catch (problem) {
    if (ticket !== asking) return;
    clear();
    alertOf(problem);
  }
  remember();
};

// Nothing is known about the scan that was asked for.
const clear = () => {
  brain = null;
  for (const canvas of document.querySelectorAll("#slices canvas")) canvas.width = canvas.height = 1;
  for (const name of ["age", "age-note", "without", "said"]) $(name).textContent = "";
  for (const name of ["scores", "tissues", "legend"]) $(name).replaceChildren();
  say("");
};

const hide = async () => {
  if (!brain) return;
  const ticket = ++hiding, hidden = [...state.hidden].sort((a, b) => a - b);
  if (!brain.worth) { $("without").textContent = "The network is believed in nothing here, the ridge alone answers: hiding changes no age."; return; }
  if (!hidden.length) { $("without").textContent = "Nothing is hidden."; return; }
  try {
    const { age } = await post("hide", { scan: state.scan, cubes: hidden });
    if (ticket !== hiding) return;
    $("without").textContent = `Without ${hidden.length === 1 ? "one cube" : `${hidden.length} cubes`}: ${age.toFixed(1)} years (${years(age - brain.age)}).`;
    alertOf("");
  } catch (problem) { alertOf(problem); }
};

const toggle = (number) => {
  if (!(brain?.tissue[number] >= 0)) return;
  if (!state.hidden.delete(number)) state.hidden.add(number);
  draw();
  hide();
  remember();
};

const occlude = async () => {
  const ticket = asking;
  if (!brain?.worth) return;
  try {
    for (;;) {
      const told = await post("occlude", { scan: state.scan });
      if (ticket !== asking) return;
      change = told.change;
      draw();
      say(told.done < told.of ? `Hiding every cube in turn: ${told.done} of ${told.of}.` : "");
      if (told.done >= told.of) { frame(); return; }
      if (state.overlay !== "occlusion") return;
    }
  } catch (problem) { alertOf(problem); }
};

const frame = () => {
  if (!$("turn").open || !brain || state.overlay === "none") return;
  const source = `api/view?scan=${state.scan}&layer=${state.layer}&overlay=${state.overlay}`;
  if (state.overlay === "occlusion" || $("frame").getAttribute("src") !== source) $("frame").src = source;
};

const csv = () => {
  const experts = [...Array(setup.layers[state.layer].experts).keys()], layer = brain.layers[state.layer];
  const rows = [["scan", "age", "layer", "x", "y", "z", "tissue", "expert", ...experts.map((e) => `score_${e}`), ...experts.map((e) => `weight_${e}`), "hidden", "change_when_hidden"]];
  brain.tissue.forEach((tissue, cube) => {
    if (tissue < 0) return;
    const [, height, depth] = brain.grid, at = cube * experts.length;
    rows.push([setup.scans[state.scan].name.replace(/[",\n]/g, " "), brain.age, setup.layers[state.layer].name, Math.floor(cube / (height * depth)), Math.floor(cube / depth) % height, cube % depth,
      setup.tissues[tissue], layer.expert[cube], ...experts.map((e) => Number(layer.score[at + e].toPrecision(9))), ...experts.map((e) => Number(layer.weight[at + e].toPrecision(9))), Number(state.hidden.has(cube)), change?.[cube] ?? ""]);
  });
  return rows.map((row) => row.join(",")).join("\r\n") + "\r\n";
};

const poster = () => {
  const slices = [...document.querySelectorAll("#slices canvas")], legend = legendOf();
  const width = slices.reduce((sum, canvas) => sum + canvas.width + GAP, -GAP), height = Math.max(...slices.map((canvas) => canvas.height));
  const { canvas, context, laid } = sheet(width, height, width, [legend]);
  const note = [`${brain.age.toFixed(1)} years`, ...(state.hidden.size ? [$("without").textContent] : [])].join("; ");
  writeHead(context, `${setup.name} · ${setup.scans[state.scan].name} · ${setup.layers[state.layer].name}, ${state.overlay}`, note, GAP, width);
  slices.reduce((left, slice) => { context.drawImage(slice, left, HEAD + height - slice.height); return left + slice.width + GAP; }, GAP);
  writeLegend(context, legend, laid[0], GAP, HEAD + height + GAP);
  return canvas;
};

const listen = () => {
  $("layer").addEventListener("input", () => { state.layer = Number($("layer").value); draw(); frame(); remember(); });
  $("strength").addEventListener("input", () => { state.strength = $("strength").value / 100; draw(); remember(); });
  $("overlay").addEventListener("change", (event) => {
    state.overlay = event.target.value;
    draw();
    if (state.overlay === "occlusion") occlude(); else say("");
    frame();
    remember();
  });
  ["x", "y", "z"].forEach((name, axis) => $(name).addEventListener("input", () => { state.cube[axis] = Number($(name).value); draw(); remember(); }));
  $("hide").addEventListener("click", () => brain && toggle(numberOf(state.cube)));
  $("show").addEventListener("click", () => { state.hidden.clear(); draw(); hide(); remember(); });
  $("turn").addEventListener("toggle", frame);
  document.querySelectorAll("#slices canvas").forEach((canvas, number) => canvas.addEventListener("click", (event) => {
    if (!brain) return;
    const [, , across, up] = CUTS[number], box = canvas.getBoundingClientRect();
    const u = ((event.clientX - box.left) / box.width) * brain.shape[across], v = (1 - (event.clientY - box.top) / box.height) * brain.shape[up];
    const to = [...state.cube];
    to[across] = Math.min(Math.max(Math.floor(u / brain.edge), 0), brain.grid[across] - 1);
    to[up] = Math.min(Math.max(Math.floor(v / brain.edge), 0), brain.grid[up] - 1);
    if (String(to) === String(state.cube)) toggle(numberOf(to));
    else { state.cube = to; draw(); remember(); }
  }));
  $("link").addEventListener("click", async () => {
    history.replaceState(null, "", `#${view()}`);
    try { await navigator.clipboard.writeText(location.href); } catch { /* the address bar has it */ }
    say(`The address holds all of this while the explorer runs; later: ${setup.command} --view '${view()}'`);
  });
  $("csv").addEventListener("click", () => brain && save(new Blob([csv()], { type: "text/csv" }), `ermoe-scan-${state.scan}.csv`));
  $("png").addEventListener("click", () => brain && poster().toBlob((blob) => save(blob, `ermoe-scan-${state.scan}-${state.overlay}.png`)));
  window.addEventListener("hashchange", apply);
};

const apply = () => {
  const asked = new URLSearchParams(location.hash.slice(1)), whole = (name) => (/^\d{1,6}$/.test(asked.get(name) ?? "") ? Number(asked.get(name)) : null);
  const list = (name) => (asked.get(name) ?? "").split(",").filter((text) => /^\d{1,6}$/.test(text)).map(Number);
  state.layer = Math.min(whole("layer") ?? setup.layers.length - 1, setup.layers.length - 1);
  if (["experts", "tissue", "occlusion", "none"].includes(asked.get("overlay"))) state.overlay = asked.get("overlay");
  document.querySelector(`[name="overlay"][value="${state.overlay}"]`).checked = true;
  $("layer").max = setup.layers.length - 1;
  $("layer").value = state.layer;
  if (/^(0(\.\d{1,2})?|1)$/.test(asked.get("strength") ?? "")) state.strength = Number(asked.get("strength"));
  $("strength").value = 100 * state.strength;
  const keeps = list("cube").length === 3;
  if (keeps) state.cube = list("cube");
  state.hidden = new Set(list("hidden"));
  open(Math.min(whole("scan") ?? 0, setup.scans.length - 1), keeps);
};

const start = async () => {
  themed();
  setup = await ask("setup");
  $("about").textContent = `${setup.name} · ${setup.scans.length} scans`;
  $("scans").replaceChildren(...setup.scans.map(({ name, age, sex }, scan) => element("li", {}, element("button", { type: "button", "aria-pressed": "false", "data-scan": scan, onclick: () => open(scan) },
    element("b", {}, name), ` ${[age === null ? "" : `${age.toFixed(0)} years`, sex ?? ""].filter(Boolean).join(", ")}`))));
  $("slices").replaceChildren(...CUTS.map(([name]) => element("figure", {}, element("canvas", { role: "img", "aria-label": `${name} slice through the chosen cube` }), element("figcaption", {}, name))));
  listen();
  apply();
};

window.explorer = { state, csv, brain: () => brain, change: () => change };
start().catch(alertOf);
