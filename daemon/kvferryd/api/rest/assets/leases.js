// What this daemon serves: requests that are published here, who reads them and who has.

import { at, chip, keyed, make, say } from "./dom.js";
import { over } from "./record.js";
import { clock, count, ranges, size, span } from "./units.js";

const COLUMNS = [["time", "since", ""], ["state", "state", ""], ["request", "request", ""], ["readers", "readers", ""], ["tokens", "tokens", "num"],
  ["bytes", "served", "num"], ["left", "time left or age", "num"]];
const SAID = { reading: "reading", read: "read", left: "left before the end" };
let live = [];

function create(lease) {
  const parts = Object.fromEntries(COLUMNS.map(([name, , classes]) => [name, make("td", { class: `${name} ${classes}` })]));
  return Object.assign(make("tr", {}, Object.values(parts)), { parts });
}

function left(lease) {
  if (over(lease)) return span(lease.age_ms);
  if (lease.readers_open) return "held by a reader";
  const ms = lease.until - performance.now();
  return lease.expires_in_ms === null ? "–" : ms > 0 ? span(ms) : "over";
}

// Ranks of one engine that fare alike in one attempt, together.
function readers(lease) {
  const alike = Map.groupBy(lease.readers, (reader) => `${reader.engine_id}\n${reader.state}\n${reader.attempt}`);
  const said = [...alike.values()].map((list) => make("span", { class: list[0].state === "left" ? "bad" : "" }, make("code", {}, list[0].engine_id),
    make("small", {}, `${list[0].world_size > 1 ? ` rank ${ranges(list.map((reader) => reader.rank))}` : ""} ${SAID[list[0].state] ?? list[0].state}, attempt ${list[0].attempt}`)));
  const open = lease.readers_expected - lease.readers_closed;
  return said.length ? said.flatMap((each, i) => i ? [make("br"), each] : [each])
    : [make("small", {}, open > 0 && !over(lease) ? `${count(open)} to come` : "nobody")];
}

function draw(row, lease) {
  const { parts } = row;
  row.className = over(lease) ? "over" : "live";
  parts.time.textContent = clock(lease.created_at * 1000);
  parts.state.replaceChildren(chip(lease.state));
  parts.request.replaceChildren(make("span", {}, lease.request_id), make("small", {}, ` ${lease.engine_id}, lease ${lease.lease}`));
  if (lease.reason && lease.state !== "released") parts.request.append(make("p", { class: "why" }, lease.reason));
  parts.readers.replaceChildren(...readers(lease));
  parts.tokens.textContent = count(lease.num_tokens);
  parts.bytes.textContent = lease.bytes ? size(lease.bytes) : "–";
  parts.left.textContent = left(lease);
}

const name = (lease) => `${lease.engine_id}\n${lease.epoch}\n${lease.request_id}\n${lease.lease}`;

export function setLeases({ leases, total }) {
  const ended = leases.filter(over).length;
  say("leases-said", leases.length ? `${count(total)} held${total > leases.length - ended ? `, the newest ${count(leases.length - ended)} shown` : ""}, the last ${count(ended)} that ended` : "");
  for (const lease of leases) lease.until = performance.now() + (lease.expires_in_ms ?? 0);
  const shown = leases.toSorted((a, b) => over(a) - over(b) || b.created_at - a.created_at);
  live = shown.filter((lease) => !over(lease));
  const box = at("leases");
  if (!shown.length) {
    box.replaceChildren(make("p", { class: "none" }, "None. An engine that publishes a request's KV makes one."));
    return;
  }
  if (!box.querySelector("tbody"))
    box.replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, COLUMNS.map(([, heading, classes]) => make("th", { scope: "col", class: classes }, heading)))), make("tbody")));
  keyed(box.querySelector("tbody"), shown, name, create, draw);
}

export function tickLeases() {
  const rows = at("leases").querySelector("tbody")?.kept;
  for (const lease of live) {
    const row = rows?.get(name(lease));
    if (row) row.parts.left.textContent = left(lease);
  }
}
