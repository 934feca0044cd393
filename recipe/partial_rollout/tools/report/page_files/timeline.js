// Timelines of a report: one canvas for each run, all over one time axis.
//
// A call of an engine is a bar: columns of typed arrays hold its start and length (ms), lane, sample and version. Calls lie
// by lane and then by start, so a binary search finds those that are in sight. Bars are written into the canvas's pixels
// themselves: 100,000 of them take milliseconds, where a canvas path for each would take seconds. In a lane of tools a bar is
// the time between two turns of a sample.
"use strict";

const DRIVER = 30, AXIS = 20, LABELS = 74, LEAST_HEIGHT = 160, MOST_HEIGHT = 620, TIP_LINES = 14;
const VERSIONS = ["#4e79a7", "#76b7b2", "#59a14f", "#b6992d", "#af7aa1", "#9c755f"];
const [WHITE, BETWEEN, EMPTY, TRAIN, VALIDATE, SYNC, MARK, ROUND, ROUND_TOO, STAGE] =
  ["#ffffff", "#dcdcdc", "#fbf3d0", "#8a8a8a", "#c9b8d8", "#d55e00", "#111111", "#e8c547", "#d8a93a", "#7fb08a"].map(packed);
const VERSION_PIXELS = VERSIONS.map(packed), TOOLS = packed("#e377c2");
const PHASE_PIXELS = { wait: EMPTY, train: TRAIN, validate: VALIDATE, sync: SYNC, stage: STAGE, hold: MARK, flush: MARK };
const SENDING = ["sync", "stage", "hold"], HOLDING = ["hold", "flush"];
const PHASE_WORDS = {
  wait: step => `the trainer waits for the batch of step ${step}`, sync: step => `weight sync of version ${step}`,
  stage: step => `staging weights, step ${step}`, hold: step => `engines held for new weights, step ${step}`,
  flush: step => `engines stopped for the checkpoint of step ${step}`,
};

// A colour as the pixels of an ImageData hold it, on little-endian machines.
function packed(colour) {
  const value = parseInt(colour.slice(1), 16);
  return (0xff000000 | (value & 0xff) << 16 | value & 0xff00 | value >> 16) >>> 0;
}

function column(base64, Type) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  return new Type(bytes.buffer);
}

const seconds = ms => ms >= 1e5 ? `${Math.round(ms / 1e3).toLocaleString("en")} s` : ms >= 1e3 ? `${(ms / 1e3).toFixed(1)} s` : `${ms} ms`;
const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

class Timeline {
  constructor(run, view, canvas, tip) {
    Object.assign(this, { run, view, canvas, tip, low: 0, high: run.lanes.length, chosen: -1, context: canvas.getContext("2d") });
    this.start = column(run.start, Uint32Array);
    this.length = column(run.length, Uint32Array);
    this.tokens = column(run.tokens, Uint32Array);
    this.version = column(run.version, Int32Array);
    this.sample = column(run.sample, Uint32Array);
    this.interrupted = column(run.interrupted, Uint8Array);
    this.first = new Uint32Array(run.lanes.length + 1);
    this.lane = new Uint32Array(this.start.length);
    run.lanes.forEach(([, , calls], lane) => {
      this.first[lane + 1] = this.first[lane] + calls;
      this.lane.fill(lane, this.first[lane], this.first[lane + 1]);
    });
    this.resize();
  }

