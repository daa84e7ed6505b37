(function () {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)");
  const drawn = new Set();

  // Replaces "var(--name)" by the value it has in the current theme, everywhere in a figure.
  function themed(value, style) {
    if (typeof value === "string" && value.startsWith("var(")) return style.getPropertyValue(value.slice(4, -1)).trim();
    if (Array.isArray(value)) return value.map((item) => themed(item, style));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, themed(item, style)]));
    return value;
  }

  function draw(node) {
    const style = getComputedStyle(document.documentElement);
    const figure = themed(figures[node.dataset.figure], style);
    figure.layout.font.family = getComputedStyle(document.body).fontFamily;
    // A finger on a plot scrolls the page; zooming needs a mouse.
    figure.layout.dragmode = touch.matches ? false : "zoom";
    Plotly.react(node, figure.data, figure.layout, { responsive: true, displayModeBar: false });
    drawn.add(node);
  }

  const watcher = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        watcher.unobserve(entry.target);
        draw(entry.target);
      }
    },
    { rootMargin: "600px" }
  );
  document.querySelectorAll("[data-figure]").forEach((node) => watcher.observe(node));
  dark.addEventListener("change", () => drawn.forEach(draw));
  window.addEventListener("beforeprint", () => document.querySelectorAll("[data-figure]").forEach(draw));

  const samples = Array.from(document.querySelectorAll(".sample"));
  if (!samples.length) return;
  const chosen = { outcome: "", when: "" };
  const search = document.getElementById("search");
  const shown = document.getElementById("shown");

  function filter() {
    const words = search.value.trim().toLowerCase();
    let count = 0;
    for (const sample of samples) {
      const fits =
        (!chosen.outcome || sample.dataset.outcome === chosen.outcome) &&
        (!chosen.when || sample.dataset.when === chosen.when) &&
        (!words || sample.textContent.toLowerCase().includes(words));
      sample.hidden = !fits;
      count += fits;
    }
    shown.textContent = count + " of " + samples.length + " shown";
  }

  document.querySelectorAll(".filters button").forEach((button) =>
    button.addEventListener("click", () => {
      const kind = button.dataset.kind;
      chosen[kind] = button.dataset.value;
      document
        .querySelectorAll('.filters button[data-kind="' + kind + '"]')
        .forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      filter();
    })
  );
  search.addEventListener("input", filter);
  filter();
})();
