// Peers as a matrix: an engine is a row, each of its ranks a cell. Below them who reads from this daemon.

import { at, keyed, make, pageOf, say } from "./dom.js";
import { now } from "./ask.js";
import { clock, count, plural, rate, size, span } from "./units.js";

const TONE = { connected: "good", idle: "", failing: "bad", lost: "bad" };

const ago = (seconds) => {
  const passed = Math.max(0, Math.round(now() / 1000 - seconds));
  return passed < 120 ? `answered ${passed} s ago` : `answered ${span(passed * 1000)} ago`;
};
const line = (name, ...value) => make("p", { class: name }, ...value);

// The phase that took the longest in the last five minutes.
function worst(phases) {
  const [name, ms] = Object.entries(phases).map(([name, times]) => [name, times.worst_ms]).toSorted((a, b) => b[1] - a[1])[0] ?? ["", 0];
  return ms ? line("worst", make("small", {}, `slowest of 5 min: ${name} ${span(ms)}`)) : null;
}

function cell(peer) {
  const { last_error: error } = peer;
  return make("div", { class: `rank ${peer.state}` },
    line("which", make("i", { class: `dot ${TONE[peer.state] ?? ""}` }), make("b", {}, `rank ${peer.rank}`), make("small", {}, peer.state)),
    line("speed", make("b", {}, rate(peer.bytes_per_s ?? 0)), make("small", {}, peer.path || "no path taken yet")),
    line("", make("small", {}, [peer.transfers ? plural(peer.transfers, "transfer") : "", peer.p50_ms ? `half within ${span(peer.p50_ms)}` : "", peer.bytes_read ? size(peer.bytes_read) : ""].filter(Boolean).join(", "))),
    worst(peer.phases ?? {}),
    line("where", pageOf(peer.rest, peer.address)), line("", peer.last_contact_at ? make("small", { class: "ago", since: peer.last_contact_at }, ago(peer.last_contact_at)) : make("small", {}, "has not answered yet")),
    error ? line("why", make("b", {}, error.code), ` ${error.message}`, make("small", {}, ` ${clock(peer.last_error_at * 1000)}${peer.failures ? `, ${plural(peer.failures, "failure")} since` : ""}`)) : null);
}

function create({ ranks: [{ engine_id, epoch, version, state }] }) {
  const link = state === "lost" ? null : make("a", { href: `#plan=${encodeURIComponent(engine_id)}` }, "who reads what");
  const who = make("div", { class: "who" }, make("h3", {}, engine_id), line("soft", `epoch ${epoch}`), version ? line("soft", `kvferry ${version}`) : null, link);
  const parts = [make("div", { class: "ranks" }), make("dl", { class: "ways" })];
  return Object.assign(make("div", { class: "peer" }, who, parts), { parts });
}

function draw(row, { ranks }) {
  row.parts[0].replaceChildren(...ranks.map(cell));
  row.parts[1].replaceChildren(...Object.entries(ranks[0].ways).map(([way, why]) =>
    make("div", { class: why ? "cannot" : "can" }, make("dt", {}, way), make("dd", {}, why || "possible"))));
}

function reader(inbound) {
  return make("tr", {}, make("td", { class: "engine" }, inbound.engine_id, make("small", {}, ` rank ${inbound.rank} of ${inbound.world_size}`)), make("td", { class: "where" }, inbound.address.replace(/^ipv[46]:/, "")),
    make("td", { class: "num" }, make("small", {}, "since "), clock(inbound.since * 1000)), make("td", { class: "num" }, count(inbound.reading), make("small", {}, " reading")),
    make("td", { class: "num" }, count(inbound.leases), make("small", {}, " read")), make("td", { class: "num" }, size(inbound.bytes)));
}

const named = (engineId, rank) => engineId ? `${engineId} rank ${rank}` : "a daemon that was never met";

export function setPeers({ peers, lost, unmet, inbound, failed }) {
  const all = [...peers, ...lost.map((peer) => ({ ...peer, state: "lost", ways: {} }))];
  const engines = Map.groupBy(all.toSorted((a, b) => a.rank - b.rank), (peer) => `${peer.engine_id}\n${peer.epoch}\n${peer.state === "lost"}`);
  say("peers-said", [peers.length ? `${plural(peers.length, "rank")} to read from` : "", lost.length ? `${count(lost.length)} lost` : "", inbound.length ? `${plural(inbound.length, "rank")} read here` : ""].filter(Boolean).join(", "));
  keyed(at("peers"), [...engines].map(([name, ranks]) => ({ name, ranks })), ({ name }) => name, create, draw);
  at("inbound").hidden = !inbound.length;
  at("inbound").tBodies[0].replaceChildren(...inbound.toSorted((a, b) => a.rank - b.rank).map(reader));
  at("unmet").replaceChildren(...unmet.map((each) =>
    make("li", {}, make("b", {}, named(each.engine_id, each.rank)), ` at ${each.address}: ${each.last_error.message}`)));
  at("failed-peers").replaceChildren(...failed.map((each) => make("li", {}, "The last request that failed to read from ", make("b", {}, each.engine_id), ": ",
    make("a", { href: `#transfer=${encodeURIComponent(each.transfer_id)}` }, each.request_id), `, ${clock(each.at * 1000)}, ${each.error.code}`)));
  at("no-peers").hidden = all.length + unmet.length + inbound.length > 0;
}

export function tickPeers() {
  for (const said of at("peers").querySelectorAll(".ago")) said.textContent = ago(said.since);
}