  resize() {
    const scale = window.devicePixelRatio || 1, lanes = this.run.lanes.length;
    const height = DRIVER + AXIS + Math.min(MOST_HEIGHT, Math.max(LEAST_HEIGHT, 7 * lanes));
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.max(300, Math.round(this.canvas.clientWidth * scale));
    this.canvas.height = Math.round(height * scale);
    this.scale = scale;
    this.left = Math.round(LABELS * scale);
    this.top = Math.round(DRIVER * scale);
    this.bottom = this.canvas.height - Math.round(AXIS * scale);
    this.image = this.context.createImageData(this.canvas.width, this.canvas.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
  }

  x(ms) { return this.left + (ms - this.view.from) / (this.view.to - this.view.from) * (this.canvas.width - this.left); }
  y(lane) { return this.top + (lane - this.low) / (this.high - this.low) * (this.bottom - this.top); }
  time(x) { return this.view.from + (x - this.left) / (this.canvas.width - this.left) * (this.view.to - this.view.from); }
  laneAt(y) { return Math.floor(this.low + (y - this.top) / (this.bottom - this.top) * (this.high - this.low)); }

  // At least a pixel wide and high, cut at the plot.
  fill(x0, x1, y0, y1, pixel) {
    const width = this.canvas.width;
    x0 = Math.round(x0);
    x1 = Math.min(Math.max(x0 + 1, Math.round(x1)), width);
    x0 = Math.max(x0, this.left);
    for (let row = y0 * width; row < y1 * width; row += width) {
      if (x1 - x0 > 8) this.pixels.fill(pixel, row + x0, row + x1);
      else for (let i = row + x0; i < row + x1; i++) this.pixels[i] = pixel;
    }
  }

  draw() {
    this.pixels.fill(WHITE);
    this.drawDriver();
    this.drawCalls();
    this.drawHolds();
    this.context.putImageData(this.image, 0, 0);
    this.drawLabels();
    this.drawChosen();
  }

  drawDriver() {
    const { rounds, phases, ends } = this.run, middle = this.top >> 1;
    this.fill(this.x(0), this.x(ends), this.top, this.bottom, BETWEEN);
    for (const [step, , start, end] of rounds.filter(([, , start, end]) => end >= this.view.from && start <= this.view.to)) {
      this.fill(this.x(start), this.x(end), this.top, this.bottom, EMPTY);
      this.fill(this.x(start), this.x(end), 2, middle - 1, step % 2 ? ROUND : ROUND_TOO);
    }
    for (const [name, , start, end] of phases) {
      this.fill(this.x(start), this.x(end), SENDING.includes(name) ? middle + (middle >> 1) : middle, this.top - 2, PHASE_PIXELS[name] ?? BETWEEN);
    }
  }

  // Over the calls, where there is room for it: they go on, but make no token.
  drawHolds() {
    for (const [name, , start, end] of this.run.phases) {
      if (HOLDING.includes(name) && this.x(end) - this.x(start) > 0.7) this.fill(this.x(start), this.x(end), this.top, this.bottom, MARK);
    }
  }

  drawCalls() {
    const { start, length, version, interrupted, view } = this, mark = Math.max(1, Math.round(this.scale));
    for (let lane = Math.max(0, Math.floor(this.low)); lane < Math.min(this.run.lanes.length, this.high); lane++) {
      const y0 = Math.max(this.top, Math.round(this.y(lane))), tools = this.run.lanes[lane][3];
      const room = Math.round(this.y(lane + 1)) - y0, y1 = Math.min(this.bottom, y0 + Math.max(1, room > 3 ? room - 1 : room));
      for (let i = this.firstIn(lane); i < this.first[lane + 1] && start[i] <= view.to; i++) {
        const x0 = this.x(start[i]), x1 = this.x(start[i] + length[i]);
        this.fill(x0, x1, y0, y1, tools ? TOOLS : VERSION_PIXELS[(version[i] + 60) % VERSION_PIXELS.length]);
        if (interrupted[i] && x1 - x0 > 2) this.fill(x1 - mark, x1, y0, y1, MARK);
      }
    }
  }

  // The first call of a lane that ends in sight: the calls of a lane do not overlap.
  firstIn(lane) {
    let low = this.first[lane], high = this.first[lane + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.start[middle] + this.length[middle] < this.view.from) low = middle + 1; else high = middle;
    }
    return low;
  }

  drawLabels() {
    const { context, scale } = this, lanes = this.run.lanes;
    Object.assign(context, { font: `${11 * scale}px system-ui, sans-serif`, fillStyle: "#444", textBaseline: "middle" });
    context.fillText("rounds", 2, this.top * 0.25);
    context.fillText("trainer", 2, this.top * 0.75);
    let last = -99;
    lanes.forEach(([replica, slot, , tools], lane) => {
      const y = this.y(lane);
      if (slot || tools || y < this.top - 1 || y > this.bottom) return;
      context.fillRect(0, Math.round(y), this.canvas.width, 1);
      if (y - last > 12 * scale) { context.fillText(`replica ${replica}`, 2, y + 8 * scale); last = y; }
    });
    context.textBaseline = "alphabetic";
    const span = (this.view.to - this.view.from) / 1e3, rough = span / 8, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find(n => n * power >= rough) * power;
    for (let t = Math.ceil(this.view.from / 1e3 / step) * step; t <= this.view.to / 1e3; t += step) {
      const x = this.x(t * 1e3);
      context.fillRect(Math.round(x), this.bottom, 1, 4 * scale);
      context.fillText(`${Number(t.toFixed(3)).toLocaleString("en")} s`, x + 3, this.canvas.height - 4 * scale);
    }
  }

