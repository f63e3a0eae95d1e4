// How much moves, and what waits: the first look.

import { at, entries, make, svg } from "./dom.js";
import { median } from "./record.js";
import { clock, count, rate, size, span } from "./units.js";

const BINS = 60, BIN_MS = 5000, WIDTH = 600, HEIGHT = 84;
const NONE = { read: 0, served: 0 };
const bins = new Map();
let before = null;

// Bytes that moved between two moments, spread evenly.
function moved(what, bytes, from, to) {
  for (let bin = Math.floor(from / BIN_MS); bin * BIN_MS < to; bin += 1) {
    const part = (Math.min(to, (bin + 1) * BIN_MS) - Math.max(from, bin * BIN_MS)) / Math.max(to - from, 1);
    const held = bins.get(bin) ?? { ...NONE };
    held[what] += part * bytes;
    bins.set(bin, held);
  }
}

// From the first answer on throughput is what the daemon's totals grow by; what was read before, the records tell.
// Both are this rank's share. ownRanks: by engine.
export function sample(totals, records, ownRanks, now) {
  for (const { engine_id, ended_at, ranks } of before ? [] : records) {
    const share = ranks.find(({ rank }) => rank === ownRanks.get(engine_id));
    if (!ended_at || !share?.bytes_per_s || now - ended_at * 1000 > BINS * BIN_MS) continue;
    moved("read", share.bytes, ended_at * 1000 - share.bytes / share.bytes_per_s * 1000, ended_at * 1000);
  }
  if (before && totals.read_bytes >= before.read_bytes && totals.served_bytes >= before.served_bytes) {
    moved("read", totals.read_bytes - before.read_bytes, before.now, now);
    moved("served", totals.served_bytes - before.served_bytes, before.now, now);
  }
  before = { ...totals, now };
  for (const bin of bins.keys()) if (bin * BIN_MS < now - (BINS + 1) * BIN_MS) bins.delete(bin);
}

export function drawThroughput(now) {
  const first = Math.floor(now / BIN_MS) - BINS + 1, step = WIDTH / BINS;
  const shown = Array.from({ length: BINS }, (_, i) => bins.get(first + i) ?? NONE);
  const most = Math.max(...shown.map(({ read, served }) => read + served));
  const bars = shown.flatMap(({ read, served }, i) => {
    const scale = most ? (HEIGHT - 2) / most : 0, bar = { x: i * step + 0.75, width: step - 1.5, rx: 1 };
    return [svg("rect", { ...bar, class: "read", y: HEIGHT - read * scale, height: read * scale }),
      svg("rect", { ...bar, class: "served", y: HEIGHT - (read + served) * scale, height: served * scale })];
  });
  const title = most ? `up to ${rate(most / BIN_MS * 1000)}` : "nothing moved";
  at("throughput").replaceChildren(
    make("figcaption", {}, make("span", {}, "Throughput"), make("b", {}, title), make("span", { class: "key" }, make("i", { class: "read" }), "read ", make("i", { class: "served" }), "served")),
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 1}`, preserveAspectRatio: "none", role: "img", "aria-label": `Throughput: ${title}` },
      svg("line", { x1: 0, y1: HEIGHT + 0.5, x2: WIDTH, y2: HEIGHT + 0.5 }), ...bars),
    make("div", { class: "ends" }, make("small", {}, clock(first * BIN_MS)), make("small", {}, "this rank's share, mean of 5 s"), make("small", {}, "now")));
}

export function drawTotals(totals, records) {
  const { transfers, leases, waiting } = totals;
  const live = ["waiting", "connecting", "reading", "verifying"].reduce((sum, state) => sum + (transfers[state] ?? 0), 0);
  const waits = Object.entries(waiting).filter(([, number]) => number).map(([what, number]) => `${count(number)} for ${what}`).join(", ");
  const done = records.filter((record) => record.state === "done" && record.took_ms);
  const cell = (value, more, tone) => make("span", { class: tone ?? "" }, value, more ? make("small", {}, ` ${more}`) : null);
  at("totals").replaceChildren(...entries([
    ["under way", cell(count(live), waits)],
    ["done", cell(count(transfers.done ?? 0), done.length ? `median ${span(median(done.map((record) => record.took_ms)))}` : "")],
    ["failed", cell(count(transfers.failed ?? 0), transfers.aborted ? `${count(transfers.aborted)} aborted` : "", transfers.failed ? "bad" : "")],
    ["queue", cell(count(totals.queue))],
    ["leases held", cell(count((leases.publishing ?? 0) + (leases.published ?? 0)), totals.live_readers ? `${count(totals.live_readers)} reading` : "")],
    ["read", cell(size(totals.read_bytes))],
    ["served", cell(size(totals.served_bytes))],
    ["quarantine", cell(size(totals.quarantined_bytes), "", totals.quarantined_bytes ? "bad" : "")],
    ["arena", totals.staging_bytes ? cell(size(totals.staging_used_bytes), `of ${size(totals.staging_bytes)}`) : cell("none")],
  ]));
}
