"use strict";
// One slider moves all models through their layers; a canvas pixel is a patch, painted in the colour of its expert.
(() => {
  const models = JSON.parse(document.getElementById("patch-experts").textContent);
  const slider = document.getElementById("layer");
  const shown = document.getElementById("layer-name");

  const paint = (canvas, experts, colours, [height, width]) => {
    canvas.width = width;
    canvas.height = height;
    const context = canvas.getContext("2d");
    for (let patch = 0; patch < experts.length; patch++) {
      const expert = experts.charCodeAt(patch) - 48;
      if (expert < 0) continue;
      context.fillStyle = colours[expert];
      context.fillRect(patch % width, Math.floor(patch / width), 1, 1);
    }
  };

  const show = () => {
    const names = new Set();
    models.forEach((model, number) => {
      const layer = model.layers[Math.min(Number(slider.value), model.layers.length - 1)];
      names.add(layer.name);
      document.querySelectorAll(`[data-model="${number}"] canvas`).forEach((canvas, picture) => {
        paint(canvas, layer.experts[picture], model.colours, model.grid);
      });
    });
    shown.textContent = [...names].join(" / ");
  };

  slider.addEventListener("input", show);
  show();

  // An address that leads to a card opens it.
  const reveal = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target?.closest("details")) return;
    target.closest("details").open = true;
    target.scrollIntoView({ block: "start" });
  };
  window.addEventListener("hashchange", reveal);
  reveal();
})();
