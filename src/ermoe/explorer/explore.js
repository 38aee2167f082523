// The explorer: what concerns all panels. They ask the server and draw what it says; the address holds the state.
import { $, alertOf, ask, element, percent, save, say, swatch, themed } from "./ask.js";
import { FELL_BACK, HELD, poster, ramp, rampStyle } from "./draw.js";
import { inUse, read, table, write } from "./link.js";
import { page, Panel, state } from "./panel.js";

let setup, panels = [], cardTimer = 0;

// What concerns all panels

const labelOf = (name) => document.querySelector(`#gallery [data-name="${CSS.escape(name)}"] img`)?.alt ?? "your photograph";

const point = (from, patch) => {
  for (const panel of panels) {
    if (from === null) { panel.pointed = undefined; panel.drawPatch(); continue; }
    if (patch < 0 || String(panel.model.grid) === String(from.model.grid)) panel.pointed = patch;
    else {
      const [height, width] = panel.model.grid, [fromHeight, fromWidth] = from.model.grid;
      const row = Math.floor(((Math.floor(patch / fromWidth) + 0.5) / fromHeight) * height);
      panel.pointed = row * width + Math.floor((((patch % fromWidth) + 0.5) / fromWidth) * width);
    }
    if (panel.now) panel.drawPatch();
  }
};

const pointAtKept = () => {
  const first = panels.find((panel) => panel.now);
  if (first && state.token !== null && state.token < first.now.tokens.length) point(first, state.token - first.now.prefix);
};

let remembering = 0;
const remember = () => {
  clearTimeout(remembering);
  remembering = setTimeout(() => history.replaceState(null, "", `#${write(state)}`), 120);
};

const scaled = () => (state.colour === "margin" ? "margin" : state.expert === null ? "best score" : `score of expert ${state.expert}`);

// From which value to which the colours of a panel go: of each its own.
const scaleOf = ({ scale, model }) => {
  const whose = panels.length > 1 ? `${model.name}: ` : "";
  if (!scale) return [element("span", {}, `${whose}this router has no scores.`)];
  return [element("span", {}, `${whose}${scaled()} ${scale[0].toFixed(2)}`), element("span", { class: "ramp", style: `background:${rampStyle()}` }), element("span", {}, `${scale[1].toFixed(2)} `)];
};

const drawLegend = () => {
  const model = panels[0].model, legend = $("legend");
  const most = Math.max(...panels.map((panel) => panel.about.experts));
  if (state.colour === "fallback") {
    const T = panels.map((panel) => inUse(panel.about, panel.own).T);
    const said = [...new Set(T.map((own) => own?.toFixed(2) ?? "none"))].join(" / ");
    legend.replaceChildren(...(T.every((own) => own === null) ? ["This router has no threshold."] : [swatch(FELL_BACK), `fell back: no score reaches T = ${said} `, swatch(HELD), "some score does"]));
    return;
  }
  if (legend.dataset.experts !== String(most)) {
    legend.dataset.experts = String(most);
    legend.chips = [...Array(most).keys()].map((e) => element("button", { type: "button", onclick: () => choose(state.expert === e ? null : e, true) }, swatch(model.colours[e]), `expert ${e}`));
  }
  legend.chips.forEach((chip, e) => chip.setAttribute("aria-pressed", String(state.expert === e)));
  const parts = [...(state.colour === "expert" ? [] : panels.flatMap(scaleOf)), ...legend.chips];
  if (parts.length !== legend.children.length || parts.some((part, n) => part !== legend.children[n])) {
    const focused = document.activeElement;
    legend.replaceChildren(...parts);
    if (legend.contains(focused)) focused.focus();
  }
};

const choose = (expert, opens) => {
  state.expert = expert;
  panels.forEach((panel) => panel.draw());
  remember();
  if (opens || expert === null) showCard(expert, opens);
};

const showCard = async (expert, moves = false) => {
  clearTimeout(cardTimer);
  const box = $("card");
  if (expert === null || panels.every((panel) => expert >= panel.about.experts)) { box.hidden = true; return; }
  const asked = `${state.layer} ${expert} ${panels.map((panel) => panel.model.name)}`;
  try {
    const cards = await Promise.all(panels.filter((panel) => expert < panel.about.experts).map(async (panel) => {
      const told = await ask(`card?model=${encodeURIComponent(panel.model.name)}&layer=${panel.layer}&expert=${expert}`);
      return [panel, told];
    }));
    if (asked !== `${state.layer} ${state.expert} ${panels.map((panel) => panel.model.name)}`) return;
    box.hidden = false;
    const parts = cards.flatMap(([panel, told]) => {
      const holder = element("div", {});
      holder.innerHTML = told.card; // made by the server, everything in it escaped
      const progress = told.images < told.of ? [element("p", { class: "note" }, `${panel.model.name}: the card grows while nothing else is asked for, ${told.images} of ${told.of} images so far.`)] : [];
      return [...(panels.length > 1 ? [element("h2", {}, panel.model.name)] : []), holder, ...progress];
    });
    box.replaceChildren(element("button", { type: "button", class: "close", onclick: () => choose(null, false) }, "Close"), ...parts);
    for (const image of box.querySelectorAll(".card-best img")) {
      const { image: name, patch } = image.dataset;
      const button = element("button", { type: "button", "aria-label": `Show picture ${name} with this patch` , onclick: () => {
        state.token = Number(patch) + (panels[0].now?.prefix ?? 0);
        open(name);
        $("stage").scrollIntoView({ block: "start" });
      } });
      image.replaceWith(button);
      button.append(image);
    }
    if (moves) box.scrollIntoView({ block: "nearest" });
    if (cards.some(([, told]) => told.images < told.of)) cardTimer = setTimeout(() => state.expert === expert && showCard(expert), 4000);
  } catch (problem) { alertOf(problem); }
};

