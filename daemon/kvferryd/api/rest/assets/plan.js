// The plan between two engines as a drawing: sources on the left, readers on the right, and what flows between them.
// Each rank has a map of the cache: across lie the positions of the sharded axis (heads, say), down the layers.

import { at, make, svg } from "./dom.js";
import { ask } from "./ask.js";
import { plural, ranges, size } from "./units.js";

const TOP = 18, GAP = 16, ROW = 3, BAND = [9, 44];
let shown = "", plan = null, width = 0;

const sum = (list, of) => list.reduce((all, each) => all + of(each), 0);
const hue = (element, rank) => {
  element.style.setProperty("--hue", (215 + rank * 137.5) % 360);
  return element;
};
// What a part weighs: its bytes of a token. A token shard has only every n-th token, a state counts once a request.
const weight = (read) => read.nbytes / (read.token_shard.size || 1);
const whole = (read) => !read.axis || (read.start === 0 && read.stop === read.total);
const share = (read) => whole(read) ? read.axis ? `every ${read.axis}` : "all of it" : `${read.axis} ${ranges([...Array(read.stop - read.start).keys()].map((i) => read.start + i))} of ${read.total}`;
const tokens = (read) => read.kind === "state" ? "state" : read.token_shard.size > 1 ? `every token of shard ${read.token_shard.rank} of ${read.token_shard.size}` : "every token";

// Components that look alike share a band of the map, and a row of it is a layer.
function bands(reads) {
  const found = Map.groupBy(reads, (read) => [read.axis, read.total, ...read.components].join("\n"));
  let top = 0;
  return new Map([...found].map(([name, list]) => {
    const layers = [...new Set(list.flatMap((read) => read.layers))].sort((a, b) => a - b);
    const height = Math.min(Math.max(layers.length * ROW, BAND[0]), BAND[1]), band = { top, height, layers };
    top += height + 2;
    return [name, band];
  }));
}

function cacheMap(reads, every, x, y, wide) {
  const drawn = [...every.values()].map((band) => svg("rect", { class: "empty", x, y: y + band.top, width: wide, height: band.height, rx: 2 }));
  for (const read of reads) {
    const band = every.get([read.axis, read.total, ...read.components].join("\n")), row = band.height / band.layers.length;
    const at = read.layers.map((layer) => band.layers.indexOf(layer));
    const { rank: turn = 0, size: turns = 1 } = read.token_shard;
    for (let i = 0; i < at.length;) {
      let count = 1;
      while (at[i + count] === at[i] + count) count += 1;
      const height = count * row / turns;
      drawn.push(hue(svg("rect", {
        class: "part", x: x + wide * read.start / read.total, y: y + band.top + at[i] * row + turn * height, rx: 2, height,
        width: Math.max(1.5, wide * (read.stop - read.start) / read.total - 1),
      }, svg("title", {}, `${read.components.join(", ")}, layers ${ranges(read.layers)}, ${share(read)}, ${tokens(read)}, from rank ${read.source}`)), read.source));
      i += count;
    }
  }
  return drawn;
}

