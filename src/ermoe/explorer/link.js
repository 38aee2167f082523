// Everything that is shown, in the address after its #; and as a table.

export const STRENGTH = 0.65; // of the colours, unless said otherwise
const numbers = (text) => (text ? text.split(",").map(Number) : []);

// {picture, layer, colour, strength, numbers, expert, token, models: [{name, T, k, offsets: {layer: […]}}]}
export const write = (state) => {
  const parts = new URLSearchParams();
  if (state.picture !== null) parts.set("picture", state.picture);
  parts.set("layer", state.layer);
  if (state.colour !== "expert") parts.set("colour", state.colour);
  if (state.strength !== STRENGTH) parts.set("strength", state.strength);
  if (state.numbers) parts.set("numbers", 1);
  if (state.expert !== null) parts.set("expert", state.expert);
  if (state.token !== null) parts.set("token", state.token);
  state.models.forEach((model, number) => {
    parts.set(`model${number + 1}`, model.name);
    if (model.T !== null) parts.set(`T${number + 1}`, model.T);
    if (model.k !== null) parts.set(`k${number + 1}`, model.k);
    for (const [layer, offsets] of Object.entries(model.offsets)) {
      if (offsets.some((value) => value)) parts.append(`offsets${number + 1}`, `${layer}:${offsets.join(",")}`);
    }
  });
  return parts.toString();
};

const whole = (text, fallback = null) => (text !== null && /^\d{1,6}$/.test(text) ? Number(text) : fallback);
const share = (text) => (text !== null && /^(0(\.\d{1,2})?|1)$/.test(text) ? Number(text) : null);
const number = (text) => (text !== null && text !== "" && Number.isFinite(Number(text)) ? Number(text) : null);

export const read = (text, known) => {
  const parts = new URLSearchParams(text.replace(/^#/, ""));
  const models = [1, 2].map((place) => ({
    name: parts.get(`model${place}`),
    T: number(parts.get(`T${place}`)),
    k: whole(parts.get(`k${place}`)),
    offsets: Object.fromEntries(parts.getAll(`offsets${place}`).map((entry) => {
      const cut = entry.lastIndexOf(":");
      return [entry.slice(0, cut), numbers(entry.slice(cut + 1))];
    }).filter(([, values]) => values.every(Number.isFinite))),
  })).filter((model) => known.includes(model.name));
  const colour = parts.get("colour");
  return {
    picture: parts.get("picture"),
    layer: whole(parts.get("layer")),
    colour: ["score", "margin", "fallback"].includes(colour) ? colour : "expert",
    strength: share(parts.get("strength")) ?? STRENGTH,
    numbers: parts.has("numbers"),
    expert: whole(parts.get("expert")),
    token: whole(parts.get("token")),
    models,
  };
};

const cell = (value) => (/[",\n\r]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
// Names are never formulas, whatever program opens the table.
const words = (text) => (/^[=+@-]/.test(text) ? `'${text}` : text);
const figure = (value) => (Number.isFinite(value) ? String(Number(value.toPrecision(9))) : "");

// What a layer goes by: its own T, k and offsets, and what is asked to differ. A layer without one of them has null.
export const inUse = (about, asked) => ({
  T: about.T === null ? null : asked.T ?? about.T,
  k: about.k === null ? null : Math.min(asked.k ?? about.k, about.experts),
  offsets: (about.offsets ?? []).map((own, e) => own + (asked.offsets[about.id]?.[e] ?? 0)),
});

// One row a token of every layer: what its router said and chose.
export const table = (panels) => {
  const most = Math.max(...panels.flatMap((panel) => panel.model.layers.map((layer) => layer.experts)));
  const experts = [...Array(most).keys()];
  const rows = [["model", "picture", "prediction", "probability", "T", "k", "layer", "token", "row", "column", "expert",
    "fell_back", ...experts.map((e) => `score_${e}`), ...experts.map((e) => `weight_${e}`), ...experts.map((e) => `offset_${e}`)]];
  for (const panel of panels) {
    const [label, chance] = panel.seen.prediction[0] ?? ["", NaN], asked = panel.seen.asked;
    panel.seen.layers.forEach((layer, place) => {
      const about = panel.model.layers[place], used = inUse(about, asked);
      layer.tokens.forEach((token, index) => {
        const patch = index - layer.prefix;
        const where = patch < 0 ? ["", ""] : [Math.floor(patch / panel.model.grid[1]), patch % panel.model.grid[1]];
        rows.push([words(panel.model.name), asked.picture, words(label), figure(chance), figure(used.T), figure(used.k), about.name, index, ...where, token.order[0] ?? "",
          token.fellBack === null ? "" : Number(token.fellBack), ...experts.map((e) => figure(token.score?.[e])),
          ...experts.map((e) => figure(token.weight[e])), ...experts.map((e) => figure(used.offsets[e]))]);
      });
    });
  }
  return rows.map((row) => row.map((value) => cell(String(value))).join(",")).join("\r\n") + "\r\n";
};