const toLayer = (place) => {
  const most = Math.max(...panels.map((panel) => panel.model.layers.length)) - 1;
  state.layer = Math.min(Math.max(place, 0), most);
  $("layer").max = most;
  $("layer").value = state.layer;
  const name = [...new Set(panels.map((panel) => panel.about.name))].join(" / ");
  $("layer-name").textContent = name;
  $("layer").setAttribute("aria-valuetext", name);
  panels.forEach((panel) => { panel.drawControls(); panel.draw(); });
  drawFound();
  remember();
  if (!$("card").hidden) showCard(state.expert);
};

const open = (name) => {
  state.picture = name;
  for (const button of document.querySelectorAll("#gallery button")) button.setAttribute("aria-pressed", String(button.dataset.name === name));
  for (const panel of panels) panel.look().then(pointAtKept);
  remember();
};

const build = () => {
  panels = state.models.map((own) => new Panel(setup.models.find((model) => model.name === own.name), own));
  $("panels").replaceChildren(...panels.map((panel) => panel.root));
  $("panels").classList.toggle("two", panels.length > 1);
  delete $("legend").dataset.experts;
};

const fresh = (name) => ({ name, T: null, k: null, offsets: {} });

const apply = (text) => {
  const names = setup.models.map((model) => model.name), asked = read(text, names);
  state.models = asked.models.length ? asked.models : [fresh(names[0])];
  const deepest = Math.max(...setup.models.map((model) => model.layers.length)) - 1;
  Object.assign(state, { colour: asked.colour, strength: asked.strength, numbers: asked.numbers, token: asked.token });
  const most = Math.max(...setup.models.flatMap((model) => model.layers.map((layer) => layer.experts)));
  state.expert = asked.expert !== null && asked.expert < most ? asked.expert : null;
  build();
  document.querySelector(`[name="colour"][value="${state.colour}"]`).checked = true;
  $("numbers").checked = state.numbers;
  $("strength").value = 100 * state.strength;
  $("other").value = state.models[1]?.name ?? "";
  toLayer(asked.layer ?? deepest);
  const first = document.querySelector("#gallery button")?.dataset.name ?? null;
  if ((asked.picture ?? first) !== null) open(asked.picture ?? first);
  if (state.expert !== null) showCard(state.expert);
};

// Pictures

const addPicture = (name, label, isOwn = false) => {
  const button = element("button", { type: "button", "aria-pressed": "false", "data-name": name, onclick: () => { state.token = null; open(name); } },
    element("img", { src: `api/thumbnail/${name}`, alt: label, title: label, loading: isOwn ? "eager" : "lazy", width: 64, height: 64 }));
  $("gallery")[isOwn ? "prepend" : "append"](element("li", {}, button));
};

const morePictures = async () => {
  const found = await ask(`gallery?start=${document.querySelectorAll("#gallery [data-name]:not([data-name^=upload])").length}`);
  found.forEach(({ name, label }) => addPicture(name, label ? `${label}, picture ${name}` : `picture ${name}`));
  $("more").hidden = document.querySelectorAll("#gallery [data-name]:not([data-name^=upload])").length >= setup.pictures;
};

const bring = async (file) => {
  if (!file) return;
  try {
    if (file.size > setup.largest_upload) throw new Error(`The file has more than ${setup.largest_upload / 2 ** 20} MB: scale the picture down first.`);
    const { name } = await ask("upload", { method: "POST", body: file, headers: { "content-type": "application/octet-stream" } });
    if (!document.querySelector(`#gallery [data-name="${name}"]`)) addPicture(name, file.name || "your photograph", true);
    state.token = null;
    open(name);
    alertOf("");
  } catch (problem) { alertOf(problem); }
};

// Words

let found = [];
const find = async () => {
  try {
    say("Searching …");
    found = await ask(`find?q=${encodeURIComponent($("query").value)}`);
    say(`${found.length} pictures found, best first; the bars are the experts of their patches.`);
    drawFound();
    if (found.length) { state.token = null; open(found[0].name); }
    alertOf("");
  } catch (problem) { say(""); alertOf(problem); }
};

