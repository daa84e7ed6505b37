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

  // Buttons of one kind exclude each other; "apply" is told what is chosen and searched for, and returns what to say.
  function filters(bar, apply) {
    const chosen = {};
    const search = bar.querySelector("input");
    const update = () => {
      bar.querySelector(".shown").textContent = apply(chosen, search.value.trim().toLowerCase());
    };
    bar.querySelectorAll("button").forEach((button) => {
      const kind = button.dataset.kind;
      chosen[kind] = "";
      button.addEventListener("click", () => {
        chosen[kind] = button.dataset.value;
        bar
          .querySelectorAll('button[data-kind="' + kind + '"]')
          .forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
        update();
      });
    });
    search.addEventListener("input", update);
    update();
  }

  const answerBar = document.getElementById("answer-filters");
  if (answerBar) {
    const answers = Array.from(document.querySelectorAll("#answer-list .sample"));
    filters(answerBar, (chosen, words) => {
      let count = 0;
      for (const answer of answers) {
        const fits =
          Object.entries(chosen).every(([kind, value]) => !value || answer.dataset[kind] === value) &&
          (!words || answer.textContent.toLowerCase().includes(words));
        answer.hidden = !fits;
        count += fits;
      }
      return count + " of " + answers.length + " shown";
    });
  }

  function element(tag, name, text) {
    const node = document.createElement(tag);
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function side(answer, label) {
    const box = element("div", "side");
    const meta = element("div", "meta");
    if (label) meta.append(element("span", "when", label));
    meta.append(element("span", "pill " + answer.outcome, answer.outcome), element("span", "", answer.tokens + " tokens"));
    if (answer.samples > 1) meta.append(element("span", "", answer.right + " of " + answer.samples + " samples right"));
    const text = element("pre", "", answer.text + (answer.cut ? " … (" + answer.cut + " more characters)" : ""));
    text.tabIndex = 0;
    const verdict = element("div", "verdict", "found ");
    verdict.append(element("b", "", answer.parsed === null ? "nothing" : answer.parsed));
    if (answer.note) verdict.append(" · " + answer.note);
    box.append(meta, text, verdict);
    return box;
  }

  const data = document.getElementById("question-data");
  if (data) {
    const rows = JSON.parse(data.textContent);
    const texts = rows.map((row) =>
      [row.question, row.reference, ...row.sides.flatMap((answer) => [answer.text, answer.parsed || ""])].join("\n").toLowerCase()
    );
    const list = document.getElementById("question-list");
    const more = document.getElementById("more-questions");
    const page = window.innerWidth < 760 ? 6 : 12;
    let fitting = [];
    let shown = 0;

    function card(row) {
      const box = element("article", "card sample");
      const labels = row.sides.length > 1 ? ["before", "after"] : [""];
      const meta = element("div", "meta");
      if (row.sides.length > 1) {
        const names = { gained: "gained", lost: "lost", right: "right in both", wrong: "wrong in both" };
        meta.append(element("span", "change " + row.change, names[row.change]));
      }
      meta.append(element("span", "", "reference "), element("b", "", row.reference), element("span", "id", row.id));
      box.dataset.change = row.change;
      box.append(meta, element("div", "question", row.question));
      row.sides.forEach((answer, index) => box.append(side(answer, labels[index])));
      return box;
    }

    function grow() {
      list.append(...fitting.slice(shown, shown + page).map(card));
      shown = Math.min(shown + page, fitting.length);
      more.hidden = shown >= fitting.length;
      more.textContent = "Show " + Math.min(page, fitting.length - shown) + " more of " + (fitting.length - shown);
    }

    more.addEventListener("click", grow);
    filters(document.getElementById("question-filters"), (chosen, words) => {
      fitting = rows.filter(
        (row, index) =>
          (!chosen.change || row.change === chosen.change) &&
          (!chosen.outcome || row.sides[row.sides.length - 1].outcome === chosen.outcome) &&
          (!words || texts[index].includes(words))
      );
      list.replaceChildren();
      shown = 0;
      grow();
      return fitting.length + " of " + rows.length + " questions";
    });
  }
})();