  // Frames around all engine calls of the sample under the pointer.
  drawChosen() {
    if (this.chosen < 0) return;
    Object.assign(this.context, { strokeStyle: "#000", lineWidth: 2 * this.scale });
    for (const i of this.callsOf(this.chosen)) {
      const y0 = this.y(this.lane[i]), y1 = this.y(this.lane[i] + 1);
      if (y1 < this.top || y0 > this.bottom) continue;
      const x0 = Math.max(this.left, this.x(this.start[i])), x1 = this.x(this.start[i] + this.length[i]);
      if (x1 >= this.left) this.context.strokeRect(x0, y0, Math.max(2, x1 - x0), Math.max(2, y1 - y0));
    }
  }

  // The engine calls of a call's sample, in time; the call alone if the trace names no sample.
  callsOf(call) {
    const sample = this.sample[call];
    if (!this.run.samples[sample]) return [call];
    const found = [];
    for (let i = 0; i < this.sample.length; i++) if (this.sample[i] === sample) found.push(i);
    return found.sort((a, b) => this.start[a] - this.start[b]);
  }

  callAt(x, y) {
    const lane = this.laneAt(y), near = (this.view.to - this.view.from) / this.canvas.width * 2;
    if (y < this.top || y >= this.bottom || lane < 0 || lane >= this.run.lanes.length) return -1;
    const t = this.time(x);
    for (let i = this.firstIn(lane); i < this.first[lane + 1] && this.start[i] <= t + near; i++) {
      if (this.start[i] + this.length[i] >= t - near) return i;
    }
    return -1;
  }

  describe(call) {
    const calls = this.callsOf(call), lines = [], segments = calls.filter(i => !this.run.lanes[this.lane[i]][3]).length;
    const tokens = calls.reduce((sum, i) => sum + this.tokens[i], 0), cuts = calls.filter(i => this.interrupted[i]).length;
    calls.forEach((i, at) => {
      const [replica, slot, , tools] = this.run.lanes[this.lane[i]], end = this.start[i] + this.length[i];
      const words = `v${this.version[i]}: ${count(this.tokens[i], "token")} in ${seconds(this.length[i])}, replica ${replica}, slot ${slot}`;
      const said = tools ? `   tools and agent loop: ${seconds(this.length[i])}` : words;
      lines.push((i === call ? "\u25b6 " : "   ") + said + (this.interrupted[i] ? ", interrupted" : ""));
      const gap = at + 1 < calls.length ? this.start[calls[at + 1]] - end : 0;
      if (gap > 0) lines.push(`      waits ${this.interrupted[i] ? "to resume" : "for a slot"}: ${seconds(gap)}`);
    });
    const here = Math.max(0, Math.min(lines.findIndex(line => line[0] === "\u25b6") - TIP_LINES / 2, lines.length - TIP_LINES));
    const end = here + TIP_LINES, more = there => there ? ["   ..."] : [];
    const name = this.run.samples[this.sample[call]] || "(not named)";
    return [
      `sample ${name}: ${count(segments, "engine call")}, ${count(cuts, "interruption")}, ${count(tokens, "token")}`,
      ...more(here > 0), ...lines.slice(here, end), ...more(end < lines.length)];
  }

  describeDriver(x, y) {
    const t = this.time(x), inside = ([, , start, end]) => start <= t && t <= end;
    if (y >= this.top / 2) {
      return this.run.phases.filter(inside).map(([name, step, start, end]) =>
        `${PHASE_WORDS[name]?.(step) ?? `${name}, step ${step}`}: ${seconds(end - start)}`);
    }
    return this.run.rounds.filter(inside).flatMap(([step, version, start, end, interrupt, resume, carried]) => [
      `round of step ${step} under version ${version}: ${seconds(end - start)}, ${count(carried, "group")} carried into it`,
      ...(interrupt === null ? [] : [`interrupted: engines quiet ${seconds(interrupt)} after the decision`]),
      ...(resume === null ? [] : [`resumed: first engine call ${seconds(resume)} after its opening`])]);
  }

