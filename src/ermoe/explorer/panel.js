// One model's half of the page: its photograph in patches, what if, and the patch below the pointer.
import { $, alertOf, element, floats, percent, post, swatch } from "./ask.js";
import { coloured, paint, paintAttention } from "./draw.js";
import { inUse, STRENGTH } from "./link.js";

// What is shown, which the address holds; and what concerns all panels, which explore.js fills in.
export const state = { picture: null, layer: 0, colour: "expert", strength: STRENGTH, numbers: false, expert: null, token: null, models: [] };
export const page = {};
let numbered = 0;

// What the server says, token by token

const tokensOf = (layer, experts, numPatches) => {
  const weights = floats(layer.weights), scores = layer.scores ? floats(layer.scores) : null;
  const tokens = [];
  for (let at = 0, index = 0; at < weights.length; at += experts, index++) {
    const weight = [...weights.subarray(at, at + experts)];
    const score = scores ? [...scores.subarray(at, at + experts)] : null;
    const order = weight.map((_, e) => e).filter((e) => weight[e] > 0).sort((a, b) => weight[b] - weight[a] || a - b);
    const ranked = score ? [...score].sort((a, b) => b - a) : [];
    tokens.push({
      weight, score, order, best: ranked[0] ?? NaN, margin: ranked.length > 1 ? ranked[0] - ranked[1] : NaN,
      fellBack: layer.fell_back ? Boolean(layer.fell_back[index]) : null,
    });
  }
  const prefix = Math.max(0, tokens.length - numPatches);
  return { tokens, prefix, patches: tokens.slice(prefix) };
};

// One model's half of the page

export class Panel {
  constructor(model, own) {
    this.model = model;
    this.own = own; // {name, T, k, offsets} of the state
    this.seen = null;
    this.asking = false;
    this.again = false;
    this.root = $("panel").content.firstElementChild.cloneNode(true);
    this.part = (name) => this.root.querySelector(name);
    this.part(".model").textContent = model.name;
    this.view = this.part(".view");
    this.image = this.part(".view img");
    this.overlay = this.part(".view canvas");
    this.view.setAttribute("aria-label", `Patches of the photograph, ${model.name}. Arrow keys move, Enter keeps a patch, Escape lets go, page keys change the layer.`);
    this.listen();
  }

  get layer() { return Math.min(state.layer, this.model.layers.length - 1); }
  get about() { return this.model.layers[this.layer]; }
  get numPatches() { return this.model.grid[0] * this.model.grid[1]; }
  get now() { return this.seen?.layers[this.layer]; }

  listen() {
    const place = (event) => {
      const frame = this.view.getBoundingClientRect(), [height, width] = this.model.grid;
      const column = Math.floor(((event.clientX - frame.left) / frame.width) * width);
      const row = Math.floor(((event.clientY - frame.top) / frame.height) * height);
      return Math.min(Math.max(row, 0), height - 1) * width + Math.min(Math.max(column, 0), width - 1);
    };
    this.view.addEventListener("pointermove", (event) => this.now && state.token === null && page.point(this, place(event)));
    this.view.addEventListener("pointerleave", () => state.token === null && document.activeElement !== this.view && page.point(null, null));
    this.view.addEventListener("click", (event) => {
      if (!this.now) return;
      const token = place(event) + this.now.prefix;
      state.token = state.token === token ? null : token;
      page.point(this, place(event));
      page.remember();
    });
    this.view.addEventListener("keydown", (event) => this.key(event));
    this.view.addEventListener("focus", () => this.now && this.pointed === undefined && page.point(this, Math.floor(this.numPatches / 2) + Math.floor(this.model.grid[1] / 2)));
    const T = this.part(".threshold input"), k = this.part(".experts input");
    T.addEventListener("input", () => { this.own.T = Number(T.value); this.changed(); });
    k.addEventListener("input", () => { this.own.k = Number(k.value); this.changed(); });
    this.part(".reset").addEventListener("click", () => {
      Object.assign(this.own, { T: null, k: null, offsets: {} });
      this.drawControls();
      this.changed();
    });
  }