function drawing() {
  const { reads } = plan, every = bands(reads), phone = width < 560;
  const tall = Math.max(...[...every.values()].map((band) => band.top + band.height)), step = TOP + tall + GAP;
  const side = Math.min(width * (phone ? 0.33 : 0.26), 260), right = width - side;
  const column = (count, most) => (rank) => (most - count) * step / 2 + rank * step;
  const readers = plan.world_size, sources = plan.source_world_size, most = Math.max(readers, sources);
  const leftY = column(sources, most), rightY = column(readers, most);
  const box = (rank, x, y, list, of) => svg("g", {}, svg("text", { x, y: y + 12 }, `rank ${rank}`),
    svg("text", { x: x + side, y: y + 12, class: "amount" }, list.length ? of : "nothing"), cacheMap(list, every, x, y + TOP, side));
  const amount = (list) => `${size(sum(list, weight))}${phone ? "" : " a token"}`;
  const boxes = [
    ...[...Array(sources).keys()].map((rank) => [rank, 0, leftY(rank), reads.filter((read) => read.source === rank)]),
    ...[...Array(readers).keys()].map((rank) => [rank, right, rightY(rank), reads.filter((read) => read.reader === rank)]),
  ].map(([rank, x, y, list]) => box(rank, x, y, list, amount(list.filter((read) => read.kind === "paged"))));
  // Ribbons: as thick as their share of the most that any rank gives or takes.
  const pairs = [...Map.groupBy(reads, (read) => `${read.source} ${read.reader}`).values()];
  const each = (of, rank) => sum(reads.filter((read) => read[of] === rank), weight);
  const heaviest = Math.max(...[...Array(most).keys()].flatMap((rank) => [each("source", rank), each("reader", rank)]));
  const from = {}, to = {}, half = (right + side) / 2;
  const ribbons = pairs.toSorted((a, b) => a[0].source - b[0].source || a[0].reader - b[0].reader).map((list) => {
    const { source, reader } = list[0], thick = Math.max(1.5, sum(list, weight) / heaviest * tall);
    const a = leftY(source) + TOP + (from[source] ?? 0), b = rightY(reader) + TOP + (to[reader] ?? 0);
    from[source] = (from[source] ?? 0) + thick;
    to[reader] = (to[reader] ?? 0) + thick;
    const x = side + 4, z = right - 4;
    const path = `M${x} ${a}C${half} ${a} ${half} ${b} ${z} ${b}V${b + thick}C${half} ${b + thick} ${half} ${a + thick} ${x} ${a + thick}Z`;
    return hue(svg("path", { class: "ribbon", d: path }, svg("title", {}, `rank ${reader} reads from rank ${source}: ${list.map((read) => `${read.components.join(", ")} ${share(read)}`).join("; ")}`)), source);
  });
  const label = `Who reads what from whom: ${pairs.map(([{ source, reader }]) => `rank ${reader} from rank ${source}`).join(", ")}`;
  return svg("svg", { viewBox: `0 0 ${width} ${most * step - GAP}`, width, height: most * step - GAP, role: "img", "aria-label": label }, ...ribbons, ...boxes);
}

function listing() {
  const heads = ["reader", "source", "components", "layers", "share", "tokens", "bytes"];
  const rows = plan.reads.toSorted((a, b) => a.reader - b.reader || a.source - b.source).map((read) => [
    `rank ${read.reader}`, make("span", {}, hue(make("i", { class: "swatch" }), read.source), `rank ${read.source}`), read.components.join(", "), ranges(read.layers),
    share(read), tokens(read), `${size(read.nbytes)} a ${read.kind === "state" ? "request" : "token"}`,
  ]);
  return make("table", { class: "cells" }, make("thead", {}, make("tr", {}, heads.map((head) => make("th", { scope: "col" }, head)))),
    make("tbody", {}, rows.map((row) => make("tr", {}, row.map((value, i) => {
      const cell = make("td", {}, value);
      cell.dataset.name = heads[i];
      return cell;
    })))));
}

function draw() {
  const box = at("plan");
  const close = make("a", { href: "#plan=", class: "close", ariaLabel: "Close the plan" }, "×");
  if (!plan?.reads) {
    box.replaceChildren(close, make("p", { class: "none" }, plan?.why ?? "Asking every rank for its layout."));
    return;
  }
  const { source_engine_id, engine_id, source_world_size, world_size, missing } = plan;
  const state = plan.reads.some((read) => read.kind === "state"), rings = plan.reads.some((read) => read.token_shard.size > 1);
  box.replaceChildren(close,
    make("div", { class: "sides" }, make("h3", {}, source_engine_id, make("small", {}, ` ${plural(source_world_size, "rank")}, read by`)),
      make("h3", {}, engine_id, make("small", {}, ` ${plural(world_size, "rank")}`))),
    drawing(),
    make("p", { class: "soft" }, "Across: the positions of the sharded axis. Down: the layers. A colour is a source rank.",
      rings ? " Where tokens are sharded, the height of a layer is shared by the shards." : "", state ? " States are read once a request, and are not counted in the bytes of a token." : ""),
    Object.entries(missing).map(([rank, why]) => make("p", { class: "note" }, `What rank ${rank} of ${engine_id} reads is not known: ${why}`)),
    listing());
}

// Show the plan with this peer engine; "" hides it.
export async function setPlan(engineId) {
  if (engineId === shown) return;
  shown = engineId;
  plan = null;
  at("plan").hidden = !engineId;
  if (!engineId) return;
  draw();
  try {
    const told = await ask(`v1/plan?engine_id=${encodeURIComponent(engineId)}`);
    if (shown === engineId) plan = told;
  } catch (error) {
    if (shown === engineId) plan = { why: `No plan: ${error.message}` };
  }
  draw();
  at("plan").scrollIntoView({ block: "nearest" });
}

new ResizeObserver(([entry]) => {
  const now = Math.floor(entry.contentRect.width);
  if (now && now !== width) {
    width = now;
    if (plan) draw();
  }
}).observe(at("plan"));
