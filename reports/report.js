"use strict";
// Hover, keyboard and arm switches for the charts; without this script the page still shows everything.
(() => {
  const root = document.documentElement;
  root.classList.add("script");
  const data = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set();

  for (const box of document.querySelectorAll(".key input")) {
    const arm = Number(box.value);
    const toggle = () => {
      box.checked ? hidden.delete(arm) : hidden.add(arm);
      for (const part of document.querySelectorAll(`.arm-${arm}`)) part.style.display = box.checked ? "" : "none";
    };
    box.addEventListener("change", toggle);
    toggle();  // a page that is loaded again remembers its boxes
  }
  const theme = document.getElementById("theme");
  if (theme) theme.addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  for (const picture of document.querySelectorAll(".picture")) {  // begin where something did not hold
    const flaw = picture.querySelector("[data-flaw]");
    if (flaw) picture.scrollLeft += flaw.getBoundingClientRect().left - picture.getBoundingClientRect().left - picture.clientWidth / 2;
  }
  const place = (axis, value, low, high) => {
    const f = axis.log ? Math.log : (v) => v;
    return low + (f(value) - f(axis.from)) / (f(axis.to) - f(axis.from)) * (high - low);
  };
  const number = (v) => v === null || v === undefined ? "n/a" : typeof v === "string" ? v
    : Math.abs(v) >= 1000 ? v.toLocaleString("en", {maximumFractionDigits: 0}) : String(+v.toPrecision(4));
  const measured = (v, unit) => `${number(v)}${unit === "%" ? "" : " "}${unit}`;

  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const chart = data[figure.dataset.chart], picture = figure.querySelector(".picture"), svg = picture.querySelector("svg");
    const view = svg.viewBox.baseVal, said = figure.querySelector(".unseen");
    let tip = null, cursor = null, at = {panel: 0, step: 0};

    const points = (panel) => {
      const [x0, y0, x1, y1] = panel.box, found = [];
      panel.series.forEach((series) => {
        if (series.arm !== null && hidden.has(series.arm)) return;
        series.x.forEach((x, i) => {
          if (series.y[i] === null) return;
          const px = typeof x === "string" ? x0 + (i + .5) / series.x.length * (x1 - x0) : place(panel.x, x, x0, x1);
          found.push({series, x, y: series.y[i], px, py: place(panel.y, series.y[i], y1, y0)});
        });
      });
      return found;
    };
    const show = (panel, px, py) => {
      const nearest = new Map(), rowsOf = panel.series.length;
      const row = !panel.map || py === null ? null
        : panel.series[Math.min(Math.max(Math.floor((panel.box[3] - py) / (panel.box[3] - panel.box[1]) * rowsOf), 0), rowsOf - 1)];
      for (const point of points(panel)) {
        if (row && point.series !== row) continue;
        const distance = Math.abs(point.px - px) + (py === null || row ? 0 : .02 * Math.abs(point.py - py));
        const best = nearest.get(point.series);
        if (!best || distance < best.distance) nearest.set(point.series, {...point, distance});
      }
      let rows = [...nearest.values()].filter((point) => point.distance < (view.width / 8));
      if (!rows.length) return hide();
      if (rows.length > 10) rows = rows.sort((a, b) => Math.abs(a.py - (py ?? a.py)) - Math.abs(b.py - (py ?? b.py))).slice(0, 10);
      if (!tip) {
        tip = figure.appendChild(Object.assign(document.createElement("div"), {className: "tip"}));
        cursor = figure.appendChild(Object.assign(document.createElement("div"), {className: "cursor"}));
      }
      const lines = rows.map(({series, x, y}) => typeof x === "string" ? `${x}: ${measured(y, panel.yUnit)}`
        : series.x.length === 1 ? series.label : `${series.label}: ${measured(x, panel.xUnit)}, ${measured(y, panel.yUnit)}`);
      tip.replaceChildren(...lines.map((line) => Object.assign(document.createElement("div"), {textContent: line})));
      if (said) said.textContent = lines.join("; ");
      const outer = figure.getBoundingClientRect(), inner = svg.getBoundingClientRect();
      const scale = inner.width / view.width, left = inner.left - outer.left + px * scale, top = inner.top - outer.top;
      Object.assign(cursor.style, {left: `${left}px`, top: `${top + panel.box[1] * scale}px`, height: `${(panel.box[3] - panel.box[1]) * scale}px`});
      tip.style.top = `${top + panel.box[1] * scale + 8}px`;
      tip.style.left = `${Math.max(0, left + 12 + tip.offsetWidth > outer.width ? left - 12 - tip.offsetWidth : left + 12)}px`;
    };
    const hide = () => { tip?.remove(); cursor?.remove(); tip = cursor = null; };

    picture.addEventListener("pointermove", (event) => {
      const inner = svg.getBoundingClientRect();
      const px = (event.clientX - inner.left) / inner.width * view.width, py = (event.clientY - inner.top) / inner.height * view.height;
      const panel = chart.panels.find(({box}) => px >= box[0] && px <= box[2] && py >= box[1] && py <= box[3]);
      panel ? show(panel, px, py) : hide();
    });
    picture.addEventListener("pointerleave", hide);
    picture.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return hide();
      const step = {ArrowRight: 1, ArrowLeft: -1}[event.key], turn = {ArrowDown: 1, ArrowUp: -1}[event.key];
      if (!step && !turn) return;
      event.preventDefault();
      if (turn) at = {panel: (at.panel + turn + chart.panels.length) % chart.panels.length, step: 0};
      const panel = chart.panels[at.panel];
      at.step = Math.min(Math.max(at.step + (step || 0), 0), 40);
      show(panel, panel.box[0] + (panel.box[2] - panel.box[0]) * at.step / 40, null);
    });
  }
})();