  hover(event) {
    const x = event.offsetX * this.scale, y = event.offsetY * this.scale;
    const call = this.callAt(x, y), lines = y < this.top ? this.describeDriver(x, y) : call < 0 ? [] : this.describe(call);
    this.tip.hidden = !lines.length;
    this.tip.textContent = lines.join("\n");
    this.tip.style.left = `${Math.max(0, Math.min(event.pageX + 14, window.scrollX + window.innerWidth - this.tip.offsetWidth - 20))}px`;
    this.tip.style.top = `${event.pageY + 14}px`;
    if (call !== this.chosen) { this.chosen = call; this.draw(); }
  }

  zoomLanes(y, factor) {
    const lanes = this.run.lanes.length, at = this.low + (y - this.top) / (this.bottom - this.top) * (this.high - this.low);
    const span = Math.min(lanes, Math.max(2, (this.high - this.low) * factor));
    this.low = Math.min(Math.max(0, at - (at - this.low) / (this.high - this.low) * span), lanes - span);
    this.high = this.low + span;
  }

  moveLanes(lanes) {
    const moved = Math.min(Math.max(-this.low, lanes), this.run.lanes.length - this.high);
    [this.low, this.high] = [this.low + moved, this.high + moved];
  }
}

// What all timelines show of time, in ms from each run's first round; redraws at most once a frame.
class View {
  constructor(longest) {
    Object.assign(this, { longest, from: 0, to: longest, timelines: [], asked: 0 });
    const kept = JSON.parse(sessionStorage.getItem(location.pathname) ?? "null");
    if (kept) this.show(...kept);
  }

  show(from, to) {
    const span = Math.min(this.longest, Math.max(20, to - from));
    this.from = Math.min(Math.max(0, from), this.longest - span);
    this.to = this.from + span;
    sessionStorage.setItem(location.pathname, JSON.stringify([this.from, this.to]));
    this.redraw();
  }

  zoom(at, factor) { this.show(at - (at - this.from) * factor, at + (this.to - at) * factor); }

  redraw() {
    cancelAnimationFrame(this.asked);
    this.asked = requestAnimationFrame(() => this.timelines.forEach(timeline => timeline.draw()));
  }
}

function listen(timeline, view) {
  const { canvas } = timeline;
  let held = null;
  canvas.addEventListener("wheel", event => {
    event.preventDefault();
    const factor = Math.exp((event.deltaY || event.deltaX) / 400);
    if (event.shiftKey) timeline.zoomLanes(event.offsetY * timeline.scale, factor);
    view.zoom(timeline.time(event.offsetX * timeline.scale), event.shiftKey ? 1 : factor);
  }, { passive: false });
  canvas.addEventListener("pointerdown", event => { held = event; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", event => {
    if (!held) return timeline.hover(event);
    const ms = timeline.time(0) - timeline.time((event.offsetX - held.offsetX) * timeline.scale);
    timeline.moveLanes((held.offsetY - event.offsetY) * timeline.scale / (timeline.bottom - timeline.top) * (timeline.high - timeline.low));
    held = event;
    view.show(view.from + ms, view.to + ms);
  });
  canvas.addEventListener("pointerleave", () => { timeline.tip.hidden = true; timeline.chosen = -1; view.redraw(); });
  canvas.addEventListener("dblclick", () => { timeline.low = 0; timeline.high = timeline.run.lanes.length; view.show(0, view.longest); });
  canvas.addEventListener("keydown", event => {
    const span = view.to - view.from, move = { ArrowLeft: -0.1, ArrowRight: 0.1 }[event.key], zoom = { "+": 0.7, "-": 1.4 }[event.key];
    if (move) view.show(view.from + move * span, view.to + move * span);
    if (zoom) view.zoom(view.from + span / 2, zoom);
  });
}

function main() {
  const runs = JSON.parse(document.getElementById("data").textContent), place = document.getElementById("timelines");
  const view = new View(Math.max(...runs.map(run => run.ends)));
  document.getElementById("versions").innerHTML = VERSIONS.map(colour => `<i style="background:${colour}"></i>`).join("");
  for (const run of runs) {
    const title = document.createElement("h3"), canvas = document.createElement("canvas");
    title.textContent = run.title;
    title.style.color = run.colour;
    canvas.tabIndex = 0;
    place.append(title, canvas);
    const timeline = new Timeline(run, view, canvas, document.getElementById("tip"));
    view.timelines.push(timeline);
    listen(timeline, view);
    timeline.draw();
  }
  window.addEventListener("resize", () => { view.timelines.forEach(timeline => timeline.resize()); view.redraw(); });
  return view;
}

const shown = main();
