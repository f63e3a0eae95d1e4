// Since when: what has ended, by the daemon's own history, with a mark at each start, death, upgrade and drain.

import { ask } from "./ask.js";
import { at, make, say, svg } from "./dom.js";
import { clock, count, rate, span } from "./units.js";

const OFTEN_MS = 10000, WIDTH = 600, HEIGHT = 44, LISTED = 4;
const NONE = { done: 0, failed: 0, read_bytes: 0, served_bytes: 0, failures: {}, p50_ms: null, p99_ms: null };
const SAID = { start: "started", death: "died", upgrade: "upgraded", drain: "drain", "drain cancelled": "drain cancelled", stop: "stopped" };
const ranges = Object.fromEntries([["5 min", 300, 5], ["1 h", 3600, 60], ["24 h", 86400, 300]]
  .map(([name, long, step]) => [name, { long, step, points: new Map(), marks: new Map(), now: 0, beganAt: 0, askedAt: -Infinity }]));
let chosen = "5 min";

// Only what may have changed is asked for: the time that the last answer had not seen the end of, and what followed.
async function refresh(range) {
  if (performance.now() - range.askedAt < Math.min(range.step * 1000, OFTEN_MS)) return;
  const since = Math.floor(range.now / range.step) * range.step;
  const told = await ask(`v1/history?span_s=${range.long}&step_s=${range.step}&since=${since}`);
  const another = range.beganAt !== told.began_at;
  if (another) {
    range.points.clear();
    range.marks.clear();
  }
  range.beganAt = told.began_at;
  range.now = another && since ? 0 : told.now;
  range.askedAt = another && since ? -Infinity : performance.now();
  for (const point of told.points) range.points.set(point.at, point);
  for (const mark of told.marks) range.marks.set(`${mark.at} ${mark.kind}`, mark);
  for (const held of [range.points, range.marks])
    for (const [key, each] of held) if (each.at < told.now - range.long - range.step) held.delete(key);
}

export async function lookAtHistory() {
  await refresh(ranges[chosen]);
  draw(ranges[chosen]);
}

const sum = (bins, of) => bins.reduce((total, bin) => total + of(bin), 0);

function failures(bins) {
  const codes = new Map();
  for (const bin of bins) for (const [code, times] of Object.entries(bin.failures)) codes.set(code, (codes.get(code) ?? 0) + times);
  return [...codes].sort((a, b) => b[1] - a[1]).map(([code, times]) => `${code} ${count(times)}`).join(", ");
}

function draw(range) {
  if (!range.now) return;
  const { long, step } = range, bins = Math.round(long / step), first = (Math.floor(range.now / step) - bins + 1) * step;
  const shown = Array.from({ length: bins }, (_, i) => range.points.get(first + i * step) ?? NONE);
  const marks = grouped([...range.marks.values()].filter((mark) => mark.at >= first), step);
  const unseen = Math.min(Math.max(range.beganAt - first, 0) / long, 1);
  const none = (text) => unseen ? `${text} since ${clock(range.beganAt * 1000)}` : text;
  const bytes = Math.max(...shown.map((bin) => bin.read_bytes + bin.served_bytes)), slowest = Math.max(...shown.map((bin) => bin.p99_ms ?? 0));
  const median = Math.max(...shown.map((bin) => bin.p50_ms ?? 0)), failed = sum(shown, (bin) => bin.failed);
  const plot = (id, name, title, more, layers) => drawPlot(id, name, title, more, layers(shown), { first, long, unseen, marks });
  plot("bytes", "Bytes", bytes ? `up to ${rate(bytes / step)}` : none("none"), "", (all) => [
    ["served", all.map((bin) => bin.read_bytes + bin.served_bytes)], ["read", all.map((bin) => bin.read_bytes)]]);
  plot("latency", "Latency", slowest ? `p50 up to ${span(median)}, p99 ${span(slowest)}` : none("none done"), "", (all) => [
    ["p99", all.map((bin) => bin.p99_ms ?? 0)], ["p50", all.map((bin) => bin.p50_ms ?? 0)]]);
  plot("failures", "Failures", failed ? `${count(failed)} of ${count(failed + sum(shown, (bin) => bin.done))}` : none("none"), failures(shown), (all) => [
    ["failed", all.map((bin) => bin.failed)]]);
  say("bar", `this rank's share, each bar ${step < 60 ? `${step} s` : `${step / 60} min`}`);
  at("marks").replaceChildren(...marks.slice(-LISTED).reverse().map(({ at: when, kinds, why }) =>
    make("li", { class: kinds.includes("death") ? "bad" : "" }, make("small", {}, clock(when * 1000)), ` ${kinds.map((kind) => SAID[kind] ?? kind).join(", ")}`, why ? make("small", {}, ` ${why}`) : "")));
}

// What happened in the time of one bar is one mark.
function grouped(marks, step) {
  const groups = [];
  for (const mark of marks.sort((a, b) => a.at - b.at)) {
    const last = groups.at(-1);
    if (last && mark.at - last.at < step) {
      last.kinds.push(mark.kind);
      if (!last.why.includes(mark.why)) last.why += `${last.why ? "; " : ""}${mark.why}`;
    } else groups.push({ at: mark.at, kinds: [mark.kind], why: mark.why });
  }
  return groups;
}

// layers: each in front of the one before, from the ground up.
function drawPlot(id, name, title, more, layers, { first, long, unseen, marks }) {
  const most = Math.max(...layers.flatMap(([, values]) => values)), step = WIDTH / layers[0][1].length;
  const bars = layers.flatMap(([kind, values]) => values.flatMap((value, i) => value ? [svg("rect", {
    class: kind, x: i * step + step / 10, width: step * 0.8, y: HEIGHT - value / most * (HEIGHT - 2), height: value / most * (HEIGHT - 2),
  })] : []));
  const lines = marks.map(({ at: when, kinds }) => {
    const x = (when - first) / long * WIDTH;
    return svg("line", { class: kinds.includes("death") ? "mark death" : "mark", x1: x, y1: 0, x2: x, y2: HEIGHT });
  });
  at(id).replaceChildren(
    make("figcaption", {}, make("span", {}, name), make("b", {}, title), more ? make("small", {}, more) : null),
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 1}`, preserveAspectRatio: "none", role: "img", "aria-label": `${name}: ${title} ${more}` },
      svg("rect", { class: "unseen", x: 0, y: 0, width: unseen * WIDTH, height: HEIGHT }),
      svg("line", { x1: 0, y1: HEIGHT + 0.5, x2: WIDTH, y2: HEIGHT + 0.5 }), ...bars, ...lines),
    make("div", { class: "ends" }, make("small", {}, clock(first * 1000)), make("small", {}, "now")));
}

export function beginHistory() {
  at("ranges").append(...Object.keys(ranges).map((name) => make("button", { type: "button", value: name, ariaPressed: name === chosen }, name)));
  at("ranges").addEventListener("click", ({ target }) => {
    if (!(target.value in ranges)) return;
    chosen = target.value;
    for (const button of at("ranges").children) button.ariaPressed = button.value === chosen;
    lookAtHistory().catch(() => {});  // the page's next look says so
  });
}
