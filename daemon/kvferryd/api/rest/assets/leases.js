// What this daemon serves: requests that are published here, and who reads them.

import { at, chip, keyed, make, say } from "./dom.js";
import { over } from "./record.js";
import { count, plural, span } from "./units.js";

const MOST = 100;
let live = [];

function create() {
  const parts = ["state", "request", "engine", "tokens", "readers", "left"].map((name) => make("td", { class: ["tokens", "left"].includes(name) ? `${name} num` : name }));
  return Object.assign(make("tr", {}, parts), { parts });
}

function left(lease) {
  if (over(lease)) return "–";
  if (lease.readers_open) return "held by a reader";
  return lease.expires_in_ms === null || lease.expires_in_ms === undefined ? "–" : span(Math.max(0, lease.until - performance.now()));
}

function draw(row, lease) {
  const [state, request, engine, tokens, readers, end] = row.parts;
  row.className = over(lease) ? "" : "live";
  state.replaceChildren(chip(lease.state));
  request.textContent = lease.request_id;
  engine.textContent = lease.engine_id;
  tokens.textContent = count(lease.num_tokens);
  readers.textContent = `${lease.readers_open ? `${lease.readers_open} reading, ` : ""}${lease.readers_closed} of ${lease.readers_expected} done`;
  end.textContent = left(lease);
}

export function setLeases(all) {
  const held = all.filter((lease) => !over(lease)).length;
  say("leases-said", all.length ? `${plural(held, "lease")} held, ${count(all.length - held)} ended` : "");
  const shown = all.toSorted((a, b) => over(a) - over(b)).slice(0, MOST);
  for (const lease of shown) lease.until = performance.now() + (lease.expires_in_ms ?? 0);
  live = shown.filter((lease) => !over(lease));
  const box = at("leases");
  if (!shown.length) {
    box.replaceChildren(make("p", { class: "none" }, "None. An engine that publishes a request's KV makes one."));
    return;
  }
  if (!box.querySelector("tbody")) {
    const heads = ["state", "request", "engine", "tokens", "readers", "time left"];
    box.replaceChildren(make("table", { class: "leases" }, make("thead", {}, make("tr", {}, heads.map((name) => make("th", { scope: "col", class: ["tokens", "time left"].includes(name) ? "num" : "" }, name)))), make("tbody")));
  }
  keyed(box.querySelector("tbody"), shown, (lease) => `${lease.engine_id}\n${lease.epoch}\n${lease.request_id}`, create, draw);
}

export function tickLeases() {
  const rows = at("leases").querySelector("tbody")?.kept;
  for (const lease of live) {
    const row = rows?.get(`${lease.engine_id}\n${lease.epoch}\n${lease.request_id}`);
    if (row) row.parts.at(-1).textContent = left(lease);
  }
}
