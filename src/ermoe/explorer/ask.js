// What every page of the explorer needs: asking the server, making elements, taking files along, light and dark.
export const $ = (id) => document.getElementById(id);

export const ask = async (path, options = {}) => {
  let answer;
  try {
    answer = await fetch(`api/${path}`, options);
  } catch {
    throw new Error("The explorer does not answer: is it still running in its terminal?");
  }
  const isJson = (answer.headers.get("content-type") ?? "").includes("json");
  const told = isJson ? await answer.json() : { error: (await answer.text()).trim() };
  if (!answer.ok) throw new Error(told.error || `It answered ${answer.status}.`);
  return told;
};
export const post = (path, body) => ask(path, { method: "POST", body: JSON.stringify(body) });
export const alertOf = (problem) => { $("alert").textContent = problem ? problem.message ?? problem : ""; };
export const say = (text) => { $("status").textContent = text; };
export const element = (name, attributes = {}, ...children) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
};
export const swatch = (colour) => element("i", { style: `background:${colour}`, "aria-hidden": "true" });
export const percent = (value) => `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)}\u00a0%`;
export const floats = (text) => new Float32Array(bytes(text).buffer);
export const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

export const save = (blob, name) => {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};

// The browser's wish, until the button is pressed; a frame may not remember.
export const themed = () => {
  const root = document.documentElement;
  try {
    const theme = localStorage.getItem("theme");
    if (theme) root.dataset.theme = theme;
  } catch { /* as said */ }
  $("theme").addEventListener("click", () => {
    const dark = (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* as said */ }
  });
};
