// How much moves, and what waits: the first look.

import { at, entries, make, svg } from "./dom.js";
import { over, slowest, speed, total } from "./record.js";
import { clock, count, rate, size, span } from "./units.js";

const BINS = 60, BIN_MS = 5000, WIDTH = 600, HEIGHT = 84;

// Bytes in each bin of the last five minutes: those of a transfer spread evenly over the time in which it read.
function binned(records, end) {
  const bins = new Float64Array(BINS), first = end - BINS * BIN_MS;
  for (const record of records) {
    const bytesPerS = speed(record), start = record.created_at * 1000;
    if (!bytesPerS || start < first - 3600e3) continue;
    const spent = slowest(record).phases_ms ?? {};
    const began = start + (spent.waiting ?? 0) + (spent.connecting ?? 0), ended = began + record.bytes / bytesPerS * 1000;
    for (let bin = Math.max(0, Math.floor((began - first) / BIN_MS)); bin < BINS && first + bin * BIN_MS < ended; bin += 1) {
      const overlap = Math.min(ended, first + (bin + 1) * BIN_MS) - Math.max(began, first + bin * BIN_MS);
      bins[bin] += Math.max(0, overlap) / 1000 * bytesPerS;
    }
  }
  return bins;
}

export function drawThroughput(records, nowMs) {
  const end = Math.ceil(nowMs / BIN_MS) * BIN_MS, bins = binned(records, end), most = Math.max(...bins);
  const step = WIDTH / BINS;
  const bars = [...bins].map((bytes, i) => {
    const height = most ? Math.max(bytes ? 1.5 : 0, bytes / most * (HEIGHT - 2)) : 0;
    return svg("rect", { x: i * step + 0.75, y: HEIGHT - height, width: step - 1.5, height, rx: 1 });
  });
  const title = most ? `up to ${rate(most / BIN_MS * 1000)}` : "nothing moved";
  at("throughput").replaceChildren(
    make("figcaption", {}, make("span", {}, "Throughput"), make("b", {}, title), make("small", {}, "mean of 5 s, last 5 minutes")),
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 1}`, preserveAspectRatio: "none", role: "img", "aria-label": `Throughput: ${title}` },
      svg("line", { x1: 0, y1: HEIGHT + 0.5, x2: WIDTH, y2: HEIGHT + 0.5 }), ...bars),
    make("div", { class: "ends" }, make("small", {}, clock(end - BINS * BIN_MS)), make("small", {}, "now")));
}

function median(numbers) {
  const sorted = numbers.toSorted((a, b) => a - b);
  return sorted.length ? sorted[Math.floor((sorted.length - 1) / 2)] : NaN;
}

export function drawTotals(records, leases, engines) {
  const ended = records.filter(over), done = ended.filter((record) => record.state === "done");
  const failed = ended.filter((record) => record.state === "failed").length, live = records.length - ended.length;
  const waiting = records.filter((record) => record.state === "waiting").length;
  const held = leases.filter((lease) => !over(lease));
  const reading = held.filter((lease) => lease.readers_open).length;
  const cell = (value, more, tone) => make("span", { class: tone ?? "" }, value, more ? make("small", {}, ` ${more}`) : null);
  at("totals").replaceChildren(...entries([
    ["live", cell(count(live), waiting ? `${count(waiting)} waiting` : "")],
    ["done", cell(count(done.length), size(done.reduce((sum, record) => sum + record.bytes, 0)))],
    ["failed", cell(count(failed), ended.length ? `${(100 * failed / ended.length).toFixed(failed ? 1 : 0)} %` : "", failed ? "bad" : "")],
    ["half took under", cell(span(median(done.map((record) => total(slowest(record))))))],
    ["leases held", cell(count(held.length), reading ? `${count(reading)} being read` : "")],
    ["engines", cell(count(engines.filter((engine) => engine.attached).length), engines.some((engine) => !engine.attached) ? "one gone" : "attached")],
  ]));
}