  key(event) {
    if (!this.now) return;
    const [height, width] = this.model.grid, at = this.pointed ?? 0;
    const row = Math.floor(at / width), column = at % width;
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -column], End: [0, width - 1 - column] };
    if (steps[event.key]) {
      const to = (value, most) => Math.min(Math.max(value, 0), most - 1);
      const patch = to(row + steps[event.key][0], height) * width + to(column + steps[event.key][1], width);
      if (state.token !== null) state.token = patch + this.now.prefix;
      page.point(this, patch);
      page.remember();
    } else if (event.key === "Enter" || event.key === " ") {
      state.token = state.token === null ? at + this.now.prefix : null;
      page.remember();
    } else if (event.key === "Escape") {
      state.token = null;
      page.remember();
    } else if (event.key === "PageUp" || event.key === "PageDown") {
      page.toLayer(state.layer + (event.key === "PageUp" ? 1 : -1));
    } else return;
    event.preventDefault();
  }

  changed() {
    this.began = performance.now();
    this.drawControls();
    page.remember();
    this.look();
  }

  question() {
    const { T, k, offsets } = this.own;
    return { model: this.model.name, picture: state.picture, T, k, offsets };
  }

  // Only the latest question matters: while one is under way, the next waits.
  async look() {
    if (state.picture === null) return;
    if (this.asking) { this.again = true; return; }
    this.asking = true;
    try {
      do {
        this.again = false;
        const asked = this.question(), key = JSON.stringify(asked);
        const loading = this.loaded(asked.picture);
        loading.catch(() => {}); // if there is no picture, the answer says why
        const told = await post("look", asked), image = await loading;
        if (asked.picture === state.picture && (JSON.stringify(this.question()) === key || this.again)) this.take(told, asked, image);
      } while (this.again);
      alertOf("");
    } catch (problem) {
      if (this.seen && this.seen.asked.picture !== state.picture) this.clear();
      alertOf(problem);
    } finally {
      this.asking = false;
    }
  }

  // The photograph as the model sees it. It is shown together with what the model does with it.
  async loaded(picture) {
    const src = `api/picture/${encodeURIComponent(picture)}?model=${encodeURIComponent(this.model.name)}`;
    if (this.image.getAttribute("src") === src) return this.image;
    const image = element("img", { src, alt: page.labelOf(picture) });
    await image.decode();
    return image;
  }

  take(told, asked, image) {
    const layers = told.layers.map((layer, place) => tokensOf(layer, this.model.layers[place].experts, this.numPatches));
    this.seen = { prediction: told.prediction, layers, asked };
    if (image !== this.image) {
      this.image.replaceWith(image);
      this.image = image;
      this.view.classList.toggle("small", image.naturalWidth < 96);
    }
    this.attention = null;
    this.draw();
    if (this.began !== undefined) {
      const start = this.began;
      this.began = undefined;
      requestAnimationFrame(() => requestAnimationFrame(() => performance.measure("redraw", { start, end: performance.now() }))); // it has been seen
    }
    if (!performance.getEntriesByName("first picture").length) performance.mark("first picture");
  }

  // Nothing is known about the picture that was asked for.
  clear() {
    this.seen = null;
    this.overlay.width = this.overlay.height = 0;
    this.image.removeAttribute("src");
    this.image.alt = "";
    for (const part of [".prefix", ".prediction"]) this.part(part).replaceChildren();
    this.drawPatch();
  }

  draw() {
    if (!this.now) return;
    const size = Math.round(this.view.clientWidth * Math.min(window.devicePixelRatio || 1, 2)) || 448;
    if (this.overlay.width !== size) this.overlay.width = this.overlay.height = size;
    this.scale = paint(this.overlay.getContext("2d"), this.now, this.model.grid, size, { ...state, mode: state.colour, colours: this.model.colours });
    this.view.classList.toggle("plain", state.strength < 0.05);
    this.drawPrefix();
    this.drawPrediction();
    this.drawPatch();
    page.drawLegend();
  }

  // The first is the class token, the rest are registers and the like.
  prefixName(index) { return index === 0 ? "Class token" : `Token ${index}`; }

  drawPrefix() {
    const looks = coloured({ patches: this.now.tokens.slice(0, this.now.prefix) }, state.colour, this.model.colours, state.expert).colours;
    this.part(".prefix").replaceChildren(...looks.map((look, index) => element("button", {
      type: "button", "aria-pressed": String(state.token === index),
      onclick: () => { state.token = state.token === index ? null : index; page.point(this, index - this.now.prefix); page.remember(); },
    }, swatch(look), this.prefixName(index))));
  }

  drawPrediction() {
    const list = this.part(".prediction"), told = this.seen.prediction;
    list.previousElementSibling.hidden = !told.length;
    list.replaceChildren(...told.map(([label, chance]) => element("li", {},
      element("span", { class: "bar", style: `width:${100 * chance}%` }), element("span", {}, label), element("b", {}, percent(chance)))));
  }

  drawControls() {
    const about = this.about, { T, k } = inUse(about, this.own);
    const threshold = this.part(".threshold"), experts = this.part(".experts");
    threshold.hidden = about.T === null;
    experts.hidden = about.k === null;
    this.label(threshold, "threshold T", (T ?? 0).toFixed(2), T);
    experts.querySelector("input").max = Math.max(...this.model.layers.map((layer) => layer.experts));
    this.label(experts, "experts a token k", k, k);
    this.part(".rule").textContent = about.T === null ? "" : about.rule === "fill"
      ? "This model fills up: T only marks patches that fall back, and changes no choice."
      : "This model prunes: experts whose score is below T are left out.";
    this.part(".reset").disabled = !this.changes().length;
    this.drawOffsets();
  }

  // What differs from the model as it was trained, in words.
  changes() {
    const { T, k, offsets } = this.own;
    return [...(T === null ? [] : [`T = ${T.toFixed(2)}`]), ...(k === null ? [] : [`k = ${k}`]),
      ...(Object.values(offsets).some((own) => own.some((value) => value)) ? ["other offsets"] : [])];
  }

  label(field, text, value, place) {
    const input = field.querySelector("input"), label = field.querySelector("label");
    input.id ||= `input-${++numbered}`;
    label.htmlFor = input.id;
    label.textContent = text;
    if (place !== null && Number(input.value) !== place) input.value = place;
    field.querySelector("output").textContent = value;
  }

  drawOffsets() {
    const about = this.about, box = this.part(".offsets");
    box.hidden = about.offsets === null;
    if (about.offsets === null) return;
    const added = this.own.offsets[about.id] ?? about.offsets.map(() => 0);
    if (box.dataset.layer !== about.id) {
      box.dataset.layer = about.id;
      box.lastElementChild.replaceChildren(...about.offsets.map((_, e) => {
        const id = `input-${++numbered}`;
        const input = element("input", { type: "range", min: -1, max: 1, step: 0.01, id, oninput: () => {
          const now = [...(this.own.offsets[about.id] ?? about.offsets.map(() => 0))];
          now[e] = Number(input.value);
          this.own.offsets = { ...this.own.offsets, [about.id]: now };
          this.changed();
        } });
        return element("div", { class: "field wide" }, element("label", { for: id }, swatch(this.model.colours[e]), `expert ${e}`), input, element("output", { for: id }));
      }));
    }
    [...box.lastElementChild.children].forEach((row, e) => {
      const input = row.querySelector("input");
      if (Number(input.value) !== added[e]) input.value = added[e];
      row.querySelector("output").textContent = (about.offsets[e] + added[e]).toFixed(3);
    });
  }

  // The patch below the pointer; a negative one is a token that is no patch.
  drawPatch() {
    const cursor = this.part(".cursor"), index = this.pointed;
    const token = index === undefined || !this.now ? undefined : this.now.tokens[index + this.now.prefix];
    cursor.hidden = !token || index < 0;
    this.part(".looked").hidden = true;
    if (!token) {
      this.part(".where").textContent = "No patch chosen";
      this.part(".said").textContent = "Point at a patch, or move there with the arrow keys.";
      this.part(".scores").replaceChildren();
      this.part(".compared").textContent = "";
      return;
    }
    const [height, width] = this.model.grid, row = Math.floor(index / width), column = index % width;
    if (index >= 0) cursor.style.cssText = `left:${(100 * column) / width}%;top:${(100 * row) / height}%;width:${100 / width}%;height:${100 / height}%`;
    this.part(".where").textContent = index < 0 ? this.prefixName(index + this.now.prefix) : `Patch in row ${row + 1}, column ${column + 1}`;
    this.part(".said").textContent = this.sentence(token);
    this.drawScores(token);
    this.part(".compared").textContent = this.about.compared;
    this.drawLooked();
  }

  sentence(token) {
    if (!token.order.length) return "No expert took it.";
    const [first, ...rest] = token.order.map((e) => `expert ${e} (${percent(token.weight[e])})`);
    const also = rest.length ? `, then ${rest.join(", ")}` : "";
    const margin = Number.isFinite(token.margin) ? ` The best score leads by ${token.margin.toFixed(3)}.` : "";
    const fell = token.fellBack ? " It fell back: no score reaches T." : "";
    return `Goes to ${first}${also}.${margin}${fell}`;
  }

  drawScores(token) {
    const { T } = inUse(this.about, this.own), score = token.score ?? token.weight;
    const low = Math.min(0, ...score), high = Math.max(T ?? 0, ...score, low + 1e-6);
    const at = (value) => (100 * (value - low)) / (high - low);
    const head = element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "expert"), element("th", { scope: "col" }, token.score ? T === null ? "score" : `score, line at T = ${T.toFixed(2)}` : "weight"),
      element("th", { scope: "col", class: "number" }, token.score ? "score" : ""), element("th", { scope: "col", class: "number" }, "weight")));
    const rows = score.map((value, e) => {
      const bar = element("span", { class: "bar", style: `background:${this.model.colours[e]};left:${at(Math.min(value, 0))}%;width:${at(Math.max(value, 0)) - at(Math.min(value, 0))}%` });
      const scale = element("span", { class: "scale", "aria-hidden": "true" }, bar);
      if (T !== null && token.score) scale.append(element("span", { class: "mark", style: `left:${at(T)}%` }));
      const button = element("button", { type: "button", "aria-label": `Card of expert ${e}`, onclick: () => page.choose(e, true) }, swatch(this.model.colours[e]), String(e));
      return element("tr", { class: token.order.includes(e) ? "chosen" : null }, element("th", { scope: "row" }, button), element("td", {}, scale),
        element("td", { class: "number" }, token.score ? value.toFixed(3) : ""), element("td", { class: "number" }, token.weight[e] > 0 ? percent(token.weight[e]) : "–"));
    });
    this.part(".scores").replaceChildren(head, element("tbody", {}, ...rows));
  }

  drawLooked() {
    clearTimeout(this.timer);
    const token = this.pointed + this.now.prefix, key = `${JSON.stringify(this.question())} ${token}`;
    if (this.attention?.key === key) return this.drawAttention();
    this.timer = setTimeout(async () => {
      try {
        const alpha = await post("attention", { ...this.question(), token });
        this.attention = { key, alpha };
        if (this.pointed + this.now.prefix === token) this.drawAttention();
      } catch (problem) { alertOf(problem); }
    }, 60);
  }

  drawAttention() {
    const alpha = this.attention.alpha[this.layer], figure = this.part(".looked");
    figure.hidden = !alpha;
    if (!alpha || !this.image.complete) return;
    const patches = alpha.slice(-this.numPatches), rest = 1 - patches.reduce((sum, value) => sum + value, 0);
    paintAttention(figure.querySelector("canvas"), this.image, patches, this.model.grid, this.pointed);
    const best = patches.indexOf(Math.max(...patches)), width = this.model.grid[1];
    figure.querySelector("figcaption").textContent = `Where it looked: the lighter, the more. Most (${percent(patches[best])}) at row ${Math.floor(best / width) + 1}, column ${(best % width) + 1}`
      + (alpha.length > patches.length ? `; ${percent(Math.max(rest, 0))} at ${this.now.prefix > 1 ? "tokens that are no patches" : "the class token"}.` : ".");
  }
}
