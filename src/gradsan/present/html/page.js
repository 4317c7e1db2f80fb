"use strict";
(() => {
  const data = JSON.parse(document.getElementById("gradsan-data").textContent);
  const [LANE, CLOCK, STEP, VERSION, OP, PLACE, TOUCHES] = [0, 1, 2, 3, 4, 5, 6];
  const LANE_HEIGHT = 34, TOP = 8, AXIS = 24, DOT = 5, ROWS_A_PAGE = 200;

  const fill = (words, values) => words.replace(/\{(\w+)\}/g, (whole, name) => name in values ? String(values[name]) : whole);
  const laneName = (lane) => data.words[`lane_${data.kinds[lane]}`];
  // As on the page itself: what could make text look like other text is shown as its number.
  const clean = (text) => text.replace(/[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g,
    (one) => `⟨U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
  const kindOf = (event) => event[TOUCHES] ? laneName(event[LANE]) : fill(data.words.beside, { what: laneName(event[LANE]) });

  function describe(event, number, count) {
    const said = fill(data.words.event, {
      kind: kindOf(event), clock: event[CLOCK], step: event[STEP], op: clean(event[OP]), place: clean(event[PLACE]),
    });
    const version = event[VERSION] === null ? "" : ` · ${fill(data.words.version, { version: event[VERSION] })}`;
    return `${number + 1}/${count} · ${said}${version}`;
  }

  function startTheme() {
    const button = document.getElementById("theme"), root = document.documentElement;
    const asked = window.matchMedia("(prefers-color-scheme: dark)");
    const isDark = () => (root.dataset.theme || (asked.matches ? "dark" : "light")) === "dark";
    const show = () => {
      button.setAttribute("aria-pressed", String(isDark()));
      document.dispatchEvent(new Event("gradsan-theme"));
    };
    button.hidden = false;
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      show();
    });
    asked.addEventListener("change", show);
    show();
  }

  function startCopying() {
    for (const button of document.querySelectorAll("button.copy")) {
      const code = button.closest("li").querySelector(".diff code");
      button.hidden = false;
      button.addEventListener("click", async () => {
        try {
          await navigator.clipboard.writeText(code.textContent);
        } catch {
          // Where a page may not write to the clipboard, the user's own copy finds it selected.
          window.getSelection().selectAllChildren(code);
          document.execCommand("copy");
        }
        button.textContent = data.words.copied;
      });
    }
  }

  class Timeline {
    constructor(root, events) {
      this.root = root;
      this.events = [...events].sort((one, other) => one[CLOCK] - other[CLOCK]);
      this.canvas = root.querySelector("canvas");
      this.status = root.querySelector(".status");
      this.first = this.events[0][CLOCK];
      this.last = Math.max(this.events[this.events.length - 1][CLOCK], this.first + 1);
      this.selected = -1;
      this.isDue = false;
      this.showAll();
      this.listen();
      new ResizeObserver(() => this.draw()).observe(this.canvas);
    }

    showAll() {
      const margin = (this.last - this.first) * 0.02;
      [this.from, this.to] = [this.first - margin, this.last + margin];
    }

    listen() {
      const canvas = this.canvas;
      for (const button of this.root.querySelectorAll("[data-do]")) {
        button.addEventListener("click", () => this.perform(button.dataset.do));
      }
      canvas.addEventListener("wheel", (event) => {
        // The page scrolls under the pointer until the timeline has been chosen.
        if (document.activeElement !== canvas && !event.ctrlKey) return;
        event.preventDefault();
        this.zoom(Math.exp(Math.sign(event.deltaY) * 0.25), this.clockAt(event.offsetX));
      }, { passive: false });
      canvas.addEventListener("keydown", (event) => {
        const pan = { ArrowLeft: "left", ArrowRight: "right" }[event.key];
        const keys = { "+": "in", "=": "in", "-": "out", "0": "all" };
        if (event.ctrlKey || event.metaKey || event.altKey) return;
        if (pan && event.shiftKey) this.perform(pan);
        else if (pan) this.select(this.selected < 0 ? 0 : this.selected + (pan === "left" ? -1 : 1));
        else if (event.key === "Home") this.select(0);
        else if (event.key === "End") this.select(this.events.length - 1);
        else if (keys[event.key]) this.perform(keys[event.key]);
        else return;
        event.preventDefault();
      });
      let held = null, hasMoved = false;
      canvas.addEventListener("pointerdown", (event) => {
        held = event.offsetX;
        hasMoved = false;
        canvas.setPointerCapture(event.pointerId);
      });
      canvas.addEventListener("pointermove", (event) => {
        if (held === null || (!hasMoved && Math.abs(event.offsetX - held) < 4)) return;
        hasMoved = true;
        this.pan(this.clockAt(held) - this.clockAt(event.offsetX));
        held = event.offsetX;
      });
      canvas.addEventListener("pointerup", (event) => {
        if (held !== null && !hasMoved) this.choose(event.offsetX, event.offsetY);
        held = null;
      });
      canvas.addEventListener("pointercancel", () => { held = null; });
      document.addEventListener("gradsan-theme", () => this.draw());
      window.addEventListener("beforeprint", () => this.paint());
    }

    perform(what) {
      const span = this.to - this.from, middle = this.selected < 0 ? (this.from + this.to) / 2 : this.events[this.selected][CLOCK];
      if (what === "in") this.zoom(0.5, middle);
      else if (what === "out") this.zoom(2, middle);
      else if (what === "left") this.pan(-span / 4);
      else if (what === "right") this.pan(span / 4);
      else { this.showAll(); this.draw(); }
    }

    zoom(factor, around) {
      const whole = (this.last - this.first) * 1.04;
      const span = Math.min(Math.max((this.to - this.from) * factor, Math.min(4, whole)), whole);
      const share = Math.min(Math.max((around - this.from) / (this.to - this.from), 0), 1);
      this.from = around - share * span;
      this.to = this.from + span;
      this.pan(0);
    }

    pan(by) {
      const margin = (this.last - this.first) * 0.02, span = this.to - this.from;
      this.from = Math.min(Math.max(this.from + by, this.first - margin), this.last + margin - span);
      this.to = this.from + span;
      this.draw();
    }

    select(index) {
      this.selected = Math.min(Math.max(index, 0), this.events.length - 1);
      const event = this.events[this.selected], clock = event[CLOCK], span = this.to - this.from;
      if (clock < this.from || clock > this.to) {
        this.from = clock - span / 2;
        this.to = clock + span / 2;
      }
      this.status.textContent = describe(event, this.selected, this.events.length);
      this.pan(0);
    }

    choose(x, y) {
      const lane = Math.floor((y - TOP) / LANE_HEIGHT);
      let best = -1, nearest = 24;
      this.events.forEach((event, index) => {
        const away = Math.abs(this.xOf(event[CLOCK]) - x) + (event[LANE] === lane ? 0 : 12);
        if (away < nearest) [best, nearest] = [index, away];
      });
      if (best >= 0) this.select(best);
    }

    get left() { return this.nameWidth + 16; }
    get room() { return Math.max(this.canvas.clientWidth - this.left - 12, 1); }
    xOf(clock) { return this.left + (clock - this.from) / (this.to - this.from) * this.room; }
    clockAt(x) { return this.from + (x - this.left) / this.room * (this.to - this.from); }

    draw() {
      if (this.isDue) return;
      this.isDue = true;
      requestAnimationFrame(() => { this.isDue = false; this.paint(); });
    }

    paint() {
      const canvas = this.canvas, width = canvas.clientWidth, height = TOP + LANE_HEIGHT * data.kinds.length + AXIS;
      if (!width) return;
      const ratio = window.devicePixelRatio || 1, pen = canvas.getContext("2d"), style = getComputedStyle(canvas);
      const color = (name) => style.getPropertyValue(`--${name}`).trim();
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.font = `13px ${style.fontFamily}`;
      pen.textBaseline = "middle";
      this.nameWidth = Math.max(...data.kinds.map((_, lane) => pen.measureText(laneName(lane)).width));
      data.kinds.forEach((_, lane) => {
        const y = TOP + lane * LANE_HEIGHT;
        pen.fillStyle = color(lane % 2 ? "ground" : "raised");
        pen.fillRect(0, y, width, LANE_HEIGHT);
        pen.fillStyle = color("text");
        pen.fillText(laneName(lane), 8, y + LANE_HEIGHT / 2);
      });
      this.paintAxis(pen, color, height, width);
      pen.save();
      pen.beginPath();
      pen.rect(this.left - DOT - 1, 0, this.room + 2 * DOT + 2, height);
      pen.clip();
      this.paintEvents(pen, color);
      pen.restore();
    }

    paintAxis(pen, color, height, width) {
      const most = Math.max(Math.floor(this.room / 90), 1), raw = (this.to - this.from) / most;
      const power = 10 ** Math.floor(Math.log10(Math.max(raw, 1))), step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw) || power * 10;
      pen.textAlign = "center";
      for (let clock = Math.max(Math.ceil(this.from / step), 0) * step; clock <= this.to; clock += step) {
        const x = this.xOf(clock);
        pen.fillStyle = color("line");
        pen.fillRect(x, TOP, 1, height - TOP - AXIS + 4);
        pen.fillStyle = color("quiet");
        pen.fillText(clock.toLocaleString("en"), Math.min(x, width - 20), height - AXIS / 2);
      }
      pen.textAlign = "left";
    }

    // Where dots would touch, a column of the lane is as high as many events lie in it.
    paintEvents(pen, color) {
      const columns = new Map();
      this.events.forEach((event, index) => {
        const clock = event[CLOCK];
        if (clock < this.from || clock > this.to) return;
        const column = Math.round(this.xOf(clock) / (2 * DOT)), key = event[LANE] * 100000 + column;
        const there = columns.get(key);
        if (there) { there.count += 1; there.hasSelected ||= index === this.selected; }
        else columns.set(key, { count: 1, event, column, hasSelected: index === this.selected });
      });
      for (const { count, event, column, hasSelected } of columns.values()) {
        const x = count > 1 ? column * 2 * DOT : this.xOf(event[CLOCK]), y = TOP + event[LANE] * LANE_HEIGHT + LANE_HEIGHT / 2;
        pen.fillStyle = pen.strokeStyle = color(data.kinds[event[LANE]]);
        pen.lineWidth = 2;
        if (count > 1) {
          const tall = Math.min(8 + 5 * Math.log2(count), LANE_HEIGHT - 4);
          pen.fillRect(x - DOT + 1, y - tall / 2, 2 * DOT - 2, tall);
        } else {
          pen.beginPath();
          pen.arc(x, y, DOT - (event[TOUCHES] ? 0 : 1), 0, 2 * Math.PI);
          if (event[TOUCHES]) pen.fill(); else pen.stroke();
        }
        if (hasSelected) {
          pen.strokeStyle = color("focus");
          pen.beginPath();
          pen.arc(x, y, DOT + 5, 0, 2 * Math.PI);
          pen.stroke();
        }
      }
    }
  }

  // The rows that the page leaves out are made when somebody opens the table, a page of them at a time.
  function startTable(details, events) {
    let page = 0;
    const pages = Math.ceil(events.length / ROWS_A_PAGE), body = details.querySelector("tbody");
    const control = document.createElement("p"), where = document.createElement("span");
    const button = (name, by) => {
      const made = document.createElement("button");
      made.type = "button";
      made.textContent = data.words[name];
      made.addEventListener("click", () => { page = Math.min(Math.max(page + by, 0), pages - 1); show(); });
      return made;
    };
    const back = button("previous_page", -1), on = button("next_page", 1);
    function show() {
      const first = page * ROWS_A_PAGE, shown = events.slice(first, first + ROWS_A_PAGE);
      body.replaceChildren(...shown.map((event) => {
        const row = document.createElement("tr");
        const version = event[VERSION] === null ? "" : event[VERSION];
        for (const cell of [event[CLOCK], kindOf(event), clean(event[OP]), version, clean(event[PLACE]), event[STEP]]) {
          const made = document.createElement("td");
          made.textContent = String(cell);
          row.append(made);
        }
        return row;
      }));
      where.textContent = fill(data.words.page_of, { first: first + 1, last: first + shown.length, count: events.length });
      back.disabled = page === 0;
      on.disabled = page === pages - 1;
    }
    details.querySelector(".left-out").remove();
    where.setAttribute("role", "status");
    control.className = "pager";
    control.append(back, where, on);
    details.append(control);
    show();
  }

  // On paper nothing can be unfolded.
  function startPrinting() {
    let opened = [];
    window.addEventListener("beforeprint", () => {
      opened = [...document.querySelectorAll("details.others:not([open])")];
      for (const one of opened) one.open = true;
    });
    window.addEventListener("afterprint", () => { for (const one of opened) one.open = false; });
  }

  startTheme();
  startCopying();
  startPrinting();
  for (const root of document.querySelectorAll("[data-timeline]")) {
    const events = data.events[root.dataset.timeline], details = root.querySelector("details.events");
    root.classList.add("drawn");
    new Timeline(root, events);
    if (details.querySelector(".left-out")) {
      details.addEventListener("toggle", () => startTable(details, events), { once: true });
    }
  }
})();
