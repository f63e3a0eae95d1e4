// The engines beside this daemon, and how each holds its cache.

import { at, chip, entries, make, pageOf, say } from "./dom.js";
import { plural, ranges, size } from "./units.js";

const extent = (component, name) => component.axes.filter((axis) => axis.name === name).reduce((all, axis) => all * axis.extent, 1);

// A component in words: its axes beside those of tokens, its type, its share of the sharded axis.
function shape(component) {
  const names = [...new Set(component.axes.map((axis) => axis.name))].filter((name) => name !== "block" && name !== "slot");
  const { shard } = component;
  const share = shard ? `, ${shard.axis} ${shard.start}–${shard.start + extent(component, shard.axis) - 1} of ${shard.total}` : "";
  return `${names.map((name) => `${extent(component, name)} ${name}`).join(" × ")} ${component.dtype}${share}`;
}

function layout(manifest) {
  const found = [];
  for (const group of manifest.groups ?? []) {
    const components = manifest.components.filter((component) => component.group === group.name);
    const blocks = group.kind === "state" ? `state of ${plural(group.num_blocks, "request")}` : `${plural(group.num_blocks, "block")} of ${plural(group.block_size, "token")}`;
    const ring = group.token_shard, tokens = ring && ring.size > 1 ? `, tokens ${ring.rank} of ${ring.size}` : "";
    const kinds = Map.groupBy(components, shape);
    found.push([group.name, make("span", {}, `${blocks}${group.window ? `, window ${group.window}` : ""}${tokens}`,
      [...kinds].map(([kind, list]) => make("small", {}, `${[...new Set(list.map((each) => each.name))].join(", ")}: ${kind}, layers ${ranges(list.map((each) => each.layer))}`)))]);
  }
  const regions = manifest.regions ?? [];
  if (regions.length) found.push(["memory", `${size(regions.reduce((sum, region) => sum + region.nbytes, 0))} ${regions[0].kind} in ${plural(regions.length, "region")}`]);
  if (manifest.model) found.push(["model", manifest.model.name]);
  return found;
}

// The memory that it has handed over or was given, and that of its staging arena.
const held = (engine) => `${size(engine.cache_bytes)} of cache, ${engine.arena_bytes ? `an arena of ${size(engine.arena_bytes)}` : "no arena"}`;

// The other ranks: where their daemons are, each a link to its page where this host knows that.
function others({ rank, members, rest }) {
  const known = Object.entries(members).filter(([other]) => Number(other) !== rank);
  return known.length ? make("span", {}, known.map(([other, address]) => make("small", {}, pageOf(rest[other], `rank ${other}`), ` at ${address}`))) : "";
}

export function setEngines(all) {
  say("engines-said", all.length ? plural(all.length, "rank") + " beside this daemon" : "");
  at("engines").replaceChildren(all.length ? make("div", { class: "grid" }, all.map((engine) => make("div", { class: "card engine" },
    make("div", { class: "head" }, make("h3", {}, engine.engine_id), chip(engine.attached ? "attached" : "gone", engine.attached ? "good" : "bad")),
    (engine.notes ?? []).map((note) => make("p", { class: "note" }, note)),
    make("dl", { class: "pairs" }, entries([["rank", `${engine.rank} of ${engine.world_size}`], ["others", others(engine)], ["epoch", make("code", {}, engine.epoch)], ["holds", held(engine)], ...layout(engine.manifest ?? {})])))))
    : make("p", { class: "card none" }, "None yet. An engine attaches at this daemon's socket."));
}