const drawFound = () => {
  const panel = panels[0];
  $("found").replaceChildren(...found.map(({ name, label, cosine, experts }) => {
    const shares = experts[panel.layer].map((share, e) => element("span", { style: `width:${100 * share}%;background:${panel.model.colours[e]}` }));
    const most = experts[panel.layer].indexOf(Math.max(...experts[panel.layer]));
    return element("li", {}, element("button", { type: "button", onclick: () => { state.token = null; open(name); } },
      element("img", { src: `api/thumbnail/${name}`, alt: "" }),
      element("span", {}, element("b", {}, cosine.toFixed(3)), ` mostly expert ${most}`, element("span", { class: "label", title: label }, label),
        element("span", { class: "shares", "aria-hidden": "true" }, ...shares))));
  }));
};

// Taking it along

const fileName = (end) => `ermoe-${state.picture}-${panels[0].about.name.replaceAll(" ", "-")}-${state.colour}.${end}`;
const csv = () => table(panels.filter((panel) => panel.seen));

const legendOf = ({ about, model, scale }) => {
  if (state.colour === "expert") return [...Array(about.experts).keys()].map((e) => [String(e), model.colours[e]]);
  if (state.colour === "fallback") return about.T === null ? [] : [["fell back", FELL_BACK], ["some score reaches T", HELD]];
  return (scale ? [0, 0.2, 0.4, 0.6, 0.8, 1] : []).map((share) => [(scale[0] + share * (scale[1] - scale[0])).toFixed(3), ramp(share)]);
};

const pictured = (panel) => {
  const [label, chance] = panel.seen.prediction[0] ?? ["", 0], what = { expert: state.expert === null ? "experts" : `expert ${state.expert}`, fallback: "fallback" }[state.colour] ?? scaled();
  const note = [labelOf(state.picture), ...(label ? [`predicted ${label} (${percent(chance)})`] : []), ...panel.changes()].join("; ");
  return { title: `${panel.model.name} · ${panel.about.name}, ${what}`, note, image: panel.image, overlay: panel.overlay, grey: state.strength >= 0.05, legend: legendOf(panel) };
};

const listen = () => {
  $("layer").addEventListener("input", () => toLayer(Number($("layer").value)));
  $("strength").addEventListener("input", () => { state.strength = $("strength").value / 100; panels.forEach((panel) => panel.draw()); remember(); });
  $("numbers").addEventListener("change", () => { state.numbers = $("numbers").checked; panels.forEach((panel) => panel.draw()); remember(); });
  $("colour").addEventListener("change", (event) => { state.colour = event.target.value; panels.forEach((panel) => panel.draw()); remember(); });
  $("other").addEventListener("change", () => {
    state.models = [state.models[0], ...($("other").value ? [fresh($("other").value)] : [])];
    build();
    toLayer(state.layer);
    open(state.picture);
  });
  $("file").addEventListener("change", (event) => { bring(event.target.files[0]); event.target.value = ""; });
  $("search").addEventListener("submit", (event) => { event.preventDefault(); find(); });
  $("more").addEventListener("click", () => morePictures().catch(alertOf));
  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      $("drop").classList.toggle("over", name === "dragover");
      if (name === "drop") bring(event.dataTransfer.files[0]);
    });
  }
  document.addEventListener("paste", (event) => bring([...event.clipboardData.files][0]));
  $("link").addEventListener("click", async () => {
    const view = write(state);
    history.replaceState(null, "", `#${view}`);
    try { await navigator.clipboard.writeText(location.href); } catch { /* the address bar has it */ }
    say(setup.command ? `The address holds all of this while the explorer runs; later: ${setup.command} --view '${view}'` : "The address holds all of this.");
  });
  $("png").addEventListener("click", () => {
    const seen = panels.filter((panel) => panel.seen);
    if (seen.length) poster(seen.map(pictured)).toBlob((blob) => save(blob, fileName("png")));
  });
  $("csv").addEventListener("click", () => panels.some((panel) => panel.seen) && save(new Blob([csv()], { type: "text/csv" }), fileName("csv")));
  window.addEventListener("hashchange", () => apply(location.hash));
  window.addEventListener("resize", () => panels.forEach((panel) => panel.draw()));
};

const start = async () => {
  themed();
  setup = await ask("setup");
  $("about").textContent = `${setup.models.map((model) => model.name).join(", ")} · ${setup.data}`;
  $("search").hidden = !setup.search;
  $("other-field").hidden = setup.models.length < 2;
  $("other").replaceChildren(element("option", { value: "" }, "none"), ...setup.models.slice(1).map((model) => element("option", { value: model.name }, model.name)));
  await morePictures();
  listen();
  apply(location.hash);
};

Object.assign(page, { point, remember, toLayer, drawLegend, choose, labelOf });
window.explorer = { state, csv, panels: () => panels };
start().catch(alertOf);
